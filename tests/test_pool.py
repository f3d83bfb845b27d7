"""The pool is what other tests stand on: its own claims, one by one."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support import pool as pool_module
from tests.support.pool import Pool, WorkerDied, WorkerTimeout


def sum_of_ranks(scale: float) -> torch.Tensor:
    value = torch.full((2,), scale * (dist.get_rank() + 1))
    dist.all_reduce(value)
    return value


def environment_of_launcher() -> tuple[bool, int, int, str]:
    was_initialized = dist.is_initialized()
    dist.init_process_group("gloo")
    return was_initialized, dist.get_rank(), dist.get_world_size(), os.environ.get("EXTRA", "")


def form_in_vain_on(lonely_rank: int) -> int:
    """One rank waits for a group that nobody else wants to form; how many groups torch has counted by then."""
    if int(os.environ["RANK"]) == lonely_rank:
        with pytest.raises(dist.DistError):
            dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    return num_groups_counted()


def num_groups_counted() -> int:
    return dist.distributed_c10d._world.group_count


def fail_on(failing_rank: int) -> int:
    if dist.get_rank() == failing_rank:
        raise KeyError("lost key")
    return dist.get_rank()


def fail_while_others_wait(failing_rank: int) -> None:
    if dist.get_rank() == failing_rank:
        raise ZeroDivisionError("cause")
    dist.barrier()


class AwkwardError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def raise_awkwardly() -> None:
    raise AwkwardError(1, 2)


def leave() -> None:
    raise SystemExit(3)


def kill_self(dying_rank: int) -> int:
    if dist.get_rank() == dying_rank:
        print("about to die")
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def sleep_long_on(sleeping_rank: int) -> int:
    rank = int(os.environ["RANK"])
    if rank == sleeping_rank:
        time.sleep(60)
    return rank


def spoil_settings() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "1"


def settings() -> tuple[torch.dtype, bool, bool, float]:
    return torch.get_default_dtype(), torch.is_grad_enabled(), "LEFT_BEHIND" in os.environ, torch.rand(()).item()


def process_id() -> int:
    return os.getpid()


def test_workers_are_reused(pool: Pool) -> None:
    """Where they form a group, one that fails to is replaced."""
    assert pool.run(2, process_id, init=False) == pool.run(2, process_id, init=False)


def test_a_function_can_initialise_from_the_environment(pool: Pool) -> None:
    results = pool.run(2, environment_of_launcher, init=False, environment={"EXTRA": "value"})
    assert results == [(False, 0, 2, "value"), (False, 1, 2, "value")]


def test_an_exception_keeps_its_type_and_names_its_rank(pool: Pool) -> None:
    with pytest.raises(KeyError, match="lost key") as caught:
        pool.run(3, fail_on, 2)
    notes = "\n".join(caught.value.__notes__)
    assert "on rank 2 of 3" in notes and "in fail_on" in notes


def test_the_cause_is_raised_and_not_what_followed_from_it(pool: Pool) -> None:
    with pytest.raises(ZeroDivisionError, match="cause"):
        pool.run(2, fail_while_others_wait, 1)


def test_exceptions_that_do_not_travel_are_still_told(pool: Pool) -> None:
    with pytest.raises(RuntimeError, match="AwkwardError: 1 and 2"):
        pool.run(1, raise_awkwardly)
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        pool.run(1, leave)


def test_a_killed_worker_is_named_and_replaced(pool: Pool) -> None:
    with pytest.raises(WorkerDied, match=r"rank 1 ended with signal SIGKILL; it printed:\nabout to die"):
        pool.run(2, kill_self, 1)
    assert pool.run(2, sum_of_ranks, 1.0)[1][0] == 3


def test_a_hanging_worker_is_shown_and_replaced(pool: Pool) -> None:
    first, second = pool.run(2, sleep_long_on, 1, timeout=5, outcomes=True, init=False)
    assert first == 0 and isinstance(second, WorkerTimeout) and "in sleep_long_on" in str(second)
    assert pool.run(2, sum_of_ranks, 1.0)[0][0] == 3


def test_a_group_that_does_not_form_is_formed_anew(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pool_module._launcher_environment
    calls: list[int] = []

    def wrong_once(rank: int, world_size: int, port: int) -> dict[str, str]:
        calls.append(rank)
        found = made(rank, world_size, port)
        return found | {"WORLD_SIZE": "many"} if len(calls) == 2 else found

    monkeypatch.setattr(pool_module, "_launcher_environment", wrong_once)
    assert pool.run(2, sum_of_ranks, 1.0)[0][0] == 3
    assert calls == [0, 1, 0, 1]


def test_a_group_formed_in_vain_on_one_rank_does_not_part_it_from_the_others(pool: Pool) -> None:
    workers = pool.run(2, process_id, init=False)
    assert pool.run(2, form_in_vain_on, 0, init=False) == [1, 0]
    assert pool.run(2, num_groups_counted, init=False) == [0, 0]
    assert pool.run(2, process_id, init=False) == workers
    results = pool.run(2, sum_of_ranks, 1.0)
    assert all(torch.equal(result, torch.full((2,), 3.0)) for result in results)


def test_one_task_leaves_nothing_for_the_next(pool: Pool) -> None:
    before = pool.run(1, settings)
    pool.run(1, spoil_settings)
    assert pool.run(1, settings) == before
