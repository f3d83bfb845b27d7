"""One training step at a time: whatever else is called meanwhile is refused by name, without a hang and noise."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.families import FAMILIES, batch
from tests.support.launch import torchrun
from tests.support.pool import Pool
from tests.support.training import (
    EXACT,
    assert_same_gradients,
    gradients_of,
    kept_in_double,
    parallelize,
    run_step,
    unsplit_step,
)

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


OTHERS = second_step, evaluation, generation, saving, loading, clipping


def call_inside(folder: str) -> tuple[dict[str, tuple[str, str]], dict[str, Any]]:
    """A step in the middle of which other things are called; then the step goes on to its end."""
    with kept_in_double():
        model = parallelize(FAMILIES["gpt2"].build(), STAGES, num_microbatches=MICROBATCHES)
        inputs = batch("causal", 8)
        errors = {}
        for number, output in enumerate(model(**inputs)):
            output.loss.backward()
            for other in OTHERS if number == 1 else ():
                with pytest.raises(RuntimeError) as caught:
                    other(model, inputs, Path(folder))
                errors[other.__name__] = type(caught.value).__name__, str(caught.value)
                del caught
        return errors, gradients_of(model)


def test_a_call_inside_a_step_is_refused_and_the_step_goes_on(pool: Pool, tmp_path: Path) -> None:
    expected = unsplit_step(FAMILIES["gpt2"].build(), (batch("causal", 8), 1.0)).gradients
    for errors, gradients in pool.run(STAGES, call_inside, str(tmp_path)):
        assert len(errors) == len(OTHERS)
        for other, (kind, text) in errors.items():
            assert kind == "LoopError", other
            assert "a training step is under way (microbatch 1 of 4): finish the loop first" in text, other
        assert_same_gradients(gradients, expected)


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


def drop_without_a_loop() -> tuple[list[str], list[float]]:
    model = parallelize(FAMILIES["gpt2"].build(), STAGES, num_microbatches=MICROBATCHES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(**batch("causal", 8))
    with warnings.catch_warnings(record=True) as none, kept_in_double():
        warnings.simplefilter("always")
        losses = run_step(model, batch("causal", 8))
    assert not none
    return [str(warning.message) for warning in caught], losses


def test_an_iterator_that_is_never_advanced_warns_and_runs_nothing(pool: Pool) -> None:
    expected = sum(unsplit_step(FAMILIES["gpt2"].build(), (batch("causal", 8), 1.0)).losses)
    for (warning,), losses in pool.run(STAGES, drop_without_a_loop):
        assert "dropped before its first microbatch" in warning and "iterate over model(**batch)" in warning
        assert sum(losses) == pytest.approx(expected, rel=EXACT)


KEPT = """
import sys
import torch
import penstock
from tests.support.families import FAMILIES, batch

model = penstock.initialize(FAMILIES["gpt2"].build(), pipeline_parallel_size=2, num_microbatches=4)
forgotten = model(**batch("causal", 8))
begun = model(**batch("causal", 8))
next(begun).loss.backward()
if sys.argv[1] == "raise":
    raise KeyError("no cheese")
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["leave", "raise"])
def test_iterators_that_a_program_keeps_to_its_end_make_no_noise_there(end: str, tmp_path: Path) -> None:
    """The one that never began is warned of; the other one's step is left, unless an error ends it."""
    script = tmp_path / "kept.py"
    script.write_text(KEPT)
    done = torchrun(2, script, end, environment={"WHOLE_END": "1"})
    assert (done.returncode == 0) == (end == "leave"), done.stderr
    assert "Exception ignored" not in done.stderr and "dropped before its first microbatch" in done.stderr
    assert ("KeyError: 'no cheese'" in done.stderr) == (end == "raise")
