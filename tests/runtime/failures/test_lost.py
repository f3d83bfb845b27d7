"""A rank killed in the middle of a step: the others end with an error that names it, within ten seconds."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool, WorkerDied
from tests.support.training import parallelize, rows

LIMIT = 10.0  # what is promised
MICROBATCHES = 4


def lose_rank(stages: int, victim: int, moment: str, killed_at: Path) -> tuple[str, str, float, int | None]:
    """One good step, then one in which the victim is killed; what this rank's own step raised, and when."""
    rank = int(os.environ["RANK"])
    try:
        model = parallelize(FAMILIES["gpt2"].build(), stages, num_microbatches=MICROBATCHES)
        inputs = rows(batch("causal", 8), model.data_parallel_rank, model.data_parallel_size)
        for step in range(2):
            for number, output in enumerate(model(**inputs)):
                if rank == victim and step == 1 and number == 1 and moment == "before the backward":
                    end_self(killed_at)
                output.loss.backward()
                if rank == victim and step == 1 and number == MICROBATCHES - 1 and moment == "in the last microbatch":
                    end_self(killed_at)
        if rank == victim:
            end_self(killed_at)  # between two steps
        for output in model(**inputs):
            output.loss.backward()
        return "nothing", "", time.time(), None
    except Exception as error:
        return type(error).__name__, str(error), time.time(), getattr(error, "rank", None)


def end_self(killed_at: Path) -> None:
    killed_at.write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("world_size", "stages", "victim", "moment"),
    [
        (3, 3, 0, "before the backward"),
        (3, 3, 2, "in the last microbatch"),
        (3, 3, 1, "between two steps"),
        (4, 2, 3, "before the backward"),
    ],
)
def test_survivors_of_a_killed_rank_name_it_within_ten_seconds(
    pool: Pool, tmp_path: Path, world_size: int, stages: int, victim: int, moment: str
) -> None:
    """Neighbours and ranks further away, of the same pipeline and of another."""
    arguments = (stages, victim, moment, tmp_path / "killed at")
    outcomes = pool.run(world_size, lose_rank, *arguments, init=False, outcomes=True, timeout=100)
    end = outcomes.pop(victim)
    assert isinstance(end, WorkerDied) and "SIGKILL" in str(end), end
    killed_at = float((tmp_path / "killed at").read_text())
    for outcome in outcomes:
        assert not isinstance(outcome, BaseException), outcome
        kind, text, when, blamed = outcome
        assert kind == "PipelineFailure" and blamed == victim, f"{kind}: {text}"
        assert f"rank {victim} was lost" in text, text
        assert when - killed_at < LIMIT, f"a rank took {when - killed_at:.1f} s"
