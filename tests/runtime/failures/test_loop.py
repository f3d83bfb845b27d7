"""Wrong loops over the microbatches: a clear error on every rank or a clean end, never a hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.support.families import batch, gpt2
from tests.support.pool import Pool
from tests.support.training import (
    EXACT,
    assert_same_gradients,
    gradients_of,
    kept_in_double,
    parallelize,
    rows,
    run_step,
    unsplit_step,
)

pytestmark = pytest.mark.slow

STAGES, MICROBATCHES = 3, 4
SOON = 15.0  # ranks that disagree wait some seconds for each other before they give up


Body = Callable[[Iterator[Any], int | None], None]


def is_rank(rank: int | None) -> bool:
    """Whether this is the rank that misbehaves; None stands for all."""
    return rank is None or torch.distributed.get_rank() == rank


# Each takes the outputs of a step as they come, and the rank that misbehaves.


def skip(outputs: Iterator[Any], rank: int | None) -> None:
    for number, output in enumerate(outputs):
        if not (number == 1 and is_rank(rank)):
            output.loss.backward()


def skip_the_last(outputs: Iterator[Any], rank: int | None) -> None:
    for number, output in enumerate(outputs):
        if not (number == MICROBATCHES - 1 and is_rank(rank)):
            output.loss.backward()


def call_twice(outputs: Iterator[Any], rank: int | None) -> None:
    for number, output in enumerate(outputs):
        output.loss.backward(retain_graph=True)
        if number == 1 and is_rank(rank):
            output.loss.backward()


def call_out_of_order(outputs: Iterator[Any], rank: int | None) -> None:
    before = None
    for number, output in enumerate(outputs):
        if number == 1 and is_rank(rank):
            assert before is not None
            before.loss.backward()
        output.loss.backward(retain_graph=True)
        before = output


def collect_first(outputs: Iterator[Any], rank: int | None) -> None:
    if is_rank(rank):
        sum(output.loss for output in list(outputs)).backward()
    else:
        for output in outputs:
            output.loss.backward()


def stop_before_backward(outputs: Iterator[Any], rank: int | None) -> None:
    for number, output in enumerate(outputs):
        if number == 1 and is_rank(rank):
            break
        output.loss.backward()


def stop_after_backward(outputs: Iterator[Any], rank: int | None) -> None:
    for number, output in enumerate(outputs):
        output.loss.backward()
        if number == 1 and is_rank(rank):
            break


def differentiate_twice(outputs: Iterator[Any], rank: int | None) -> None:
    for output in outputs:
        output.loss.backward(create_graph=is_rank(rank))


def stop_at_the_first(outputs: Iterator[Any], rank: int | None) -> None:
    for output in outputs:
        if is_rank(rank):
            break
        output.loss.backward()


def stop_at_the_last(outputs: Iterator[Any], rank: int | None) -> None:
    for number, output in enumerate(outputs):
        output.loss.backward()
        if number == MICROBATCHES - 1 and is_rank(rank):
            break


def fail_in_body(outputs: Iterator[Any], rank: int | None) -> None:
    for number, output in enumerate(outputs):
        output.loss.backward()
        if number == 1 and is_rank(rank):
            raise KeyError("mistake in the loop's body")


def fail_at_the_last(outputs: Iterator[Any], rank: int | None) -> None:
    for number, output in enumerate(outputs):
        output.loss.backward()
        if number == MICROBATCHES - 1 and is_rank(rank):
            raise KeyError("mistake in the loop's body")


def misbehave(bodies: Sequence[Body], rank: int | None, ranks: int, schedule: str = "1f1b") -> list[dict[str, Any]]:
    """For each body a good step, one with the body, and a good one again; what each raised, and the last gradients."""
    with kept_in_double():
        stages = ranks if ranks < 4 else ranks // 2
        model = parallelize(gpt2(), stages, num_microbatches=MICROBATCHES, schedule=schedule)
        inputs = rows(batch("causal", 8), model.data_parallel_rank, model.data_parallel_size)
        return [misbehave_once(model, inputs, body, rank) for body in bodies]


def misbehave_once(model: Any, inputs: Any, body: Body, rank: int | None) -> dict[str, Any]:
    run_step(model, inputs)
    model.zero_grad()
    found: dict[str, Any] = {"body": body.__name__}
    start, before = time.monotonic(), model.pipeline.last_step
    try:
        body(model(**inputs), rank)
        found["error"] = None
    except Exception as error:
        found["error"] = (type(error).__name__, str(error))
    found["seconds"] = time.monotonic() - start
    found["reported"] = model.pipeline.last_step is not before
    found["left with"] = gradients_of(model)
    model.zero_grad()
    try:
        found["losses"] = run_step(model, inputs)
        found["gradients"] = gradients_of(model)
    except Exception as error:
        found["later"] = (type(error).__name__, str(error))
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("body", "rank", "words"),
    [
        (skip, None, "backward() was not called on the loss of microbatch 1"),
        (skip_the_last, 1, "backward() was not called on the loss of microbatch 3"),
        (call_twice, None, "backward() of microbatch 1's loss was called a second time"),
        (call_out_of_order, 1, "backward() of microbatch 0's loss was called while microbatch 1 is due"),
        (collect_first, None, "backward() was not called on the loss of microbatch 0"),
        (differentiate_twice, 1, "backward(create_graph=True): gradients of gradients"),
    ],
)
def test_a_backward_that_is_not_as_due_is_an_error_on_every_rank(
    pool: Pool, body: Body, rank: int | None, words: str
) -> None:
    for number, (found,) in enumerate(pool.run(STAGES, misbehave, [body], rank, STAGES)):
        assert found["seconds"] < SOON
        kind, text = found["error"]
        if rank is None or number == rank:
            assert kind == "LoopError" and words in text
        else:
            assert kind == "PipelineFailure" and f"rank {rank} failed" in text and words in text
            # The ranks are no longer at one place: each further step says what happened.
            assert found["later"][0] == "PipelineFailure" and words in found["later"][1]


def stop_where_one_stands(outputs: Iterator[Any], rank: int | None) -> None:
    """Each rank at another microbatch."""
    for number, output in enumerate(outputs):
        if number == torch.distributed.get_rank() % MICROBATCHES:
            break
        output.loss.backward()


BREAKS = stop_before_backward, stop_after_backward, stop_at_the_first, stop_at_the_last, stop_where_one_stands


@pytest.mark.parametrize(("ranks", "schedule"), [(3, "1f1b"), (2, "zb-v"), (4, "1f1b")])
def test_after_a_break_on_all_ranks_the_step_is_whole_and_the_next_one_is_exact(
    pool: Pool, ranks: int, schedule: str
) -> None:
    expected = unsplit_step(gpt2(), (batch("causal", 8), 1.0))
    replicas = 2 if ranks == 4 else 1
    for found in zip(*pool.run(ranks, misbehave, BREAKS, None, ranks, schedule), strict=True):
        for rank in found:
            assert rank["error"] is None and rank["seconds"] < SOON, rank
            assert "later" not in rank, rank
            assert rank["reported"], f"{rank['body']}: the step that was left has come to its end"
            assert_same_gradients(rank["left with"], expected.gradients)
            assert_same_gradients(rank["gradients"], expected.gradients)
        total = sum(sum(rank["losses"]) for rank in found[:: ranks // replicas])
        assert total == pytest.approx(sum(expected.losses), rel=EXACT)


@pytest.mark.parametrize(
    ("body", "ranks", "odd"),
    [(stop_before_backward, 3, 0), (stop_after_backward, 4, 1), (fail_in_body, 3, 2), (fail_at_the_last, 4, 1)],
)
def test_leaving_the_loop_on_one_rank_is_an_error_on_every_rank(pool: Pool, body: Body, ranks: int, odd: int) -> None:
    for rank, (found,) in enumerate(pool.run(ranks, misbehave, [body], odd, ranks)):
        assert found["seconds"] < SOON
        if rank == odd and body in (fail_in_body, fail_at_the_last):
            assert found["error"] == ("KeyError", repr("mistake in the loop's body"))
        else:
            kind, text = found["error"] or found["later"]
            assert kind == "PipelineFailure" and f"rank {odd}" in text, text
        assert found["later"][0] == "PipelineFailure"


def fail_from_the_second_backward_on(odd: int) -> tuple[str, str]:
    """The backwards that a rank's step would run for itself fail too."""
    model = parallelize(gpt2(), 2, num_microbatches=MICROBATCHES)
    seen = []

    def hook(gradient: torch.Tensor) -> None:
        seen.append(gradient)
        if len(seen) > 1:
            raise KeyError("mistake in the backward")

    if torch.distributed.get_rank() == odd:
        next(model.parameters()).register_hook(hook)
    with pytest.raises((KeyError, RuntimeError)) as first:
        run_step(model, batch("causal", 8))
    with pytest.raises(RuntimeError) as later:
        run_step(model, batch("causal", 8))
    return str(first.value), str(later.value)


def test_a_step_that_cannot_come_to_its_end_fails_on_every_rank(pool: Pool) -> None:
    odd = 1
    for first, later in pool.run(2, fail_from_the_second_backward_on, odd, timeout=30):
        assert "mistake in the backward" in first
        assert f"rank {odd}" in later and "mistake in the backward" in later


def see_nan(spoiled: int) -> dict[str, Any]:
    """A weight of one rank is NaN for one step; every rank's loop stops when it sees so."""
    with kept_in_double():
        model = parallelize(gpt2(), STAGES, num_microbatches=MICROBATCHES)
        inputs = batch("causal", 4)
        weight = next(p for name, p in model.named_parameters() if "ln_" in name)
        kept = weight.detach().clone()
        if torch.distributed.get_rank() == spoiled:
            weight.data.fill_(torch.nan)
        seen = []
        for output in model(**inputs):
            seen.append(bool(output.loss.isnan()))
            if output.loss.isnan():
                break
            output.loss.backward()
        weight.data.copy_(kept)
        model.zero_grad()
        run_step(model, inputs)
        return {"seen": seen, "gradients": gradients_of(model)}


def test_a_loss_that_is_nan_is_seen_on_all_ranks(pool: Pool) -> None:
    expected = unsplit_step(gpt2(), (batch("causal", 4), 1.0)).gradients
    for found in pool.run(STAGES, see_nan, 0):
        assert found["seen"] == [True]
        assert_same_gradients(found["gradients"], expected)
