"""What a run that failed prints: the exception of the rank that failed, once and first, and nothing that hides it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ended import run_ranks
from tests.support.families import FAMILIES, batch
from tests.support.training import parallelize, run_step


def print_into(path: str, program: Callable[[], None]) -> None:
    """Run `program` as an interpreter does, with everything it prints, from C++ too, appended to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        program()
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # there is one
    sys.stderr.flush()


def fail_in_the_loop() -> None:
    model = parallelize(FAMILIES["gpt2"].build(), 2, num_microbatches=4)
    for step in range(3):
        for number, output in enumerate(model(**batch("causal", 4))):
            if step == 1 and number == 2 and os.environ["RANK"] == "1":
                raise KeyError("what is missing")
            output.loss.backward()


def fail_between_steps() -> None:
    model = parallelize(FAMILIES["gpt2"].build(), 2, num_microbatches=4)
    for step in range(3):
        if step == 1 and os.environ["RANK"] == "1":
            raise KeyError("what is missing")
        run_step(model, batch("causal", 4))


@pytest.mark.parametrize("program", [fail_in_the_loop, fail_between_steps])
def test_the_exception_of_the_rank_that_failed_is_shown_once_and_first(
    program: Callable[[], None], tmp_path: Path
) -> None:
    printed = tmp_path / "printed"
    run_ranks(2, print_into, str(printed), program)
    text = re.sub(r"^\[rank\d\]: ", "", printed.read_text(), flags=re.MULTILINE)  # as torch marks them
    assert text.count("\nKeyError: 'what is missing'") == 1, text
    failure = text.index("PipelineFailure: rank 1 ")
    assert text.index("\nKeyError: 'what is missing'") < failure, text
    # The other rank has it in its own line, with what to do.
    line = text[failure:].splitlines()[0]
    assert "KeyError: 'what is missing'" in line and "To go on, start the job again" in line, text
    for noise in ("waitForInput", "Exception ignored in", "The above exception", "[c10d]", "losss"):
        assert noise not in text, text
