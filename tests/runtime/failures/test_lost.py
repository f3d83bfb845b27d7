"""A rank killed in the middle of a step: the others end with an error that names it, within ten seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

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


def lose_source_of_large_tensors(doing: str, folder: Path) -> tuple[str, str, float, int | None]:
    """The last rank is killed in the middle of what it sends: outputs of 67 MB, or a weight of 17 MB."""
    config = GPT2Config(
        vocab_size=16384, n_embd=256, n_layer=2, n_head=2, n_positions=128, bos_token_id=0, eos_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = parallelize(GPT2LMHeadModel(config), 2, num_microbatches=1)
    name = {"evaluating": "broadcast", "saving": "isend"}[doing]
    begin: Callable[..., Any] = getattr(dist, name)

    def begin_and_end(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        work = begin(tensor, *arguments, **options)
        if tensor.nbytes >= 1 << 24:
            time.sleep(0.005)  # some of it is under way; whatever is, the other rank hears of the loss
            end_self(folder / "killed at")
        return work

    if dist.get_rank() == 1:
        setattr(dist, name, begin_and_end)
    try:
        if doing == "evaluating":
            with torch.no_grad():
                model.eval()(torch.zeros(8, 128, dtype=torch.long))
        else:
            model.save_parallelized(folder / "model", merge_checkpoints=True)
        return "nothing", "", time.time(), None
    except Exception as error:
        return type(error).__name__, str(error), time.time(), getattr(error, "rank", None)


@pytest.mark.parametrize("doing", ["evaluating", "saving"])
def test_a_rank_lost_in_the_middle_of_a_large_tensor_is_named(pool: Pool, tmp_path: Path, doing: str) -> None:
    """gloo tells nobody of it."""
    outcome, end = pool.run(2, lose_source_of_large_tensors, doing, tmp_path, outcomes=True, timeout=100)
    assert isinstance(end, WorkerDied), end
    assert not isinstance(outcome, BaseException), outcome
    kind, text, when, blamed = outcome
    assert kind == "PipelineFailure" and blamed == 1 and "rank 1 was lost" in text, f"{kind}: {text}"
    assert when - float((tmp_path / "killed at").read_text()) < LIMIT
