"""What the run_<model>.py examples share: options, data made or found on this machine, the loop, the end of a run."""

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tokenizers.processors import TemplateProcessing
from torch.utils.data import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

import penstock
from corpus import END_OF_TEXT, read_texts, token_blocks, train_tokenizer
from penstock import Booster, HeterogeneousParallelPlugin
from penstock.layout.pipelines import parse_pipelines
from penstock.modeling.pipeline_template import balanced_templates
from penstock.runtime.comm.bootstrap import rank_and_world_size
from penstock.schedule import schedule_names

CHARACTERS = 300_000  # of local text
VOCABULARY_SIZE = 512  # of the tokenizer trained on it
SEQUENCE_LENGTH = 64
IMAGE_SIZE = 32
NUM_IMAGES = 512
DEFAULT_DEPTHS = {0: (), 1: (1,), 2: (2,), 3: (1, 2)}


def parse_options(description: str) -> argparse.Namespace:
    """The options of every example; `pipelines` is a list of (ranks, microbatches)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's folder or name; without it a small model with random weights")
    parser.add_argument("--dataset", help="a file, a folder, or a dataset's name; without it data of this machine")
    parser.add_argument("--pipelines", help="stages (ranks) x microbatches of each, such as 1x3,2x5")
    parser.add_argument("--microbatch-size", type=int, default=2, help="samples in a microbatch")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--schedule", choices=("auto", *schedule_names()), default="auto", help="of every pipeline")
    parser.add_argument("--output", type=Path, default=Path("runs/heterogeneous"), help="where the model is saved")
    parser.add_argument("--save-every", type=int, help="steps between two checkpoints of the whole training state")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, on any pipelines")
    parser.add_argument("--plot", type=Path, help="draw the layout and the schedule to this .svg file")
    options = parser.parse_args()
    _, world_size = rank_and_world_size()
    options.pipelines = parse_pipelines(options.pipelines) if options.pipelines else default_pipelines(world_size)
    torch.manual_seed(0)
    if not is_leader():
        transformers.logging.set_verbosity_error()
    return options


def make_llama(folder: Path, texts: list[str]) -> None:
    """A small Llama with random weights, and its tokenizer."""
    tokenizer = train_tokenizer(texts, VOCABULARY_SIZE)
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    LlamaForCausalLM(sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def default_pipelines(world_size: int) -> list[tuple[int, int]]:
    """Pipelines of unlike depth for any number of ranks: one of 1 and one of 3 stages for every four ranks, and a rest.

    Each gets microbatches in proportion to its ranks.
    """
    depths = (1, 3) * (world_size // 4) + DEFAULT_DEPTHS[world_size % 4]
    return [(stages, 2 * stages) for stages in depths]


def is_leader() -> bool:
    return rank_and_world_size()[0] == 0


def make_plugin(model: Any, options: argparse.Namespace) -> HeterogeneousParallelPlugin:
    """The pipelines that `--pipelines` asks for, stages balanced by cost."""
    # A template may as well be written by hand: PipelineTemplate(name, [modules[:4], modules[4:]]) with
    # modules = PipelineTemplate.get_modules(model).
    templates = balanced_templates(model, (ranks for ranks, _ in options.pipelines), options.schedule)
    plugin = HeterogeneousParallelPlugin(
        tp_size=1,
        microbatch_size=options.microbatch_size,
        precision=options.precision,
        max_norm=1.0,
        schedule=options.schedule,
    )
    plugin.set_pipelines(
        pipelines=[templates[ranks] for ranks, _ in options.pipelines],
        num_microbatches=[count for _, count in options.pipelines],
    )
    return plugin


def train(
    booster: Booster,
    model: Any,
    optimizer: Any,
    dataloader: Any,
    lr_scheduler: Any,
    options: argparse.Namespace,
    output: Path,
) -> list[float]:
    """The training loop. Returns the loss of each step, which every rank knows; of a resumed run all steps as well."""
    model.train()
    losses = Losses()
    manager = penstock.CheckpointManager(
        output / "checkpoints",
        model=model,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        dataloader=dataloader,
        losses=losses,
        every=options.save_every,
        keep_last=2,
        asynchronous=True,
        on_signal=options.save_every is not None,
    )
    done = manager.resume() if options.resume else 0
    batches = endlessly(dataloader)
    with manager:
        for step in range(done + 1, options.steps + 1):
            begin = time.perf_counter()
            loss = booster.execute_pipeline(batches, model, None, optimizer, return_loss=True)["loss"]
            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()
            losses.append(loss.item())
            if is_leader() and (step in (1, options.steps) or step % max(1, options.steps // 10) == 0):
                speed = dataloader.global_batch_size / (time.perf_counter() - begin)
                reduction = model.pipeline.last_step.reduction
                known = reduction is not None and reduction.hidden is not None
                hidden = f"  gradient reduction {reduction.hidden:.0%} hidden" if known else ""
                print(f"step {step:4d}  loss {losses[-1]:.4f}  {speed:.1f} samples/s{hidden}", flush=True)
            manager.save(step)
    return losses


class Losses(list[float]):
    """A list that goes into the checkpoint."""

    def state_dict(self) -> dict[str, list[float]]:
        return {"losses": list(self)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self[:] = state["losses"]


def endlessly(dataloader: Any) -> Iterator[Any]:
    """One epoch after the other; the loader shuffles each anew."""
    while True:
        yield from dataloader


def finish(
    booster: Booster,
    model: Any,
    losses: Sequence[float],
    output: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Save the model as an ordinary checkpoint, and reload it with plain transformers to show that it is one."""
    booster.save_model(model, output)
    if is_leader():
        if tokenizer is not None:
            tokenizer.save_pretrained(output)
        (output / "losses.json").write_text(json.dumps(list(losses)))
        reloaded = getattr(transformers, type(model).__name__).from_pretrained(output)
        same = all(torch.equal(value.cpu(), reloaded.get_parameter(name)) for name, value in model.named_parameters())
        size = sum(parameter.numel() for parameter in reloaded.parameters())
        print(f"saved in {output} and reloaded with plain transformers: {type(reloaded).__name__}, {size:,} parameters")
        print(f"the weights of the first stage are the same: {same}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------- text


def text_rows(options: argparse.Namespace) -> tuple[list[dict[str, torch.Tensor]], PreTrainedTokenizerBase]:
    """Rows of tokens for a causal language model, and their tokenizer: the model's own, or one trained on the text."""
    texts = read_texts(options.dataset, CHARACTERS)
    tokenizer = (
        AutoTokenizer.from_pretrained(options.model) if options.model else train_tokenizer(texts, VOCABULARY_SIZE)
    )
    return [{"input_ids": row, "labels": row} for row in token_blocks(tokenizer, texts, SEQUENCE_LENGTH)], tokenizer


def text_pairs(options: argparse.Namespace) -> tuple[list[dict[str, Any]], PreTrainedTokenizerBase]:
    """Pairs of texts with a label, shaped as GLUE's: sentence1, sentence2, label.

    From a .jsonl file, or a dataset's name (`nyu-mll/glue:mrpc`: with its configuration); by default lines of Python's
    standard library, labelled by whether the second follows the first.
    """
    if options.dataset is None:
        pairs = neighbouring_lines()
    elif Path(options.dataset).is_file():
        pairs = [json.loads(line) for line in Path(options.dataset).read_text().splitlines() if line.strip()]
    else:
        from datasets import load_dataset

        name, _, configuration = options.dataset.partition(":")
        pairs = list(load_dataset(name, configuration or None, split="train"))
    if options.model:
        return pairs, AutoTokenizer.from_pretrained(options.model)
    tokenizer = train_tokenizer([pair[side] for pair in pairs for side in ("sentence1", "sentence2")], VOCABULARY_SIZE)
    separator = (END_OF_TEXT, tokenizer.convert_tokens_to_ids(END_OF_TEXT))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A", pair=f"$A {END_OF_TEXT} $B:1", special_tokens=[separator]
    )
    return pairs, tokenizer


def neighbouring_lines(number: int = 1000) -> list[dict[str, Any]]:
    lines = [
        line.strip() for text in read_texts(None, CHARACTERS) for line in text.splitlines() if len(line.split()) > 2
    ]
    chance = random.Random(0)
    pairs = []
    for _ in range(number):
        first, follows = chance.randrange(len(lines) - 1), chance.random() < 0.5
        second = first + 1 if follows else chance.randrange(len(lines))
        pairs.append({"sentence1": lines[first], "sentence2": lines[second], "label": int(follows)})
    return pairs


def pair_collator(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[Any]], dict[str, torch.Tensor]]:
    """Makes a microbatch of pairs, padded to its longest."""

    def collate(pairs: list[Any]) -> dict[str, torch.Tensor]:
        sides = [[pair[side] for pair in pairs] for side in ("sentence1", "sentence2")]
        encoded = tokenizer(*sides, padding=True, truncation=True, max_length=SEQUENCE_LENGTH, return_tensors="pt")
        names = ("input_ids", "attention_mask", "token_type_ids")
        inputs = {name: encoded[name] for name in names if name in encoded}
        return {**inputs, "labels": torch.tensor([pair["label"] for pair in pairs])}

    return collate


# ---------------------------------------------------------------- images


class Images(Dataset[dict[str, Any]]):
    """Images of equal size. `load(i)` gives the i-th as a tensor of shape (3, size, size), and its label."""

    def __init__(self, load: Callable[[int], tuple[torch.Tensor, int]], length: int, num_labels: int) -> None:
        self._load, self._length, self.num_labels = load, length, num_labels

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self._load(index)
        return {"pixel_values": image, "labels": label}


def images(dataset: str | None, size: int) -> Images:
    """A folder with one folder of images for each class, or a dataset's name with columns image and label.

    By default gratings, to be told apart by their direction.
    """
    if dataset is None:
        return Images(lambda index: grating(index, size), NUM_IMAGES, 4)
    if os.path.isdir(dataset):
        from PIL import Image

        classes = sorted(folder for folder in Path(dataset).iterdir() if folder.is_dir())
        files = [(path, label) for label, folder in enumerate(classes) for path in sorted(folder.iterdir())]
        return Images(lambda i: (pixels(Image.open(files[i][0]), size), files[i][1]), len(files), len(classes))
    from datasets import load_dataset

    rows = load_dataset(dataset, split="train")
    labels = len(set(rows["label"]))
    return Images(lambda index: (pixels(rows[index]["image"], size), rows[index]["label"]), len(rows), labels)


def grating(index: int, size: int) -> tuple[torch.Tensor, int]:
    """A wave in one of four directions, under noise."""
    generator = torch.Generator().manual_seed(index)
    label = index % 4
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    along = (rows, columns, rows + columns, rows - columns)[label]
    phase = torch.rand(1, generator=generator) * 6.28
    wave = torch.sin(along * 0.8 + phase)
    return wave.expand(3, size, size) + 0.3 * torch.randn(3, size, size, generator=generator), label


def pixels(image: Any, size: int) -> torch.Tensor:
    """An image of PIL as a tensor of shape (3, size, size) between -1 and 1."""
    resized = image.convert("RGB").resize((size, size))
    flat = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8)
    return flat.view(size, size, 3).permute(2, 0, 1).float() / 127.5 - 1.0
