"""What the tests of the plugin share: training with a plugin on the ranks of a pool, and the unsplit model.

Functions here that a worker runs build their model and their data themselves, from the same seeds as the oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock import Booster, HeterogeneousParallelPlugin, PipelineTemplate
from penstock.layout.pipelines import num_stages_on, parse_pipelines
from penstock.schedule import AUTO, parse_schedule
from tests.support.families import FAMILIES, VOCABULARY
from tests.support.training import gradients_of, kept_in_double

MICROBATCH_SIZE = 2
LEARNING_RATE = 0.1

TEMPLATES: dict[tuple[str, str, int], PipelineTemplate] = {}

Sample = dict[str, Any]
Gradients = dict[str, torch.Tensor | None]


@dataclass
class Seen:
    """What one rank saw of a step.

    Attributes:
        loss: of the global batch.
        gradients: of its own parameters, before clipping and before the optimizer's step.
        norm: of the whole model's gradients.
        parameters: its own, after the step.
        report: num_microbatches, num_buckets, hidden.
    """

    loss: float
    gradients: Gradients
    norm: float
    parameters: dict[str, torch.Tensor]
    report: dict[str, Any] = field(default_factory=dict)


def samples(family: str, number: int, dtype: torch.dtype = torch.float64) -> list[Sample]:
    """Samples of unequal length, without padding."""
    kind = FAMILIES[family].kind
    generator = torch.Generator().manual_seed(3)
    made: list[Sample] = []
    for index in range(number):
        if kind == "images":
            image = torch.randn(3, 16, 16, generator=generator, dtype=dtype)
            made.append({"pixel_values": image, "labels": index % 3})
            continue
        ids = torch.randint(3, VOCABULARY, (4 + index % 5,), generator=generator)
        made.append({"input_ids": ids, "labels": index % 2 if kind == "classes" else ids})
    return made


def pad(chosen: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """A batch of samples, padded to the longest of them."""
    if "pixel_values" in chosen[0]:
        images = torch.stack([sample["pixel_values"] for sample in chosen])
        return {"pixel_values": images, "labels": torch.tensor([sample["labels"] for sample in chosen])}
    ids = [sample["input_ids"] for sample in chosen]
    rows = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    if isinstance(chosen[0]["labels"], int):
        labels = torch.tensor([sample["labels"] for sample in chosen])
    else:
        labels = rows.masked_fill(mask == 0, -100)
    return {"input_ids": rows, "attention_mask": mask, "labels": labels}


def make_plugin(
    model: nn.Module, pipelines: str, schedule: str | tuple[Any, ...] = AUTO, **options: Any
) -> HeterogeneousParallelPlugin:
    """A plugin with pipelines written as `1x3,2x5`, stages balanced.

    Args:
        schedule: a name for all of them, or a tuple with one for each: a name, or rows.
    """
    shapes = parse_pipelines(pipelines)
    each = schedule if isinstance(schedule, tuple) else (schedule,) * len(shapes)
    stages = [
        num_stages_on(ranks, one) if isinstance(one, str) else parse_schedule(one).num_stages
        for (ranks, _), one in zip(shapes, each, strict=True)
    ]
    templates = [balanced(model, number) for number in stages]
    chosen: Any = dict(zip(templates, each, strict=True)) if isinstance(schedule, tuple) else schedule
    plugin = HeterogeneousParallelPlugin(**{"microbatch_size": MICROBATCH_SIZE, "schedule": chosen, **options})
    plugin.set_pipelines(templates, [count for _, count in shapes])
    return plugin


def balanced(model: Any, num_stages: int) -> PipelineTemplate:
    """The balanced template. Costs are estimated once in a process for all models of a configuration."""
    key = type(model).__name__, model.config.to_json_string(), num_stages
    if key not in TEMPLATES:
        TEMPLATES[key] = PipelineTemplate.balanced(model, num_stages)
    return TEMPLATES[key]


def num_ranks(pipelines: str) -> int:
    return sum(stages for stages, _ in parse_pipelines(pipelines))


def batch_size(pipelines: str) -> int:
    return MICROBATCH_SIZE * sum(count for _, count in parse_pipelines(pipelines))


def train(
    family: str, pipelines: str, number: int, dropout: float = 0.0, by_hand: bool = False, **options: Any
) -> list[Seen]:
    """On a worker: an epoch over `number` samples in double precision, with plain SGD.

    `by_hand` drives the microbatches in a loop of its own rather than by `execute_pipeline`.
    """
    model: Any = FAMILIES[family].build(dropout=dropout)
    return train_with(make_plugin(model, pipelines, **options), model, family, number, by_hand)


def train_with(
    plugin: HeterogeneousParallelPlugin, model: Any, family: str, number: int, by_hand: bool = False
) -> list[Seen]:
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(samples(family, number), collate_fn=pad)
    sgd = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer, _, loader, _ = booster.boost(model, sgd, None, loader)
    seen = []
    with kept_in_double():
        batches = iter(loader)
        for _ in range(len(loader)):
            optimizer.zero_grad()
            if by_hand:
                for output in model(**next(batches)):
                    output.loss.backward()
                loss = model.pipeline.last_step.global_loss
            else:
                loss = booster.execute_pipeline(batches, model, None, optimizer)["loss"].item()
            gradients, norm = gradients_of(model), float(model.pipeline.grad_norm())
            optimizer.step()
            parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
            seen.append(Seen(loss, gradients, norm, parameters, report_of(model)))
    return seen


def report_of(model: Any) -> dict[str, Any]:
    step = model.pipeline.last_step
    reduction = step.reduction
    return {
        "num_microbatches": step.num_microbatches,
        "num_buckets": 0 if reduction is None else reduction.num_buckets,
        "hidden": None if reduction is None else reduction.hidden,
    }


@functools.cache
def unsplit(family: str, number: int, size: int, max_norm: float = 0.0) -> list[Seen]:
    """The oracle: the same epoch with a model that was never split, on whole global batches of `size` samples."""
    model = FAMILIES[family].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    every = samples(family, number)
    seen = []
    with kept_in_double():
        for start in range(0, number, size):
            optimizer.zero_grad()
            loss = model(**pad(every[start : start + size])).loss
            loss.backward()
            gradients = gradients_of(model)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
            optimizer.step()
            parameters = {
                name: value.detach().clone() for name, value in model.named_parameters(remove_duplicate=False)
            }
            seen.append(Seen(loss.item(), gradients, norm.item(), parameters))
    return seen


def assert_equal_training(ranks: Sequence[Sequence[Seen]], oracle: Sequence[Seen], tolerance: float = 1e-10) -> None:
    """Every rank saw, in every step, what the unsplit model did: loss, gradients, norm, parameters."""
    held: set[str] = set()
    for rank, steps in enumerate(ranks):
        assert len(steps) == len(oracle), f"rank {rank} took {len(steps)} steps instead of {len(oracle)}"
        for number, (step, expected) in enumerate(zip(steps, oracle, strict=True)):
            where = f"rank {rank}, step {number}"
            assert abs(step.loss - expected.loss) < tolerance, f"{where}: loss {step.loss}, expected {expected.loss}"
            assert abs(step.norm - expected.norm) < tolerance * max(1.0, expected.norm), where
            for name, gradient in step.gradients.items():
                _compare(gradient, expected.gradients[name], f"{where}: gradient of {name}", tolerance)
            for name, parameter in step.parameters.items():
                _compare(parameter, expected.parameters[name], f"{where}: {name}", tolerance)
            held.update(step.gradients)
    assert held == set(oracle[0].gradients), "every parameter is held by some rank"


def _compare(found: torch.Tensor | None, expected: torch.Tensor | None, what: str, tolerance: float) -> None:
    assert (found is None) == (expected is None), f"{what} is {found}, expected {expected}"
    if found is not None and expected is not None:
        difference = float((found - expected).abs().max())
        assert difference < tolerance, f"{what} differs by {difference}"
