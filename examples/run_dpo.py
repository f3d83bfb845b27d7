"""Train by direct preference optimisation (DPO, https://arxiv.org/abs/2305.18290) over pipeline stages, in an own loop.

torchrun --standalone --nproc-per-node 2 run_dpo.py --stages 2

The loss is a criterion; it is that of TRL's DPOTrainer. Without --model a small Llama with random weights learns to
prefer the second half of a line of text to that of another line. --lora trains adapters.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

import penstock
from common import VOCABULARY_SIZE, is_leader
from corpus import read_texts, train_tokenizer


class DPO:
    """The criterion. Rows of a batch are a chosen text, the one rejected for it, the next chosen text, and so on."""

    reduction = "sum"  # microbatches' results are added up

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def __call__(self, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        gained = log_probabilities(outputs.logits, inputs) - inputs["reference"]
        chosen, rejected = gained[0::2], gained[1::2]
        found: torch.Tensor = -functional.logsigmoid(self.beta * (chosen - rejected)).sum() / inputs["num_pairs"]
        return found


def log_probabilities(logits: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Of each row's completion, given its prompt: shape (rows,)."""
    following, counted = inputs["input_ids"][:, 1:, None], inputs["completion_mask"][:, 1:]
    found: torch.Tensor = (logits[:, :-1].log_softmax(-1).gather(-1, following)[..., 0] * counted).sum(-1)
    return found


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's folder or name; without it a small model with random weights")
    parser.add_argument("--dataset", help="a file or a folder of texts; without it text of this machine")
    parser.add_argument("--stages", type=int, default=2, help="ranks of a pipeline; more ranks make more pipelines")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--batch-size", type=int, default=8, help="pairs in a step of a pipeline")
    parser.add_argument("--microbatches", type=int, default=4, help="of a step; they divide the batch size")
    parser.add_argument("--beta", type=float, default=0.1, help="how far the model may go from what it was")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--adam-epsilon", type=float, default=1e-8, help="larger, it quiets gradients of mere rounding")
    parser.add_argument("--lora", action="store_true", help="train adapters (needs PEFT)")
    parser.add_argument("--output", type=Path, default=Path("output"), help="folder for the model and the losses")
    options = parser.parse_args()
    if options.batch_size % options.microbatches:
        parser.error(f"{options.batch_size} pairs cannot be split into {options.microbatches} microbatches")
    return options


def preferences(texts: Sequence[str]) -> list[dict[str, str]]:
    """Pairs as TRL has them: a prompt, a text to prefer, and one to reject."""
    lines = [line.split() for text in texts for line in text.splitlines()]
    halves = [(words[: len(words) // 2], words[len(words) // 2 :]) for words in lines if len(words) > 4]
    return [
        {"prompt": " ".join(prompt), "chosen": " " + " ".join(chosen), "rejected": " " + " ".join(other)}
        for (prompt, chosen), (_, other) in zip(halves, [*halves[1:], halves[0]], strict=True)
        if chosen != other
    ]


def small_model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


class Collator:
    """Makes a batch of pairs: two rows each, one after the other, so that they come into the same microbatch."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_pipelines: int) -> None:
        self._tokenizer, self._num_pipelines = tokenizer, num_pipelines

    def __call__(self, pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        ids, masks = [], []
        for pair, side in itertools.product(pairs, ("chosen", "rejected")):
            prompt = self._tokenizer(pair["prompt"])["input_ids"]
            completion = self._tokenizer(pair[side] + self._tokenizer.eos_token)["input_ids"]
            ids.append(torch.tensor(prompt + completion))
            masks.append(torch.tensor([0] * len(prompt) + [1] * len(completion)))
        padding = self._tokenizer.pad_token_id or 0
        batch: dict[str, Any] = {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=padding),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
            "completion_mask": pad_sequence(masks, batch_first=True),
        }
        if "reference" in pairs[0]:
            batch["reference"] = torch.tensor([number for pair in pairs for number in pair["reference"]])
            batch["num_pairs"] = len(pairs) * self._num_pipelines  # of all pipelines' batches
        return batch


def add_reference(model: Any, pairs: Sequence[dict[str, Any]], collate: Collator, batch_size: int) -> None:
    """Note for each pair the log-probabilities that the model gives it before it is trained."""
    for start in range(0, len(pairs), batch_size):
        some = pairs[start : start + batch_size]
        batch = on_device(collate(some), model.pipeline.device)
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], criterion=None).logits
        for pair, reference in zip(some, log_probabilities(logits, batch).view(-1, 2).tolist(), strict=True):
            pair["reference"] = reference


def on_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def endlessly(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def main() -> None:
    options = parse_options()
    texts = read_texts(options.dataset, 100_000)
    if options.model:
        model, tokenizer = (kind.from_pretrained(options.model) for kind in (AutoModelForCausalLM, AutoTokenizer))
    else:
        tokenizer = train_tokenizer(texts, VOCABULARY_SIZE)
        model = small_model(tokenizer)
    if options.lora:
        model = with_adapters(model)
    config = {"pipeline_parallel_size": options.stages, "num_microbatches": options.microbatches}
    model = penstock.initialize(model, {"model_parallelism": config}, criterion=DPO(options.beta))

    pairs: list[dict[str, Any]] = [*preferences(texts)]
    pairs = pairs[: options.steps * options.batch_size * model.data_parallel_size]
    collate = Collator(tokenizer, model.data_parallel_size)
    model.eval()
    add_reference(model, pairs, collate, options.batch_size)
    model.train()
    loader = model.prepare_dataloader(pairs, options.batch_size, drop_last=True, collate_fn=collate)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=options.learning_rate, eps=options.adam_epsilon, weight_decay=0.0)
    losses = []
    for batch in itertools.islice(endlessly(loader), options.steps):
        for out in model(**on_device(batch, model.pipeline.device)):
            out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(model.pipeline.last_step.global_loss)
        if is_leader():
            print(f"step {len(losses):4d}  loss {losses[-1]:.4f}", flush=True)
    model.save_pretrained(options.output)
    if is_leader():
        tokenizer.save_pretrained(options.output)
        (options.output / "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
