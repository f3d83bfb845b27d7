"""A run that is saved and taken up again is the undisturbed run: bit for bit, or within rounding on another layout."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

import penstock
from penstock import Booster
from penstock.checkpoint.contents import merge_checkpoint
from tests.support.families import FAMILIES, batch
from tests.support.hetero import make_plugin, num_ranks, pad, samples
from tests.support.pool import Pool
from tests.support.training import kept_in_double

pytestmark = pytest.mark.slow

STEPS, SAVED = 9, 6  # a save in the middle of an epoch, and another epoch after it
NUMBER = 36  # samples: epochs of four batches, the last of them incomplete
OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


@dataclass(frozen=True)
class Run:
    """One way to train.

    Attributes:
        pipelines: of the Booster, such as `1x2,2x3`; None for one process without this library.
        optimizer: a key of `OPTIMIZERS`.
        tp_size, precision: of the plugin.
        double: float64 without dropout, which a single process can follow to the last digits.
        accumulate: batches of one step of the optimizer; `no_sync`: whether all but the last are under no_sync().
        lora: trains adapters, with a dropout of their own. asynchronous: of the save.
    """

    pipelines: str | None
    optimizer: str = "adamw"
    family: str = "gpt2"
    tp_size: int = 1
    precision: str = "fp32"
    double: bool = False
    workers: int = 0
    accumulate: int = 1
    no_sync: bool = False
    lora: bool = False
    asynchronous: bool = False

    @property
    def saved(self) -> int:
        """The step after which it is saved: after one of the optimizer's."""
        return SAVED - SAVED % self.accumulate

    @property
    def num_ranks(self) -> int:
        return num_ranks(self.pipelines) * self.tp_size if self.pipelines else 1


@dataclass
class Seen:
    """What one rank saw: of each step the loss, its samples and its random numbers; and its weights at the end."""

    losses: list[float]
    samples: list[Any]
    numbers: list[Any]
    parameters: dict[str, torch.Tensor]
    skipped: int = 0


class Mine:
    """An object of the user's."""

    value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def train(run: Run, folder: str, resume: bool) -> Seen:
    """On a worker: all steps, saving in their middle; or, with `resume`, from there to the end, with other weights,
    another seed and a new process's objects."""
    torch.manual_seed(2 if resume else 1)
    random.seed(10 * dist.get_rank() + resume)
    np.random.seed(10 * dist.get_rank() + resume)
    dtype = torch.float64 if run.double else torch.float32
    settings = {"vocab_size": 98} if run.family == "llama" else {}  # a number that two ranks can share
    model: Any = FAMILIES[run.family].build(dropout=0.0 if run.double else 0.2, dtype=dtype, **settings)
    if resume:
        model.apply(lambda module: [p.data.normal_() for p in module.parameters(recurse=False)])
    frozen = "transformer.wpe" if run.family == "gpt2" else "model.norm"
    model.get_submodule(frozen).requires_grad_(False)
    if run.lora:
        lora = LoraConfig(r=2, target_modules=["c_attn", "c_proj"], lora_dropout=0.0 if run.double else 0.1)
        model = get_peft_model(model, lora).to(dtype)
        if resume:
            model.apply(lambda module: [p.data.normal_() for p in module.parameters(recurse=False)])
    data = samples(run.family, NUMBER, dtype)
    inner: Any = OPTIMIZERS[run.optimizer](model.parameters())
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(inner, T_max=STEPS)
    mine, seen = Mine(), Seen([], [], [], {})
    plugin = make_plugin(
        model,
        run.pipelines or "1x5",
        tp_size=run.tp_size,
        precision=run.precision,
        max_norm=1.0,
        initial_scale=2.0**20,
        growth_interval=3,
    )
    workers = {"num_workers": run.workers, "prefetch_factor": 2} if run.workers else {}
    loader: Any = plugin.prepare_dataloader(data, shuffle=True, seed=7, collate_fn=pad, **workers)
    booster, optimizer = Booster(plugin=plugin), inner
    if run.pipelines:
        model, optimizer, _, loader, scheduler = booster.boost(model, inner, None, loader, scheduler)
    state = {"optimizer": optimizer, "lr_scheduler": scheduler, "dataloader": loader, "mine": mine}
    step = 0
    if resume:
        loaded = penstock.load_checkpoint(folder, model=model, **state)
        step = loaded.step
        assert (loaded.step, mine.value, loaded.extra) == (run.saved, run.saved, {"note": ["mine", 3]})
    batches = endlessly(loader)
    with kept_in_double() if run.double else contextlib.nullcontext():
        while step < STEPS:
            batch = next(batches)
            seen.samples.append([microbatch["input_ids"].tolist() for microbatch in batch.microbatches])
            updates = (step + 1) % run.accumulate == 0
            if run.pipelines:
                alone = booster.no_sync(model, optimizer) if run.no_sync and not updates else contextlib.nullcontext()
                with alone:
                    seen.losses.append(float(booster.execute_pipeline(iter([batch]), model, None, optimizer)["loss"]))
            else:
                seen.losses.append(by_hand(model, batch, clips=updates))
            if updates:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            seen.numbers.append((torch.rand(1).item(), random.random(), np.random.rand()))
            step += 1
            mine.value = step
            if step == run.saved and not resume:
                settings = {"extra": {"note": ["mine", 3]}, "asynchronous": run.asynchronous}
                penstock.save_checkpoint(folder, model=model, **state, step=step, **settings)
    penstock.finish_saving(model)
    seen.parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    seen.skipped = getattr(optimizer, "num_skipped_steps", 0)
    return seen


def endlessly(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def by_hand(model: Any, batch: Any, clips: bool) -> float:
    """The unsplit model's step on a global batch: the mean over all its tokens."""
    tokens = [int((microbatch["labels"][:, 1:] != -100).sum()) for microbatch in batch.microbatches]
    total = 0.0
    for microbatch, number in zip(batch.microbatches, tokens, strict=True):
        loss = model(**microbatch).loss * (number / sum(tokens))
        loss.backward()
        total += loss.item()
    if clips:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return total


def launch(pool: Pool, run: Run, folder: Path, resume: bool) -> list[Seen]:
    return pool.run(run.num_ranks, train, run, str(folder), resume, timeout=120)


def samples_of_steps(ranks: Sequence[Seen]) -> list[list[Any]]:
    """The samples of each step over all pipelines, in an order that does not depend on them."""
    steps = []
    for step in range(len(ranks[0].samples)):
        shares = {str(one.samples[step]): one.samples[step] for one in ranks}
        steps.append(sorted(str(microbatch) for share in shares.values() for microbatch in share))
    return steps


@pytest.mark.parametrize(
    "run",
    [
        Run("1x2,2x3", "fused", precision="fp16", workers=2),
        Run("2x5", "adafactor", workers=1),
        Run("2x5", "momentum", "llama", tp_size=2),
        Run("1x2,2x3", "adamw", precision="fp16", asynchronous=True, accumulate=3, no_sync=True),
        Run("1x2,2x3", "adamw", lora=True),
    ],
    ids=["two pipelines, fp16, fused, workers", "adafactor", "both parallel, momentum", "accumulation", "LoRA"],
)
def test_a_run_goes_on_bit_for_bit_on_the_same_layout(pool: Pool, tmp_path: Path, run: Run) -> None:
    whole = launch(pool, run, tmp_path, resume=False)
    again = launch(pool, run, tmp_path, resume=True)
    for before, after in zip(whole, again, strict=True):
        assert after.losses == before.losses[run.saved :]
        assert after.samples == before.samples[run.saved :]
        assert after.numbers == before.numbers[run.saved :]
        assert all(torch.equal(value, before.parameters[name]) for name, value in after.parameters.items())
    if run.precision == "fp16":
        assert whole[0].skipped, "the scale was too large at first, so that it had to change"


@pytest.mark.parametrize(
    ("first", "moves"),
    [
        (Run("1x2,2x3", "momentum"), [("1x2,1x3", 1), ("1x5", 1)]),
        (Run("2x5", "adamw"), [("1x2,3x3", 1), (None, 1)]),
        (Run("1x2,2x3", "adafactor"), [("3x5", 1), (None, 1)]),
        (Run("2x5", "adamw", "llama", tp_size=2), [("1x5", 2), ("3x5", 1)]),
        (Run("1x5", "momentum", "llama"), [("2x5", 2)]),
        (Run("1x2,2x3", "adamw", lora=True), [("3x5", 1), (None, 1)]),
        (Run("2x2,2x3", "adamw"), [("4x5", 1)]),
        (Run("4x5", "momentum"), [("2x2,2x3", 1), ("1x1,1x2,2x2", 1)]),
    ],
    ids=[
        "momentum",
        "adamw",
        "adafactor",
        "from tensor parallel",
        "to tensor parallel",
        "LoRA",
        "to one of as many ranks",
        "from one of as many ranks",
    ],
)
def test_a_run_goes_on_within_rounding_on_other_layouts(
    pool: Pool, tmp_path: Path, first: Run, moves: list[tuple[str | None, int]]
) -> None:
    first = replace(first, double=True)
    whole = launch(pool, first, tmp_path, resume=False)
    for pipelines, tp_size in moves:
        again = launch(pool, replace(first, pipelines=pipelines, tp_size=tp_size), tmp_path, resume=True)
        assert again[0].losses == pytest.approx(whole[0].losses[SAVED:], rel=1e-9, abs=0)
        assert samples_of_steps(again) == samples_of_steps(whole)[SAVED:]
        assert_random_numbers_go_on(by_pipeline(again, pipelines), by_pipeline(whole, first.pipelines))


def by_pipeline(ranks: Sequence[Seen], pipelines: str | None) -> list[list[Seen]]:
    counts = [int(one.split("x")[0]) for one in (pipelines or "1x5").split(",")]
    tp_size, remaining = len(ranks) // sum(counts), iter(ranks)
    return [list(itertools.islice(remaining, count * tp_size)) for count in counts]


def assert_random_numbers_go_on(again: list[list[Seen]], before: list[list[Seen]]) -> None:
    """Each pipeline's from its first rank, on all its ranks; those of a new pipeline are its own."""
    for number, pipeline in enumerate(again):
        assert all(rank.numbers == pipeline[0].numbers for rank in pipeline)
        if number < len(before):
            assert pipeline[0].numbers == before[number][0].numbers[SAVED:]
        else:
            drawn = [set(itertools.chain(*other[0].numbers)) for other in again if other is not pipeline]
            assert not set(itertools.chain(*pipeline[0].numbers)) & set().union(*drawn)


def train_module(folder: str, num_stages: int, resume: bool) -> list[float]:
    """Steps 1 to 4 of a module of none of the libraries, or 3 and 4 of a run that goes on."""
    torch.manual_seed(int(resume))
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)]
    module = nn.Sequential(*layers).double()
    options = {"pipeline_parallel_size": num_stages, "num_microbatches": 2}
    generator = torch.Generator().manual_seed(9)
    given, target = torch.randn(2, 8, 8, dtype=torch.float64, generator=generator)
    model = penstock.initialize(
        module, options, criterion=lambda output, batch: nn.functional.mse_loss(output, batch["target"]),
        example_inputs={"input": given},
    )  # fmt: skip
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
    manager = penstock.CheckpointManager(folder, model=model, optimizer=optimizer, every=2)
    for step in range(manager.resume() + 1, 5):
        optimizer.zero_grad()
        for output in model(input=given, target=target):
            output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.save(step)
        losses.append(model.pipeline.last_step.global_loss)
    return losses


def test_a_run_of_ones_own_module_goes_on_and_is_merged(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(2, train_module, str(tmp_path / "run"), 2, False)[0]
    for name in ("two", "one"):
        shutil.copytree(tmp_path / "run/step-00000002", tmp_path / name / "step-00000002")
    assert pool.run(2, train_module, str(tmp_path / "two"), 2, True)[0] == whole[2:]
    assert pool.run(1, train_module, str(tmp_path / "one"), 1, True)[0] == pytest.approx(whole[2:], rel=1e-12)
    merge_checkpoint(tmp_path / "one", tmp_path / "merged")
    merge_checkpoint(tmp_path / "run", tmp_path / "expected")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "expected"))
    assert found.keys() == expected.keys() and len(found) == 8
    assert all(torch.allclose(found[name], expected[name], rtol=1e-12) for name in found)


def evaluate_with_dropout(folder: str, resume: bool) -> list[float]:
    """Evaluations of a model in training mode, each of which draws masks of its own."""
    torch.manual_seed(0)
    gpt2 = FAMILIES["gpt2"].build()
    gpt2.transformer.drop.p = 0.5
    model = penstock.initialize(gpt2, {"pipeline_parallel_size": 1})
    inputs, losses = batch("causal", 4), []
    if resume:
        penstock.load_checkpoint(folder, model=model)
    with torch.no_grad():
        for _ in range(1 if resume else 2):
            losses.append(model.train()(**inputs).loss.item())
            if len(losses) == 1 and not resume:
                penstock.save_checkpoint(folder, model=model)
    return losses


def test_an_evaluation_after_a_resume_draws_what_it_would_have_drawn(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(1, evaluate_with_dropout, str(tmp_path), False)[0]
    assert first != second
    assert pool.run(1, evaluate_with_dropout, str(tmp_path), True)[0] == [second]
