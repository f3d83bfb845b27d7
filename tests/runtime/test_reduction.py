"""Summing gradients over holders: values against a plain sum, and when each bucket leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock.layout.layout import Layout
from penstock.modeling.tensor_spec import TensorSpec
from penstock.runtime.boundary.p2p import decode_header, encode_header
from penstock.runtime.context import RankContext
from penstock.runtime.failures.board import FailureBoard
from penstock.runtime.failures.interrupts import Interrupts
from penstock.runtime.gradients.holders import HeldParameter
from penstock.runtime.gradients.reduction import BUCKET_BYTES, GradientReducer, make_buckets
from tests.support.pool import Pool

BOTH = (0, 1)


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size, dtype=torch.float64)) for size in sizes]


def held_by_both(weights: list[nn.Parameter], owners: tuple[int, ...] = ()) -> list[HeldParameter]:
    return [HeldParameter(f"weight {number}", one, BOTH, owners=owners) for number, one in enumerate(weights)]


def reducer_of(
    weights: list[nn.Parameter], deferred: set[int] | None = None, owners: tuple[int, ...] = ()
) -> GradientReducer:
    """On ranks that hold all of the weights."""
    groups: Any = SimpleNamespace(reduction={BOTH: dist.group.WORLD})
    board = FailureBoard(dist.get_rank(), "test")
    layout = Layout.place([[["all"]], [["all"]]])
    context = RankContext(layout, dist.get_rank(), torch.device("cpu"), groups, board, Interrupts())
    return GradientReducer(held_by_both(weights, owners), context, lambda one: id(one) in (deferred or set()))


# ---------------------------------------------------------------- buckets


def test_a_bucket_is_no_larger_than_its_capacity_unless_one_parameter_is() -> None:
    held = held_by_both(parameters(3, 3, 9, 2, 2))
    sizes = [[p.numel() for p in bucket.parameters] for bucket in make_buckets(held, capacity=6 * 8)]
    assert sizes == [[2, 2], [9], [3, 3]]


# ---------------------------------------------------------------- sums


def sum_where_some_are_missing(size: int, owners: tuple[int, ...]) -> tuple[list[Any], list[bool]]:
    """Rank 0 has gradients for the first and second parameter, rank 1 for the second and third; nobody for the last.

    Gives the numbers in each gradient, and whether those that were there are where they were.
    """
    rank = dist.get_rank()
    weights = parameters(size, size, size, size)
    reducer = reducer_of(weights, owners=owners)
    for _ in range(2):
        for weight in weights:
            weight.grad = None
        reducer.prepare()
        reducer.enter_backward(final=True)
        for index in (rank, rank + 1):
            (weights[index] * float(1 + index + 10 * rank)).sum().backward()
        places = [None if weight.grad is None else weight.grad.data_ptr() for weight in weights]
        report = reducer.finish()
        assert report.num_bytes == 4 * size * 8
    found = [None if weight.grad is None else weight.grad.unique().tolist() for weight in weights]
    here = [weights[at].grad is not None and weights[at].grad.data_ptr() == places[at] for at in (rank, rank + 1)]  # type: ignore[union-attr]
    return found, here


@pytest.mark.parametrize("owners", [(), (1,)], ids=["all", "one owner"])
@pytest.mark.parametrize("size", [2, BUCKET_BYTES // 8], ids=["small", "large"])
def test_a_gradient_that_only_one_holder_has_reaches_the_others_and_one_nobody_has_stays_none(
    pool: Pool, size: int, owners: tuple[int, ...]
) -> None:
    """Large ones are summed where they are."""
    for rank, (found, here) in enumerate(pool.run(2, sum_where_some_are_missing, size, owners)):
        wanted = not owners or rank in owners
        assert found == ([[1.0], [14.0], [13.0], None] if wanted else [None] * 4)
        assert here == [wanted and size > 2] * 2


def note_launches(case: str) -> tuple[list[str], float]:
    """In which backward the bucket of a weight leaves, and its sum; the weight may be used once or in two pieces."""
    (weight,) = parameters(1)
    deferred: set[int] = {id(weight)} if case == "deferred" else set()
    reducer = reducer_of([weight], deferred)
    log: list[str] = []
    launch = reducer._launch
    reducer._launch = lambda bucket: (log.append(place), launch(bucket))  # type: ignore[assignment,misc,return-value]

    def backward() -> None:
        weight.mul(1.0).sum().backward()
        if case == "piecemeal":  # what a reentrant checkpoint does inside one backward
            weight.mul(2.0).sum().backward()

    reducer.prepare()
    for number in range(2):
        place = f"backward {number}"
        reducer.enter_backward(final=number == 1)
        backward()
    place = "W action"
    if case == "deferred":
        reducer.ready(weight)
    place = "end"
    reducer.finish()
    assert weight.grad is not None
    return log, float(weight.grad)


@pytest.mark.parametrize(
    ("case", "place", "total"), [("once", "backward 1", 4.0), ("piecemeal", "end", 12.0), ("deferred", "W action", 4.0)]
)
def test_a_bucket_leaves_when_its_gradients_are_complete_and_not_before(
    pool: Pool, case: str, place: str, total: float
) -> None:
    for log, gradient in pool.run(2, note_launches, case):
        assert log == [place]
        assert gradient == total


def switch_on_pieces_late() -> str:
    (weight,) = parameters(1)
    reducer = reducer_of([weight])
    for step in range(2):
        reducer.prepare()
        weight.grad = None
        reducer.enter_backward(final=False)
        reducer.enter_backward(final=True)
        weight.sum().backward()
        if step == 0:
            reducer.finish()
    with pytest.raises(RuntimeError) as caught:
        weight.sum().backward()
    reducer.finish()
    return str(caught.value)


def test_a_gradient_that_comes_after_its_sum_is_an_error_and_not_lost(pool: Pool) -> None:
    for text in pool.run(2, switch_on_pieces_late):
        assert "after it had been summed" in text and "use_reentrant=False" in text


# ---------------------------------------------------------------- headers


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn]
)
def test_headers_tell_shapes_types_and_gradients(dtype: torch.dtype) -> None:
    specs = (
        TensorSpec((2, 3, 4), dtype, dtype.is_floating_point),
        TensorSpec((), torch.float32),
        TensorSpec((0,), dtype),
    )
    assert decode_header(encode_header(specs)) == specs
    assert decode_header(encode_header(())) == ()


def test_a_tensor_of_too_many_dimensions_is_refused() -> None:
    spec: Any = TensorSpec((1,) * 9, torch.float32)
    with pytest.raises(ValueError, match="9 dimensions"):
        encode_header([spec])


def test_a_tensor_of_a_type_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of type torch\.qint8, which cannot be sent"):
        encode_header([TensorSpec((1,), torch.qint8)])
