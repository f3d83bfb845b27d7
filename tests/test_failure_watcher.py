"""What the watcher sees while the host of its rank is elsewhere: in its own code, or waiting for a rank that lives."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from ended import LIMIT, End, fault_now, kill_self, run_ranks
from families import FAMILIES, batch
from launch import run_command
from penstock import PipelineFailure
from penstock.runtime import formation
from penstock.runtime.comm import rollcall
from penstock.runtime.comm.groups import Groups
from penstock.runtime.failures import inquiry
from penstock.runtime.failures import ring as ring_module
from penstock.runtime.failures.keys import Keys
from penstock.runtime.failures.ring import Ring
from pool import Pool
from training import parallelize, run_step

LONG = 60.0  # as good as for ever


def build(stages: int, **options: Any) -> Any:
    return parallelize(FAMILIES["gpt2"].build(), stages, num_microbatches=2, **options)


def my_rank() -> int:
    return torch.distributed.get_rank()


def evaluate(model: Any) -> None:
    with torch.no_grad():
        model(**batch("causal", 4))


def assert_named(ends: list[End], victim: int, words: str = "was lost") -> None:
    """All but the victim ended within the time promised, with an error that names it."""
    killed = ends[victim]
    for rank, end in enumerate(ends):
        if rank != victim:
            assert end.kind == "PipelineFailure", f"rank {rank}: {end.kind}: {end.text} {end.value}"
            assert f"rank {victim} {words}" in end.text, end.text
            assert end.at - killed.at < LIMIT


# ---------------------------------------------------------------- wherever the host is


def wait_for_one_that_sleeps() -> None:
    """Rank 2 dies while rank 1 is in its own code, and rank 0 waits for rank 1."""
    model = build(3)
    evaluate(model)
    if my_rank() == 2:
        time.sleep(1.0)
        kill_self()
    if my_rank() == 1:
        give_up = time.monotonic() + LONG
        while model.pipeline.board.failed is None and time.monotonic() < give_up:
            time.sleep(0.01)
        time.sleep(2.0)  # its own code is not interrupted
    run_step(model, batch("causal", 4))


def test_a_host_that_waits_for_a_live_rank_hears_of_a_dead_one() -> None:
    ends = run_ranks(3, wait_for_one_that_sleeps)
    assert_named(ends, 2)
    # It was woken, while the one it waited for still slept; that one hears at its next call.
    assert ends[0].at < ends[1].at - 1.0


def die_in_a_loop(what: str) -> None:
    """The second of two pipelines loses a rank while both only evaluate, or only generate."""
    model = build(2)
    ids = torch.ones(1, 3, dtype=torch.int64)
    for number in range(10_000):
        if what == "evaluate":
            evaluate(model)
        else:
            model.generate(ids, max_new_tokens=2, do_sample=False)
        if my_rank() == 3 and number == 2:
            kill_self()


@pytest.mark.parametrize("what", ["evaluate", "generate"])
def test_a_pipeline_that_dies_without_training_takes_the_others_down(what: str) -> None:
    assert_named(run_ranks(4, die_in_a_loop, what), 3)


def die_with_a_child() -> None:
    """The process that dies has a forked child, as with a data loader's workers, which holds its files open."""
    model = build(2)
    if my_rank() == 1:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        kill_self()
    give_up = time.monotonic() + 15
    while model.pipeline.board.failed is None and time.monotonic() < give_up:
        time.sleep(0.05)
    run_step(model, batch("causal", 4))


def test_a_child_process_does_not_hide_the_end_of_its_parent() -> None:
    assert_named(run_ranks(2, die_with_a_child), 1)


# ---------------------------------------------------------------- whose fault it is


class Rows(torch.utils.data.Dataset):
    """Rows of which the fifth kills the worker that reads it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 4 and int(os.environ["RANK"]) == 1:
            time.sleep(1.0)  # so that its rank waits for another one by then
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(8, dtype=torch.int64) * index


def lose_a_loader_worker() -> None:
    model = build(2)
    loader = DataLoader(Rows(), batch_size=2, num_workers=1, prefetch_factor=4, multiprocessing_context="fork")
    for number, rows in enumerate(loader):
        if my_rank() == 0 and number == 1:
            time.sleep(3.0)
        run_step(model, {"input_ids": rows, "labels": rows})


def test_a_lost_loader_worker_is_blamed_on_its_own_rank() -> None:
    ends = run_ranks(2, lose_a_loader_worker)
    assert ends[1].kind == "RuntimeError" and "DataLoader worker" in ends[1].text, ends[1]
    assert ends[0].kind == "PipelineFailure", ends[0]
    assert "rank 1 failed: RuntimeError: DataLoader worker" in ends[0].text or (
        "rank 1 was lost: it ended with RuntimeError: DataLoader worker" in ends[0].text
    ), ends[0].text


def fail_in_own_code(by: int) -> None:
    model = build(3)
    run_step(model, batch("causal", 4))
    if my_rank() == by:
        raise KeyError("a mistake in my own code, " + 600 * "!")
    run_step(model, batch("causal", 4))


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("by", [0, 1])
def test_an_error_in_a_ranks_own_code_is_told_in_full(by: int, by_hand: bool) -> None:
    """Also when it takes the job's store with it."""
    ends = run_ranks(3, fail_in_own_code, by, by_hand=by_hand)
    assert ends[by].kind == "KeyError"
    assert_named(ends, by)
    for rank, end in enumerate(ends):
        if rank != by:
            assert "it ended with KeyError: 'a mistake in my own code, " + 600 * "!" in end.text
            assert "store" not in end.text


def end_early() -> None:
    model = build(2)
    if my_rank() == 0:
        evaluate(model)


def test_a_rank_whose_program_has_ended_is_not_taken_for_killed() -> None:
    ends = run_ranks(2, end_early)
    assert ends[1].kind == "nothing"
    assert_named(ends, 1)
    assert "its program had ended" in ends[0].text


def save_then_die(folder: str) -> None:
    model = build(2)
    if my_rank() == 0:
        model.pipeline.board.check()
    model.save_parallelized(folder)
    if my_rank() == 1:
        kill_self()
    run_step(model, batch("causal", 4))


def test_an_error_says_how_to_go_on(tmp_path: Path) -> None:
    ends = run_ranks(2, save_then_die, str(tmp_path / "saved"))
    assert_named(ends, 1)
    assert ends[0].text.endswith(
        f"To go on, start the job again and load the last checkpoint: model.from_parallelized('{tmp_path / 'saved'}')"
    )


# ---------------------------------------------------------------- waiting for long


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def save_while_one_sleeps(folder: str, stages: int = 2) -> list[str]:
    heard = Heard()
    logging.getLogger("penstock").addHandler(heard)
    model = build(stages, patience=1.0)
    if my_rank() == 1:
        time.sleep(6.0)
    model.save_parallelized(folder)
    return heard.lines


def test_a_rank_that_waits_for_long_says_once_for_whom(tmp_path: Path) -> None:
    one, other = run_ranks(2, save_while_one_sleeps, str(tmp_path))
    assert one.kind == other.kind == "nothing", (one, other)
    (line,) = one.value
    assert line.startswith("rank 0 has waited ") and " s in save_parallelized; rank 1 is in its own program " in line
    assert "test_failure_watcher.py, line" in line and "every rank of a pipeline must make the same calls" in line
    assert other.value == []


def test_one_rank_asks_for_all_that_wait(tmp_path: Path) -> None:
    ends = run_ranks(4, save_while_one_sleeps, str(tmp_path), 2)
    assert all(end.kind == "nothing" for end in ends), ends
    ((line,), *others) = [end.value for end in ends]
    assert line.startswith("rank 0 has waited ") and "; rank 1 is in its own program " in line
    assert "rank 2" not in line and "rank 3" not in line and others == [[], [], []]


def make_different_calls(folder: str) -> None:
    # The ranks find out by themselves when they come together; here the watcher is to.
    with mock.patch.object(rollcall, "PATIENCE", LONG):
        model = build(2, patience=1.0)
        evaluate(model)
        if my_rank() == 0:
            model.save_parallelized(folder)
        evaluate(model)


def test_calls_that_can_never_end_together_are_an_error_on_every_rank(tmp_path: Path) -> None:
    for rank, end in enumerate(run_ranks(2, make_different_calls, str(tmp_path))):
        assert end.kind == "PipelineFailure", f"rank {rank}: {end}"
        assert "in save_parallelized" in end.text and "in evaluation" in end.text
        assert "every rank of a pipeline must make the same calls; this can never end" in end.text


def make_another_call_after_a_long_silence(folder: str) -> None:
    with mock.patch.object(rollcall, "PATIENCE", LONG), mock.patch.object(inquiry, "TRUST", 3):
        model = build(2, patience=1.0)
        evaluate(model)
        if my_rank() == 0:
            model.save_parallelized(folder)
        elif os.fork() == 0:
            time.sleep(4.5)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        else:
            model.pipeline.board.patience = LONG  # it does not ask itself
            os.kill(os.getpid(), signal.SIGSTOP)
        evaluate(model)


def test_a_rank_that_has_not_answered_is_asked_again(tmp_path: Path) -> None:
    for rank, end in enumerate(run_ranks(2, make_another_call_after_a_long_silence, str(tmp_path))):
        assert end.kind == "PipelineFailure", f"rank {rank}: {end}"
        assert "this can never end" in end.text, end.text


SECONDS = 2.0  # that a transfer may take


def work_beside_one_that_stands_still(victim: int, moment: str) -> None:
    """A rank stands still where process groups are made, or between two steps."""

    def stand_still(*_: Any) -> None:
        fault_now()
        if my_rank() == victim:
            os.kill(os.getpid(), signal.SIGSTOP)

    with mock.patch.object(
        formation, "Groups", side_effect=lambda *given: (stand_still(), Groups(*given))[1]
    ) as groups:
        if moment != "forming":
            groups.side_effect = Groups
        model = build(3, timeout=SECONDS)
    run_step(model, batch("causal", 4))
    stand_still()
    run_step(model, batch("causal", 4))


@pytest.mark.parametrize("moment", ["forming", "training"])
def test_one_that_stands_still_with_the_store_ends_the_others_soon_after_their_timeout(moment: str) -> None:
    """By hand the store is in rank 0's process: it answers nothing any more, not even that a failure is recorded."""
    still, *others = run_ranks(3, work_beside_one_that_stands_still, 0, moment, by_hand=True)
    assert still.kind == "stands still"
    for rank, end in enumerate(others, 1):
        assert end.kind == "PipelineFailure", f"rank {rank}: {end}"
        assert end.fault_at is not None and end.at - end.fault_at < SECONDS + 5.0, end


# ---------------------------------------------------------------- nothing is left behind


def open_and_close() -> dict[str, Any]:
    def watchers() -> int:
        return sum(thread.name == "penstock-watcher" for thread in threading.enumerate())

    def sockets() -> int:
        links = (os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_link(name))
        return sum(link.startswith("socket") for link in links)

    hook = sys.excepthook
    models = [build(2), build(2)]
    while_open = (watchers(), sys.excepthook is not hook)
    wrapped = sys.excepthook
    for model in models:
        model.pipeline.close()
    first = sockets()
    for _ in range(5):
        model = build(2)
        run_step(model, batch("causal", 4))
        model.pipeline.close()
    return {
        "open": while_open,
        "closed": (watchers(), sys.excepthook is not hook),
        "wrapped": wrapped is not hook,
        "sockets": sockets() - first,
    }


def _is_link(name: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{name}")


def test_a_closed_pipeline_leaves_no_thread_no_hook_and_no_socket(pool: Pool) -> None:
    for found in pool.run(2, open_and_close):
        assert found["open"] == (1, True)
        assert found["closed"] == (0, False)
        assert found["sockets"] <= 0


def fail_and_come_back() -> Iterator[Any]:
    """A job that failed is closed, and another one is formed in the same processes."""
    model = build(2)
    try:
        for number, output in enumerate(model(**batch("causal", 4))):
            if my_rank() == 1 and number == 1:
                raise KeyError("a mistake")
            output.loss.backward()
        run_step(model, batch("causal", 4))
        raise AssertionError("the failure was not told")
    except (KeyError, PipelineFailure) as error:
        first = type(error).__name__
    model.pipeline.close()
    again = build(2)
    return first, run_step(again, batch("causal", 4))  # type: ignore[return-value]


def test_another_job_can_be_formed_after_one_has_failed(pool: Pool) -> None:
    one, other = pool.run(2, fail_and_come_back, timeout=100)
    assert (one[0], other[0]) == ("PipelineFailure", "KeyError")
    assert one[1] == other[1]


# ---------------------------------------------------------------- the end of a process


def test_a_rank_that_ends_early_hands_its_news_to_one_that_starts_late() -> None:
    """Rank 0 learns that rank 1 is lost, and ends before rank 2, its other neighbour, has called it."""
    store = torch.distributed.HashStore()
    heard: list[tuple[str, Any]] = []

    def start(rank: int) -> tuple[Ring, threading.Thread]:
        ring = Ring(
            Keys(store, 5.0), rank, 3,
            on_news=lambda origin, news: heard.append((f"{rank} from {origin}", news)),
            on_lost=lambda lost: heard.append((f"{rank} lost", lost)),
            on_left=lambda left: heard.append((f"{rank} saw leave", left)),
        )  # fmt: skip
        thread = threading.Thread(target=ring.serve, args=(lambda: None, 1.0), daemon=True)
        thread.start()
        return ring, thread

    first, ending = start(0)
    first.tell({"lost": 1})
    first.stop()
    time.sleep(0.5)
    last, serving = start(2)
    ending.join(10)
    deadline = time.monotonic() + 10
    while len(heard) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    last.stop(leave=False)
    serving.join(10)
    assert heard == [("2 from 0", {"lost": 1}), ("2 saw leave", 0)]
    first.close()
    last.close()


def silent_ring() -> Ring:
    nobody: Any = dict.fromkeys(("on_news", "on_lost", "on_left"), lambda *_: None)
    return Ring(Keys(torch.distributed.HashStore(), 2.0), 0, 2, "127.0.0.1", **nobody)


def test_a_store_that_is_slow_at_first_ends_nothing() -> None:
    with mock.patch.object(Keys, "put", lambda keys, *_: keys.ask(lambda: time.sleep(3.0))):
        silent_ring().close()


def test_questions_to_the_store_are_put_by_one_thread() -> None:
    keys = Keys(torch.distributed.HashStore(), 5.0)
    assert len({id(thread) for thread in [keys.within(str(n)).ask(threading.current_thread) for n in range(9)]}) == 1


# ---------------------------------------------------------------- strangers


def test_who_calls_and_says_nothing_is_not_listened_to_for_ever() -> None:
    ring = silent_ring()
    with mock.patch.object(ring_module, "CALLER_SECONDS", 0.5):
        thread = threading.Thread(target=ring.serve, args=(lambda: None, 0.2), daemon=True)
        thread.start()
        with socket.create_connection(("127.0.0.1", ring.address["port"]), timeout=10) as call:
            assert b"number" in call.recv(1000)
            assert call.recv(1000) == b""
    ring.stop(leave=False)
    thread.join(10)
    ring.close()


def test_who_knows_the_store_but_not_the_secret_takes_no_ranks_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the secret, the same call is taken for the rank's: its end without leave is a loss."""
    monkeypatch.setenv("PENSTOCK_SECRET", "known to the ranks")
    store, lost = torch.distributed.HashStore(), []
    ring = Ring(
        Keys(store, 5.0), 0, 3, "127.0.0.1",
        on_news=lambda *_: None, on_lost=lost.append, on_left=lambda _: None,
    )  # fmt: skip
    thread = threading.Thread(target=ring.serve, args=(lambda: None, 1.0), daemon=True)
    thread.start()
    key = "penstock/ring/0/0"
    address = json.loads(store.get(key))
    for secret in ("", "guessed", "known to the ranks"):
        assert lost == []
        call = socket.create_connection(("127.0.0.1", address["port"]), timeout=10)
        with call, call.makefile("rwb") as lines:
            challenge = json.loads(lines.readline())
            said = ["calls", 2, address["token"], challenge["number"], "mine", None]
            proof = hmac.new(secret.encode(), json.dumps(said).encode(), "sha256").hexdigest()
            lines.write(json.dumps({"calls": 2, "number": "mine", "news": None, "proof": proof}).encode() + b"\n")
            lines.flush()
            answer = lines.readline()
            assert bool(answer) == (secret == "known to the ranks")
            assert secret.encode() not in json.dumps(challenge).encode() + answer or not secret
    deadline = time.monotonic() + 10
    while not lost and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lost == [2]
    ring.stop(leave=False)
    thread.join(10)
    ring.close()


GARBAGE = {"a request of the web": b"GET / HTTP/1.0\r\n\r\n", "no number": b'{"calls": Infinity}\n'}
GARBAGE["depth"] = b"[" * 200_000 + b"\n"


@pytest.mark.parametrize("words", GARBAGE.values(), ids=GARBAGE)
def test_whatever_a_stranger_says_a_rank_goes_on_watching(words: bytes) -> None:
    def on_news(origin: int, news: Any) -> None:
        raise KeyError("a mistake in what follows from news")

    store, losts = torch.distributed.HashStore(), (list[int](), list[int]())
    rings = [
        Ring(Keys(store, 5.0), rank, 2, "127.0.0.1", on_news=on_news, on_lost=lost.append, on_left=lambda _: None)
        for rank, lost in enumerate(losts)
    ]
    threads = [threading.Thread(target=ring.serve, args=(lambda: None, 1.0), daemon=True) for ring in rings]
    for thread in threads:
        thread.start()
    for _ in range(5):
        call = socket.create_connection(("127.0.0.1", rings[0].address["port"]), timeout=10)
        call.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset as it goes
        with call, contextlib.suppress(OSError):
            call.sendall(words)
    time.sleep(1.0)
    rings[1].tell({"news": "that is handled wrongly"})
    time.sleep(1.0)
    assert all(thread.is_alive() for thread in threads) and losts == ([], [])
    for ring, thread in zip(rings, threads, strict=True):
        ring.stop(leave=True)
        thread.join(10)
        ring.close()


def test_a_rank_listens_only_where_the_others_are() -> None:
    """Ranks that meet at a loopback address are on one machine: 127.0.0.2 is another address of it."""
    store = torch.distributed.HashStore()
    for host, is_open in (("127.0.0.1", False), (None, True)):
        nobody: Any = dict.fromkeys(("on_news", "on_lost", "on_left"), lambda *_: None)
        ring = Ring(Keys(store, 5.0), 0, 3, host, **nobody)
        try:
            with socket.create_connection(("127.0.0.2", ring.address["port"]), timeout=10):
                assert is_open
        except ConnectionRefusedError:
            assert not is_open
        ring.close()


ASK_TO_THE_END = """
import atexit, threading, time
import torch.distributed as dist
from penstock.runtime.threads import start_thread

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
ending = threading.Event()

def ask():
    while not ending.is_set():
        store.set("key", "value")
    for _ in range(100):
        store.set("key", "value")
        time.sleep(0.002)

start_thread(ask, name="asking")
atexit.register(ending.set)
"""


def test_a_thread_that_is_in_torch_as_the_process_ends_does_not_abort_it() -> None:
    ended = run_command([sys.executable, "-c", ASK_TO_THE_END], timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
