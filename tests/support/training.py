"""What the tests of the training engine share: a step on every rank of a pool, and the unsplit model as its oracle.

Functions here that a worker runs build their model themselves, from the same seed as the oracle.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import penstock
from penstock.checking.double import kept_in_double
from tests.support.families import FAMILIES

# Sums in double precision over a different order: what DESIGN calls exact.
EXACT = 1e-10

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """What one rank saw of a step.

    Attributes:
        losses: the values it was yielded, one for each microbatch.
        gradients: of its own parameters, under every one of their names; None where there is none.
    """

    losses: list[float]
    gradients: dict[str, torch.Tensor | None]


def parallelize(model: nn.Module, stages: int, **options: Any) -> Any:
    """`penstock.initialize` with `stages` stages."""
    return penstock.initialize(model, {"model_parallelism": {"pipeline_parallel_size": stages, **options}})


def in_turn(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """On a worker: one call after the other in one process group. An error names its call."""
    found = []
    for call in calls:
        try:
            found.append(call())
        except Exception as error:
            error.add_note(f"(in {call})")
            raise
    return found


def run_step(model: Any, batch: Batch, scale: float = 1.0) -> list[float]:
    """The tutorial's loop; returns the losses' values."""
    losses = []
    for output in model(**batch):
        (output.loss * scale).backward()
        losses.append(output.loss.item())
    return losses


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies of all gradients; a tied weight under each of its names."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def train_family(
    family: str, stages: int, batches: Sequence[Batch], settings: Mapping[str, Any] | None = None, **options: Any
) -> list[Step]:
    """On a worker: a step on each of `batches`, in double precision and without dropout.

    With several pipelines each is given its rows of every batch. `settings` change the model's configuration; `options`
    are those of `initialize`.
    """
    with kept_in_double():
        model = parallelize(FAMILIES[family].build(**(settings or {})), stages, **options)
        steps = []
        for batch in batches:
            model.zero_grad()
            losses = run_step(model, rows(batch, model.data_parallel_rank, model.data_parallel_size))
            steps.append(Step(losses, gradients_of(model)))
        return steps


def live_bytes() -> int:
    """Of all tensors of this process."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and not one.is_meta]
    sizes = {}
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a library's kind without storage of its own
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    sizes.pop(0, None)
    return sum(sizes.values())


def unsplit_step(model: nn.Module, *pieces: tuple[Batch, float]) -> Step:
    """The oracle: the loss and its gradients from a model that was never split.

    The loss is put together from `pieces`: pairs of a batch and its share, a single `(batch, 1.0)` where lengths agree.
    """
    model.zero_grad()
    losses = []
    with kept_in_double():
        for piece, share in pieces:
            loss = model(**piece).loss * share
            loss.backward()
            losses.append(loss.item())
    return Step(losses, gradients_of(model))


def cut(batch: Batch, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of a batch in parts of the given sizes, tensors only."""
    parts = []
    start = 0
    for size in sizes:
        parts.append({name: value[start : start + size] for name, value in batch.items()})
        start += size
    return parts


def tokens_in_loss(kind: str, batch: Batch) -> int:
    """How many terms the mean has that a model of this kind takes as its loss; counted by hand."""
    labels = batch["labels"]
    if kind in ("classes", "images"):
        return len(labels)
    return int(((labels[:, 1:] if kind == "causal" else labels) != -100).sum())


def weigh(kind: str, parts: Sequence[Batch]) -> list[tuple[Batch, float]]:
    """Batches, each with its share of the mean over all of them together."""
    counts = [tokens_in_loss(kind, part) for part in parts]
    return [(part, count / sum(counts)) for part, count in zip(parts, counts, strict=True)]


def rows(batch: Batch, replica: int, num_replicas: int) -> dict[str, Any]:
    """A replica's share of a global batch: as many neighbouring rows for each."""
    size = len(batch["labels"]) // num_replicas
    return {name: value[replica * size : (replica + 1) * size] for name, value in batch.items()}


def assert_same_gradients(
    found: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None], tolerance: float = EXACT
) -> None:
    """Every gradient in `found` is the one in `expected`, within `tolerance` of the largest entry of any gradient."""
    scale = max(float(gradient.abs().max()) for gradient in expected.values() if gradient is not None)
    assert scale > 0, "the oracle has no gradients, so the comparison says nothing"
    for name, gradient in found.items():
        wanted = expected[name]
        if wanted is None or gradient is None:
            assert (gradient is None) == (wanted is None), f"{name}: found {gradient}, expected {wanted}"
            continue
        difference = float((gradient - wanted).abs().max())
        assert difference <= tolerance * scale, f"{name} differs by {difference} where gradients are up to {scale}"


def assert_steps_equal(ranks: Sequence[Step], expected: Step, tolerance: float = EXACT, replicas: int = 1) -> None:
    """Each pipeline's ranks saw one loss, together the expected one; they hold all gradients, each the full one."""
    stages = len(ranks) // replicas
    pipelines = [ranks[first : first + stages] for first in range(0, len(ranks), stages)]
    expected_loss = sum(expected.losses)
    loss = sum(sum(pipeline[0].losses) for pipeline in pipelines)
    assert abs(loss - expected_loss) <= tolerance * max(1.0, abs(expected_loss))
    for pipeline in pipelines:
        for step in pipeline:
            assert step.losses == pipeline[0].losses
            assert_same_gradients(step.gradients, expected.gradients, tolerance)
        assert set().union(*(step.gradients for step in pipeline)) == set(expected.gradients)
