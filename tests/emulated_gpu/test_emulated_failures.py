"""A dead peer raises nothing on NCCL: kernels wait on. The watcher ends them, on every rank, and says who died."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.utils.data import default_collate

from penstock import Booster, Elastic, HeterogeneousParallelPlugin, PipelineTemplate
from penstock.modeling.placeholders.ghosts import is_ghost
from penstock.runtime.failures.board import PipelineFailure
from tests.support.elastic_script import Samples
from tests.support.emulated_gpu import emulated_nccl
from tests.support.emulated_gpu.emulated_ranks import Case, on, spread, use_gpu
from tests.support.ended import LIMIT
from tests.support.pool import WorkerDied
from tests.support.training import kept_in_double

pytestmark = pytest.mark.slow

Run = Callable[..., list[Any]]


def work_until_a_rank_dies(case: Case, doing: str, victim: int, note: str) -> tuple[str, int | None, float]:
    """On a worker: the victim kills itself in the middle of `doing`. What the others raise, whom it names, and when."""
    device = use_gpu()
    model = spread(case)
    module = torch.get_device_module(device)
    inputs = on(device, case.batch())
    calls = 0

    def maybe_die() -> None:
        nonlocal calls
        calls += 1
        if dist.get_rank() == victim and calls == 6:
            Path(note).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def train() -> None:
        for output in model(**inputs):
            maybe_die()
            if doing == "waiting for the device":
                module.synchronize()
            output.loss.backward()
            if doing == "reading losses":
                output.loss.item()

    def evaluate() -> None:
        maybe_die()
        with torch.no_grad():
            model(**inputs)

    def generate() -> None:
        maybe_die()
        model.generate(inputs["input_ids"][:2], max_new_tokens=3, do_sample=False)

    if doing in ("evaluating", "generating"):
        model.eval()
    try:
        for _ in range(100):
            {"evaluating": evaluate, "generating": generate}.get(doing, train)()
    except PipelineFailure as error:
        raised_at = time.time()
        try:
            train()
        except PipelineFailure as again:
            assert again.rank == error.rank, "later calls blame the same rank"
        model.pipeline.close()
        return str(error), error.rank, raised_at
    return "nothing was raised", None, time.time()


@pytest.mark.parametrize(
    ("doing", "victim"), [("reading losses", 1), ("waiting for the device", 0), ("evaluating", 2), ("generating", 1)]
)
def test_a_killed_rank_ends_the_waits_of_all_others(gpus: Run, tmp_path: Path, doing: str, victim: int) -> None:
    note = tmp_path / "killed at"
    case = Case(3, dtype=torch.float32, options={"num_microbatches": 4})
    ends = gpus(3, work_until_a_rank_dies, case, doing, victim, str(note), outcomes=True)
    killed_at = float(note.read_text())
    assert isinstance(ends[victim], WorkerDied)
    for rank, end in enumerate(ends):
        if rank != victim:
            assert isinstance(end, tuple), end
            text, blamed, raised_at = end
            assert blamed == victim and f"rank {victim} was lost" in text
            assert raised_at - killed_at < LIMIT


def train_over_a_broken_transport(case: Case, error: str) -> tuple[str, int | None, str, list[list[str | None]]]:
    """On a worker: all processes live, but the first rank's transport has noted an error, and the last sends nothing.

    What is raised, and whom it blames; how errors are to be handled afterwards, and what groups were told when made.
    """
    inputs = on(use_gpu(), case.batch())
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # as torchrun does
    model = spread(case)
    afterwards = os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    for output in model(**inputs):
        output.loss.backward()
    if dist.get_rank() == 0:
        emulated_nccl.noted = getattr(ErrorType, error)
    try:
        for output in model(**inputs):
            if dist.get_rank() > 0:
                time.sleep(3)
            output.loss.backward()
        return "nothing was raised", None, afterwards, emulated_nccl.handling
    except PipelineFailure as failure:
        return str(failure), failure.rank, afterwards, emulated_nccl.handling
    finally:
        emulated_nccl.noted = ErrorType.SUCCESS
        model.pipeline.close()


@pytest.mark.parametrize(
    ("error", "words", "rank"),
    [
        ("COMM_ERROR", "rank 1 was lost: rank 0 had a transfer between devices that broke", 1),
        ("TIMEOUT", "rank 0 had a transfer between devices that did not end in time", None),
    ],
)
def test_what_nccl_only_notes_is_an_error_on_every_rank(gpus: Run, error: str, words: str, rank: int | None) -> None:
    case = Case(2, dtype=torch.float32, options={"num_microbatches": 4})
    for text, blamed, afterwards, made in gpus(2, train_over_a_broken_transport, case, error):
        assert text.startswith(words) and blamed == rank
        assert made and all(told == ["0", "0", "0"] for told in made), "torch would end the process"
        assert afterwards == "1", "as it was"


def train_though_one_dies(store: str, victim: int, steps: int) -> dict[int, float]:
    """On a worker: an elastic run, in which one process kills itself between the third backward and its update."""
    device = use_gpu()
    with kept_in_double():
        model = Case().build()
        plugin = HeterogeneousParallelPlugin(
            microbatch_size=2,
            global_batch_size=8,
            elastic=Elastic(
                store, start=3, templates=[PipelineTemplate.balanced(model, stages) for stages in (1, 2, 3)], copies=2
            ),
        )
        booster = Booster(plugin)
        loader = plugin.prepare_dataloader(
            [{"input_ids": row, "labels": row} for row in Samples().rows], collate_fn=default_collate
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
        batches, losses = iter(loader), {}
        while booster.step < steps:
            optimizer.zero_grad()
            loss = booster.execute_pipeline(batches, model)["loss"]
            # One whose step was redone meanwhile, after the loss, may have the victim's rank now.
            if booster.step == 2 and dist.get_rank() == victim and dist.get_world_size() == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            losses[booster.step] = loss.item()
        assert {parameter.device for parameter in model.parameters() if not is_ghost(parameter)} == {device}
        assert device.type == "cuda" or emulated_nccl.counts.get("allreduce", 0) > 0
        assert all(told[1:] == ["0", "0"] for told in emulated_nccl.handling), "torch's default group, too"
        assert [change.lost for change in booster.changes] == [(victim,)]
        model.pipeline.close()
        for thread in threading.enumerate():
            if thread.name == "penstock-member":
                thread.join(10)
                assert not thread.is_alive()
        return losses


def test_an_elastic_run_goes_on_when_a_device_is_lost(gpus: Run, tmp_path: Path) -> None:
    steps, victim, expected = 4, 0, {}
    model, rows = Case().build(), Samples().rows
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with kept_in_double():
        for number in range(steps):
            batch = rows[8 * number : 8 * number + 8]
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected[number + 1] = loss.item()
    store = tmp_path.joinpath("store").as_uri()
    ends = gpus(3, train_though_one_dies, store, victim, steps, outcomes=True, init=False)
    survivors = [end for end in ends if not isinstance(end, WorkerDied)]  # members have numbers of their own
    assert len(survivors) == 2, ends
    for losses in survivors:
        assert losses == pytest.approx(expected, abs=1e-9)
