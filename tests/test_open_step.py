"""One training step at a time: whatever else is called meanwhile is refused by name, without a hang and noise."""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from families import FAMILIES, batch
from pool import Pool
from training import assert_same_gradients, gradients_of, kept_in_double, parallelize, run_step, unsplit_step

STAGES, MICROBATCHES = 2, 4


def second_step(model: Any, inputs: Any, folder: Path) -> None:
    model(**inputs)


def evaluation(model: Any, inputs: Any, folder: Path) -> None:
    with torch.no_grad():
        model(**inputs)


def generation(model: Any, inputs: Any, folder: Path) -> None:
    model.generate(inputs["input_ids"][:1], max_new_tokens=2, do_sample=False)


def saving(model: Any, inputs: Any, folder: Path) -> None:
    model.save_parallelized(folder)


def loading(model: Any, inputs: Any, folder: Path) -> None:
    model.from_parallelized(folder)


def clipping(model: Any, inputs: Any, folder: Path) -> None:
    model.clip_grad_norm_(1.0)


def call_inside(other: Callable[..., None], folder: str) -> dict[str, Any]:
    """A step in the middle of which something else is called; then the step goes on to its end."""
    with kept_in_double():
        model = parallelize(FAMILIES["gpt2"].build(), STAGES, num_microbatches=MICROBATCHES)
        inputs = batch("causal", 8)
        found: dict[str, Any] = {}
        for number, output in enumerate(model(**inputs)):
            output.loss.backward()
            if number == 1:
                with pytest.raises(RuntimeError) as caught:
                    other(model, inputs, Path(folder))
                found["error"] = type(caught.value).__name__, str(caught.value)
                del caught
        found["gradients"] = gradients_of(model)
        return found


@pytest.mark.parametrize("other", [second_step, evaluation, generation, saving, loading, clipping])
def test_a_call_inside_a_step_is_refused_and_the_step_goes_on(
    pool: Pool, tmp_path: Path, other: Callable[..., None]
) -> None:
    expected = unsplit_step(FAMILIES["gpt2"].build(), (batch("causal", 8), 1.0)).gradients
    for found in pool.run(STAGES, call_inside, other, str(tmp_path)):
        kind, text = found["error"]
        assert kind == "LoopError"
        assert "a training step is under way (microbatch 1 of 4): finish the loop first" in text
        assert_same_gradients(found["gradients"], expected)


def two_at_once() -> tuple[str, list[float]]:
    """Two iterators, taken from in turns; then a step by itself."""
    model = parallelize(FAMILIES["gpt2"].build(), STAGES, num_microbatches=MICROBATCHES)
    inputs = batch("causal", 8)
    one, other = model(**inputs), model(**inputs)
    next(one).loss.backward()
    with pytest.raises(RuntimeError) as caught:
        next(other)
    text = str(caught.value)
    one.close()
    return text, run_step(model, inputs)


def test_two_interleaved_steps_are_refused_and_a_closed_one_frees_the_way(pool: Pool) -> None:
    for text, losses in pool.run(STAGES, two_at_once):
        assert "a training step is under way (microbatch 0 of 4)" in text and "close()" in text
        assert len(losses) == MICROBATCHES


def drop_without_a_loop() -> list[str]:
    model = parallelize(FAMILIES["gpt2"].build(), STAGES, num_microbatches=MICROBATCHES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(**batch("causal", 8))
    with warnings.catch_warnings(record=True) as none:
        warnings.simplefilter("always")
        run_step(model, batch("causal", 8))
    assert not none
    return [str(warning.message) for warning in caught]


def test_an_iterator_that_is_never_advanced_warns(pool: Pool) -> None:
    for (warning,) in pool.run(STAGES, drop_without_a_loop):
        assert "dropped before its first microbatch" in warning and "iterate over model(**batch)" in warning


def leave_alone(outputs: Iterator[Any]) -> None:
    for _ in outputs:
        raise KeyError("mistake in the loop's body")


def leave_on_one_rank(odd: int) -> tuple[str, str, str]:
    """What is printed besides the exception when one rank leaves its step by an error."""
    model = parallelize(FAMILIES["gpt2"].build(), STAGES, num_microbatches=MICROBATCHES)
    inputs = batch("causal", 8)
    printed, error, later = io.StringIO(), "", ""
    with contextlib.redirect_stderr(printed):
        try:
            if torch.distributed.get_rank() == odd:
                leave_alone(model(**inputs))
            else:
                run_step(model, inputs)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        try:
            run_step(model, inputs)
        except Exception as caught:
            later = f"{type(caught).__name__}: {caught}"
    return error, later, printed.getvalue()


def test_an_error_on_one_rank_prints_no_ignored_exceptions(pool: Pool) -> None:
    start = time.monotonic()
    (first, later, printed), (other, _, other_printed) = pool.run(STAGES, leave_on_one_rank, 0)
    assert first.startswith("KeyError")
    assert other.startswith("PipelineFailure") and "rank 0" in other
    assert later.startswith("PipelineFailure") and "rank 0" in later
    assert "Exception ignored" not in printed + other_printed
    assert time.monotonic() - start < 30
