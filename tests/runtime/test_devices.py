"""Which device each rank takes and makes the current one, with the functions of a GPU played; and time limits."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import penstock
from penstock import HeterogeneousParallelPlugin
from penstock.runtime.comm import bootstrap
from penstock.runtime.comm.devices import backend, local_device, use_local_device
from penstock.runtime.failures.board import PipelineFailure
from penstock.runtime.formation import new_job
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import parallelize

CUDA = torch.device("cuda")


@contextlib.contextmanager
def gpus(count: int, local_rank: str | None, current: int = 0, uuid: str = "", kind: torch.device = CUDA) -> Iterator[
    list[int]
]:  # fmt: skip
    """As if this process saw `count` devices, all of one `uuid`. Gives the indices that were made current."""
    chosen: list[int] = []
    played = {
        "is_available": lambda: count > 0,
        "current_accelerator": lambda: kind,
        "device_count": lambda: count,
        "current_device_index": lambda: chosen[-1] if chosen else current,
        "set_device_index": chosen.append,
    }
    properties = SimpleNamespace(get_device_properties=lambda index: SimpleNamespace(uuid=uuid))
    with mock.patch.multiple(torch.accelerator, **played), mock.patch.dict(os.environ):
        os.environ.pop("LOCAL_RANK", None)
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank
        with mock.patch.object(torch, "get_device_module", lambda device: properties):
            yield chosen


@pytest.mark.parametrize(
    ("count", "local_rank", "current", "index"),
    [
        (4, "2", 0, 2),  # torchrun
        (1, "3", 0, 0),  # srun --gpus-per-task=1
        (4, None, 2, 2),  # torch.cuda.set_device(2) in a program without a launcher
        (1, None, 0, 0),
        (4, "", 1, 1),
    ],
)
def test_a_rank_takes_its_gpu(count: int, local_rank: str | None, current: int, index: int) -> None:
    with gpus(count, local_rank, current) as chosen:
        assert local_device() == torch.device("cuda", index)
        assert chosen == []
        use_local_device()
        assert chosen == [index]
        assert backend() == "cpu:gloo,cuda:nccl"


def test_a_local_rank_beyond_the_gpus_is_refused() -> None:
    with gpus(2, "2"), pytest.raises(RuntimeError, match=r"local rank 2 has no GPU: this process sees 2; start"):
        local_device()


@pytest.mark.parametrize(("count", "kind"), [(0, CUDA), (1, torch.device("mps"))])
def test_without_a_gpu_that_ranks_can_share_tensors_of_it_is_the_cpu(count: int, kind: torch.device) -> None:
    with gpus(count, "0", kind=kind) as chosen:
        assert local_device() == torch.device("cpu") and backend() == "gloo"
        use_local_device()
        assert chosen == []


def devices_of_a_job(uuids: list[str], by_user: bool) -> tuple[str, list[tuple[str, int]]]:
    """On a worker: form a job where every process sees one GPU. What became of it, and what was done in which order."""
    rank = int(os.environ["RANK"])
    done: list[tuple[str, int]] = []
    real = dist.init_process_group

    def initialize(*arguments: Any, **options: Any) -> None:
        done.append(("process group", 0))
        options.pop("backend", None)
        real("gloo", **options)

    if by_user:
        real("gloo")
    with gpus(1, str(rank), uuid=uuids[rank]) as chosen, mock.patch.object(dist, "init_process_group", initialize):
        remember = chosen.append
        with mock.patch.object(
            torch.accelerator, "set_device_index", lambda index: (done.append(("device", index)), remember(index))
        ):
            try:
                with new_job() as board:
                    board.retire()
                    return "formed", done
            except Exception as error:
                return f"{type(error).__name__}: {error}", done


@pytest.mark.parametrize("by_user", [False, True])
def test_the_device_is_the_current_one_before_anything_else(pool: Pool, by_user: bool) -> None:
    for outcome, done in pool.run(2, devices_of_a_job, ["GPU-a", "GPU-b"], by_user, init=False):
        assert outcome == "formed"
        assert done[0] == ("device", 0)
        assert (("process group", 0) in done) == (not by_user)


def test_two_ranks_on_one_gpu_are_named_on_every_rank(pool: Pool) -> None:
    for outcome, _ in pool.run(3, devices_of_a_job, ["GPU-a", "GPU-b", "GPU-a"], True, init=False):
        assert outcome.startswith("RuntimeError: ranks 0, 2 compute on the same GPU (GPU-a), but each")


def test_gpus_without_a_uuid_are_not_compared(pool: Pool) -> None:
    assert {outcome for outcome, _ in pool.run(2, devices_of_a_job, ["", ""], True, init=False)} == {"formed"}


def bound_device() -> torch.device:
    dist.init_process_group("gloo")
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 3))
    with gpus(4, "1"), mock.patch.object(dist, "group", SimpleNamespace(WORLD=world)):
        return local_device()


def test_a_device_that_the_default_group_is_bound_to_is_taken(pool: Pool) -> None:
    assert pool.run(1, bound_device, init=False) == [torch.device("cuda", 3)]


# -- time limits -------------------------------------------------------------------------------------------------------


def limits(timeout: float | None, by_user: float | None, through_plugin: bool = False) -> set[float]:
    """On a worker: the time limits, in seconds, of the process groups of a model, and of torch's default group."""
    if by_user is not None:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=by_user))
    model = FAMILIES["gpt2"].build()
    if through_plugin:
        plugin = HeterogeneousParallelPlugin(timeout=timeout)
        templates = penstock.PipelineTemplate.balanced(model, 2)
        plugin.set_pipelines([templates], {templates: 2})
        model, *_ = plugin.configure(model)
    else:
        model = parallelize(model, 2, timeout=timeout)
    made = [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, dist.ProcessGroup)]
    assert len(made) > 2
    if by_user is not None:
        made.remove(dist.group.WORLD)
    cpu = torch.device("cpu")
    return {group._get_backend(cpu).options._timeout.total_seconds() for group in made}


@pytest.mark.parametrize(
    ("timeout", "by_user", "expected"),
    [(None, None, 1800), (None, 77, 77), (33.5, 77, 33.5)],
)
def test_process_groups_have_the_time_limit_asked_for(
    pool: Pool, timeout: float | None, by_user: float | None, expected: float
) -> None:
    assert pool.run(2, limits, timeout, by_user, init=False) == [{expected}] * 2


def test_the_plugin_sets_the_time_limit_too(pool: Pool) -> None:
    assert pool.run(2, limits, 33.5, None, True, init=False) == [{33.5}] * 2
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds, or null, got 0"):
        HeterogeneousParallelPlugin(timeout=0)


def one_rank_stands_still(seen: Path) -> tuple[float, str]:
    """On a worker: rank 1 comes to an evaluation once rank 0 has given up. What they see, after how many seconds."""
    parallelize(FAMILIES["gpt2"].build(), 2)  # ranks come at different times: from here on they are together
    model = parallelize(FAMILIES["gpt2"].build(), 2, timeout=5, patience=600)
    start = time.monotonic()
    with torch.no_grad():
        if dist.get_rank() == 1:
            while not seen.exists() and time.monotonic() < start + 20:
                time.sleep(0.05)
        try:
            model(**batch("causal", 4))
        except PipelineFailure as error:
            seen.touch()
            return time.monotonic() - start, str(error)
    return time.monotonic() - start, "nothing"


@pytest.mark.slow
def test_a_rank_that_stands_still_is_an_error_after_the_time_limit(pool: Pool, tmp_path: Path) -> None:
    (seconds, text), (_, its_text) = pool.run(2, one_rank_stands_still, tmp_path / "seen")
    assert 5 <= seconds < 20, "rank 1 moves again after 20 seconds"
    assert "5000ms" in text and "beginning evaluation" in text
    assert its_text != "nothing"


def test_a_process_alone_takes_the_current_device() -> None:
    """No launcher: the user's `torch.cuda.set_device(2)` holds."""
    places = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "SLURM", "OMPI"))}
    with gpus(4, None, current=2) as chosen, mock.patch.dict(os.environ, places, clear=True):
        with mock.patch.object(dist, "init_process_group"):
            bootstrap.ensure_process_group()
        assert chosen == [2] and "LOCAL_RANK" not in os.environ
