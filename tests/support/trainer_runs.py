"""One training script for models of five kinds and TRL's SFTTrainer, with pipelines or without, and how runs compare.

In double precision, unless asked for otherwise: what differs is no rounding.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer
from trl.kernels import chunked_logprob

from penstock.trainer.pipeline_trainer import PipelineTrainer, PipelineTrainerMixin
from tests.support.families import FAMILIES, VOCABULARY
from tests.support.pool import Pool
from tests.support.training import kept_in_double

# The family, and the layers that LoRA adapts.
MODELS = {
    "GPT-2": ("gpt2", ["c_attn", "c_proj", "wte"]),
    "Llama": ("llama", ["q_proj", "down_proj"]),
    "BERT": ("bert_classification", ["query", "value"]),
    "T5": ("t5", ["q", "wo"]),
    "ViT": ("vit", ["q_proj", "fc1"]),
}
NUM_SAMPLES, NUM_EVALUATED, BATCH = 40, 16, 4


class PipelineSeq2SeqTrainer(PipelineTrainerMixin, Seq2SeqTrainer):
    pass


class PipelineSFTTrainer(PipelineTrainerMixin, SFTTrainer):
    pass


def samples(kind: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Labels of unequal number in each sample, so that a mean over samples would not do."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, VOCABULARY, (count, 12), generator=generator)
    if kind == "images":
        images = torch.randn(count, 3, 16, 16, generator=generator, dtype=torch.float64)
        return [{"pixel_values": image, "labels": int(image.sum() > 0)} for image in images]
    if kind == "classes":
        return [{"input_ids": row.tolist(), "labels": int(row.sum()) % 2} for row in rows]
    labels = [[-100] * (number % 5) + row.tolist()[number % 5 :] for number, row in enumerate(rows)]
    return [{"input_ids": row.tolist(), "labels": label} for row, label in zip(rows, labels, strict=True)]


def sentences(count: int, seed: int) -> Dataset:
    """Of very different lengths: a mean over samples, or over pipelines, would not do."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 14, (count,), generator=generator).tolist()
    words = [torch.randint(60, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_list([{"text": " ".join(f"w{word}" for word in row)} for row in words])


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *(f"w{n}" for n in range(60))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def metrics(found: Any) -> dict[str, float]:
    predictions, labels = found.predictions, found.label_ids
    predictions = predictions[0] if isinstance(predictions, tuple) else predictions
    return {
        "accuracy": float((predictions.argmax(-1) == labels).mean()) if labels.ndim == 1 else -1.0,
        "sum": float(predictions.sum()) if predictions.dtype.kind == "i" else float(predictions.mean()),
        "labels": float(labels.sum()),
    }


def defaults(folder: Path, steps: int, pipelines: int) -> dict[str, Any]:
    """Arguments of every run. Several pipelines, or processes, share out the batches that one accumulates."""
    AcceleratorState._reset_state(True)  # the last run's world
    return {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "gradient_accumulation_steps": 2 // pipelines,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "adam_epsilon": 1e-6,  # the keys' bias has no gradient but rounding, of which Adam would make whole steps
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": math.ceil(steps / 3),
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def of_trl(folder: Path, steps: int, pipelines: int, **further: Any) -> dict[str, Any]:
    """The same of TRL's trainers, which have other defaults than transformers'."""
    return {**defaults(folder, steps, pipelines), "bf16": False, "gradient_checkpointing": False, **further}


def adapters(wanted: bool, **further: Any) -> LoraConfig | None:
    """What `peft_config` is in a run of TRL's trainers."""
    return LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **further) if wanted else None


def if_evaluated(strategy: str, data: Callable[[int, int], Dataset], pipelines: int) -> Dataset | None:
    """What a run of TRL's trainers evaluates on, if it does: two batches for each pipeline."""
    return None if strategy == "no" else data(2 * BATCH * pipelines, 2)


def over(stages: int, **further: Any) -> dict[str, Any]:
    """The one argument that differs."""
    return {"parallelism": {"pipeline_parallel_size": stages, **further}} if stages else {}


def train(
    folder: Path,
    name: str,
    stages: int = 0,
    pipelines: int = 1,
    lora: bool = False,
    steps: int = 30,
    resume: bool = False,
    patience: int | None = None,
    dtype: torch.dtype = torch.float64,
    parallelism: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    sizes: tuple[int, int] = (NUM_SAMPLES, NUM_EVALUATED),
    **options: Any,
) -> list[dict[str, float]]:
    """The script. Without `stages` it is one for the plain Trainer: only the class and one argument differ.

    With `patience`, training stops early: no evaluation is better by what is asked for. `settings` change the model's
    configuration; `sizes` are the numbers of samples to train and to evaluate on.
    """
    family, layers = MODELS[name]
    kind, seq2seq = FAMILIES[family].kind, name == "T5"
    model: Any = FAMILIES[family].build(dtype=dtype, **(settings or {}))
    if lora:
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=layers, init_lora_weights=False)).to(dtype)
    given = {**defaults(folder, steps, pipelines), **options}
    if seq2seq:
        given = {"predict_with_generate": True, "generation_max_length": 6, **given}
    arguments = Seq2SeqTrainingArguments if seq2seq else TrainingArguments
    plain, split = (Seq2SeqTrainer, PipelineSeq2SeqTrainer) if seq2seq else (Trainer, PipelineTrainer)
    data = [samples(kind, count, seed) for seed, count in enumerate(sizes, start=1)]
    if kind == "images" and dtype != torch.float64:
        data = [[{**one, "pixel_values": one["pixel_values"].to(dtype)} for one in part] for part in data]
    with precisely(dtype):
        trainer: Any = (split if stages else plain)(
            model,
            arguments(**given),
            train_dataset=data[0],
            eval_dataset=data[1],
            compute_metrics=metrics,
            callbacks=[EarlyStoppingCallback(patience, 10.0)] if patience else None,
            **over(stages, **(parallelism or {})),
        )
        return run(trainer, folder, resume)


def fine_tune(
    folder: Path,
    packing: bool,
    stages: int = 0,
    pipelines: int = 1,
    lora: bool = False,
    steps: int = 30,
    dtype: torch.dtype = torch.float64,
    family: str = "llama",
    parallelism: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[dict[str, float]]:
    """The same with TRL's SFTTrainer, on sentences of several lengths."""
    given = {**defaults(folder, steps, pipelines), "max_length": 16, "packing": packing, "bf16": False, **options}
    with precisely(dtype):
        trainer: Any = (PipelineSFTTrainer if stages else SFTTrainer)(
            FAMILIES[family].build(dtype=dtype, vocab_size=62, **(settings or {})),
            SFTConfig(**given),
            train_dataset=sentences(80, 1),
            eval_dataset=if_evaluated(given["eval_strategy"], sentences, pipelines),
            processing_class=tokenizer(),
            peft_config=adapters(lora),
            **over(stages, **(parallelism or {})),
        )
        return run(trainer, folder)


@contextlib.contextmanager
def precisely(dtype: torch.dtype) -> Iterator[None]:
    """Inside, neither transformers nor TRL rounds a model in double precision to single."""
    if dtype == torch.float64:
        with kept_in_double(), mock.patch.object(chunked_logprob, "torch", Double()):
            yield
    else:
        yield


class Double:
    """Stands for the module torch where TRL's loss asks for single precision to add up in."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name == "float32" else getattr(torch, name)


class SumsInDouble(TrainerCallback):
    """Lets a Trainer add up the losses that it logs in double precision; it does so in single."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._tr_loss = self.trainer._tr_loss.double()


def run(trainer: Any, folder: Path, resume: bool = False) -> list[dict[str, float]]:
    """Train, save, and return what was logged of the run."""
    trainer.add_callback(SumsInDouble(trainer))
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "final"))
    timings = ("runtime", "per_second", "step_time")
    return [
        {key: value for key, value in entry.items() if not key.endswith(timings)}
        for entry in trainer.state.log_history
        if "loss" in entry or "eval_loss" in entry
    ]


def train_all(
    folder: Path, stages: int, pipelines: int, steps: int, cases: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[dict[str, float]]]:
    """Several runs, each in a folder of its own; `cases` are their further arguments. One with `packing` fine-tunes."""
    return {
        name: (fine_tune if "packing" in case else train)(
            folder / name, stages=stages, pipelines=pipelines, steps=steps, **case
        )
        for name, case in cases.items()
    }


def differences(
    found: tuple[list[dict[str, float]], Path],
    expected: tuple[list[dict[str, float]], Path],
    relative: bool = False,
) -> Mapping[str, float]:
    """The largest absolute difference of each figure over all steps, and of the saved weights. If `relative`, that of
    figures above 1 is relative to them.

    Raises:
        ValueError: the runs logged other things, or saved other weights.
    """
    (mine, folder), (theirs, other) = found, expected
    if [entry.keys() for entry in mine] != [entry.keys() for entry in theirs]:
        raise ValueError(f"logged {[sorted(entry) for entry in mine]}, expected {[sorted(entry) for entry in theirs]}")
    largest: dict[str, float] = {}
    for one, another in zip(mine, theirs, strict=True):
        for name, value in another.items():
            unit = max(1.0, abs(value)) if relative else 1.0
            largest[name] = max(largest.get(name, 0.0), abs(one[name] - value) / unit)
    file = "adapter_model.safetensors" if (other / "final/adapter_config.json").exists() else "model.safetensors"
    weights = [load_file(where / "final" / file) for where in (folder, other)]
    if weights[0].keys() != weights[1].keys():
        raise ValueError(f"{folder} has other weights: {sorted(weights[0].keys() ^ weights[1].keys())}")
    largest["weights"] = max(float((value - weights[1][name]).abs().max()) for name, value in weights[0].items())
    return largest


def differences_when_resumed(
    pool: Pool,
    folder: Path,
    runs: Callable[[Path, int, bool], dict[str, list[dict[str, float]]]],
    before: int,
    after: int,
) -> Iterator[tuple[str, Mapping[str, float]]]:
    """For each of some runs and each rank, the differences from the plain run of one that went on from its first
    checkpoint over `after` stages rather than `before`. `runs`: trains them in a folder, over so many stages or none,
    from the start or from the last checkpoint there."""
    plain, split = runs(folder / "plain", 0, False), folder / "split"
    pool.run(before, runs, split, before, False, init=False, timeout=180)
    for last in split.glob("*/checkpoint-4"):
        shutil.rmtree(last)
    for resumed in pool.run(after, runs, split, after, True, init=False, timeout=180):
        for name, logs in resumed.items():
            yield name, differences((logs, split / name), (plain[name], folder / "plain" / name))
