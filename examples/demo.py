"""Train a small GPT-2 over pipeline stages, save it in parallel, merge, reload with plain transformers, and write.

    torchrun --nproc-per-node 2 examples/demo.py --pipeline-parallel-size 2

What differs from a script for one process is marked with (1) and (2).
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import penstock
from corpus import read_texts, token_blocks, train_tokenizer

BATCH_SIZE = 16  # rows in the batch of all pipelines together
MICROBATCH_SIZE = 2  # the same for every number of stages, so that dropout falls alike in all runs
SEQUENCE_LENGTH = 128
VOCABULARY_SIZE = 1024
CHARACTERS = 1_500_000  # about 500,000 tokens; 200 steps see most of them once
LEARNING_RATE = 3e-3
PROMPT = "def __init__(self"

console = Console(highlight=False, soft_wrap=True)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    pipeline_parallel_size: Annotated[int, typer.Option(help="Stages of the pipeline.")] = 2,
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 120,
    schedule: Annotated[str, typer.Option(help="The pipeline schedule, as `penstock simulate` lists them.")] = "auto",
    text: Annotated[
        str | None, typer.Option(help="A text file, a folder, or a dataset's name. Default: Python's standard library.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Where the models and the loss curve are written.")] = Path("runs/demo"),
) -> None:
    """Train a small GPT-2 over pipeline stages and use the result with plain transformers."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    texts = read_texts(text, CHARACTERS)
    tokenizer = train_tokenizer(texts, VOCABULARY_SIZE)
    rows = token_blocks(tokenizer, texts, SEQUENCE_LENGTH)

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=SEQUENCE_LENGTH,
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = GPT2LMHeadModel(config).double()  # training amplifies rounding: in single precision it would show
    num_parameters = sum(parameter.numel() for parameter in model.parameters())

    model = penstock.initialize(  # (1)
        model,
        config={
            "model_parallelism": {
                "pipeline_parallel_size": pipeline_parallel_size,
                "microbatch_size": MICROBATCH_SIZE,
                "schedule": schedule,
            }
        },
    )
    leader = not dist.is_initialized() or dist.get_rank() == 0
    if not leader:
        console.quiet = True
    num_own = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"GPT-2, {num_parameters / 1e6:.2f} M parameters, {num_own / 1e6:.2f} M of them on this rank; "
        f"{model.data_parallel_size} pipeline(s) of {pipeline_parallel_size} rank(s); "
        f"schedule {model.pipeline.make_schedule(1).name}; {rows.numel():,} tokens of text"
    )

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)

    losses: list[float] = []
    bubbles: list[float | None] = []
    model.train()
    begin = time.perf_counter()
    with progress_bar(steps) as show:
        for batch in batches(rows, steps).chunk(model.data_parallel_size, dim=1)[model.data_parallel_rank]:
            batch = batch.to(model.device)
            optimizer.zero_grad()
            loss = 0.0
            for out in model(input_ids=batch, labels=batch):  # (2)
                out.loss.backward()
                loss += out.loss.item()
            loss = sum_over_pipelines(loss, model)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss)
            bubbles.append(model.pipeline.last_step.bubble)
            tokens_per_second = len(losses) * BATCH_SIZE * SEQUENCE_LENGTH / (time.perf_counter() - begin)
            show(len(losses), loss, tokens_per_second, bubbles[-1])
    model.eval()

    parallel, merged = output / "parallel", output / "merged"
    model.save_parallelized(parallel)
    model = model.from_parallelized(parallel)
    model.save_parallelized(merged, merge_checkpoints=True)
    if leader:
        tokenizer.save_pretrained(merged)
        record = {"stages": pipeline_parallel_size, "schedule": schedule, "losses": losses, "bubbles": bubbles}
        record |= {"tokens_per_second": round(tokens_per_second), "seconds": round(time.perf_counter() - begin, 1)}
        (output / "curve.json").write_text(json.dumps(record))
        console.print(f"saved {', '.join(sorted(path.name for path in parallel.iterdir()))} in {parallel}")
        console.print(f"merged {', '.join(sorted(path.name for path in merged.iterdir()))} in {merged}")

    # The same words from the pipeline, on every rank, and from the merged folder in plain transformers.
    prompt = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    sampling: dict[str, Any] = {"max_new_tokens": 90, "do_sample": True, "top_k": 20, "temperature": 0.8}
    torch.manual_seed(1)
    from_pipeline = model.generate(**prompt, **sampling)
    if leader:
        reloaded: Any = AutoModelForCausalLM.from_pretrained(merged).eval()
        torch.manual_seed(1)
        from_merged = reloaded.generate(**prompt.to(reloaded.device), **sampling)
        same = torch.equal(from_pipeline.cpu(), from_merged.cpu())
        console.print(f"reloaded with transformers as {type(reloaded).__name__}; a sample from it:")
        console.print(tokenizer.decode(from_merged[0]), style="green", markup=False)
        console.print(f"the pipeline of {pipeline_parallel_size} rank(s) generates the same tokens: {same}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def sum_over_pipelines(loss: float, model: Any) -> float:
    """The loss of the whole batch, from each pipeline's share of it."""
    if model.data_parallel_size == 1:
        return loss
    total = torch.tensor(loss, device=model.device, dtype=torch.float64)
    dist.all_reduce(total)
    found: float = total.item() * model.data_parallel_size / dist.get_world_size()
    return found


def batches(rows: torch.Tensor, steps: int) -> torch.Tensor:
    """Rows for each step, in a fixed random order, taken again when all were seen: [steps, BATCH_SIZE, length]."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    repeats = -(-steps * BATCH_SIZE // len(rows))
    return rows[order.repeat(repeats)[: steps * BATCH_SIZE]].view(steps, BATCH_SIZE, -1)


@contextmanager
def progress_bar(steps: int) -> Iterator[Any]:
    """A bar on the leader's terminal, and a line every tenth of the way that stays in a log file too."""
    columns = [BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn()]
    with Progress(*columns, console=console, disable=console.quiet) as progress:
        task = progress.add_task("train", total=steps, text="")

        def show(step: int, loss: float, tokens_per_second: float, bubble: float | None) -> None:
            text = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
            text += "" if bubble is None else f"  bubble {bubble:.0%}"  # a GPU's host does not wait, so it cannot tell
            progress.update(task, completed=step, text=text)
            if step == 1 or step % max(1, steps // 10) == 0:
                progress.console.print(f"step {step:4d}  {text}")

        yield show


if __name__ == "__main__":
    app()
