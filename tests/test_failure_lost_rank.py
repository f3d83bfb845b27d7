"""A rank that dies in the middle of a step: the others end with an error that names it, in seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import penstock
from penstock import PipelineFailure
from pool import Pool, WorkerDied

SECONDS = 10.0
STAGES = 3


def tiny() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=61, n_embd=16, n_layer=3, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return GPT2LMHeadModel(config)


def batch(size: int = 8, seed: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 61, (size, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


class Outcome:
    """What a rank saw: an error of a loop, how long it took, and whether a good step works afterwards."""

    def __init__(self, error: Exception | None, seconds: float, later: str) -> None:
        self.error, self.seconds, self.later = error, seconds, later


def good_step(model: Any) -> float:
    model.zero_grad()
    loss = 0.0
    for out in model(**batch()):
        out.loss.backward()
        loss += out.loss.item()
    return loss


def attempt(loop: Callable[[Any, int], None], num_microbatches: int = 4) -> Outcome:
    """On a worker: one good step, then `loop`, then another good step."""
    section = {"pipeline_parallel_size": STAGES, "num_microbatches": num_microbatches}
    model = penstock.initialize(tiny(), {"model_parallelism": section})
    first, error = good_step(model), None
    start = time.monotonic()
    try:
        loop(model, model.pipeline.rank)
    except Exception as raised:
        error = raised
    seconds = time.monotonic() - start
    try:
        later = "exact" if good_step(model) == first else "wrong"
    except PipelineFailure:
        later = "failed"
    return Outcome(error, seconds, later)


def kill_one(model: Any, rank: int) -> None:
    for index, out in enumerate(model(**batch())):
        if rank == 1 and index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        out.loss.backward()


def test_a_killed_rank_is_named_by_the_others_within_ten_seconds(pool: Pool) -> None:
    outcomes = pool.run(STAGES, attempt, kill_one, timeout=60, outcomes=True)
    assert isinstance(outcomes[1], WorkerDied)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, PipelineFailure) and outcomes[rank].error.rank == 1
        assert "rank 1 was lost" in str(outcomes[rank].error) and outcomes[rank].seconds < SECONDS
