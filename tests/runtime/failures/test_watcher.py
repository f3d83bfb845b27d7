"""What the watcher sees while the host of its rank is elsewhere: in its own code, or waiting for a rank that lives."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from penstock import PipelineFailure
from penstock.runtime import formation
from penstock.runtime.comm import rollcall
from penstock.runtime.comm.groups import Groups
from penstock.runtime.failures import board as board_module
from penstock.runtime.failures import inquiry
from penstock.runtime.failures import ring as ring_module
from penstock.runtime.failures.keys import Keys
from penstock.runtime.failures.ring import Ring
from tests.support.ended import LIMIT, End, fault_now, kill_self, run_ranks
from tests.support.families import FAMILIES, batch
from tests.support.launch import run_python
from tests.support.pool import Pool
from tests.support.training import parallelize, run_step

pytestmark = pytest.mark.slow

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


def wait_until(happened: Callable[[], Any]) -> None:
    """In a rank's own code, for as long as a rank may take to hear of what has happened, and more."""
    give_up = time.monotonic() + LONG
    while not happened() and time.monotonic() < give_up:
        time.sleep(0.01)


def touch_as_it_waits(model: Any, file: Path) -> None:
    """Make the file once this rank waits for another one, from a thread of its own."""
    waits = model.pipeline.board.position.waits
    threading.Thread(target=lambda: (wait_until(waits), file.touch())).start()


def wait_for_one_that_sleeps(folder: str) -> None:
    """Rank 2 dies while rank 1 is in its own code, and rank 0 waits for rank 1."""
    waits, woken = Path(folder, "waits"), Path(folder, "woken")
    model = build(3)
    evaluate(model)
    if my_rank() == 2:
        wait_until(waits.exists)
        kill_self()
    if my_rank() == 1:
        wait_until(woken.exists)  # its own code is not interrupted
        assert woken.exists(), "rank 0 has not heard"
    if my_rank() == 0:
        touch_as_it_waits(model, waits)
    try:
        run_step(model, batch("causal", 4))
    finally:
        woken.touch()


def test_a_host_that_waits_for_a_live_rank_hears_of_a_dead_one(tmp_path: Path) -> None:
    """It is woken while the one it waits for is still elsewhere, which hears at its next call."""
    assert_named(run_ranks(3, wait_for_one_that_sleeps, str(tmp_path)), 2)


def die_in_a_loop() -> None:
    """Of two pipelines the first only evaluates; the second only generates, and loses a rank."""
    model = build(2)
    ids = torch.ones(1, 3, dtype=torch.int64)
    for number in range(10_000):
        if my_rank() < 2:
            evaluate(model)
        else:
            model.generate(ids, max_new_tokens=2, do_sample=False)
        if my_rank() == 3 and number == 2:
            kill_self()


def test_a_pipeline_that_dies_without_training_takes_the_others_down() -> None:
    assert_named(run_ranks(4, die_in_a_loop), 3)


def die_with_a_child() -> None:
    """The process that dies has a forked child, as with a data loader's workers, which holds its files open."""
    model = build(2)
    if my_rank() == 1:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        kill_self()
    wait_until(lambda: model.pipeline.board.failed)
    run_step(model, batch("causal", 4))


def test_a_child_process_does_not_hide_the_end_of_its_parent() -> None:
    assert_named(run_ranks(2, die_with_a_child), 1)


# ---------------------------------------------------------------- whose fault it is


class Rows(torch.utils.data.Dataset):
    """Rows of which the fifth kills the worker that reads it, on rank 1, once that rank waits for another one."""

    def __init__(self, waits: Path) -> None:
        self.waits = waits

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 4 and int(os.environ["RANK"]) == 1:
            wait_until(self.waits.exists)
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(8, dtype=torch.int64) * index


def lose_a_loader_worker(waits: Path) -> None:
    model = build(2)
    loader = DataLoader(Rows(waits), batch_size=2, num_workers=1, prefetch_factor=4, multiprocessing_context="fork")
    for number, rows in enumerate(loader):
        if number == 1 and my_rank() == 0:
            wait_until(lambda: model.pipeline.board.failed)
        elif number == 1:
            touch_as_it_waits(model, waits)
        run_step(model, {"input_ids": rows, "labels": rows})


def test_a_lost_loader_worker_is_blamed_on_its_own_rank(tmp_path: Path) -> None:
    ends = run_ranks(2, lose_a_loader_worker, tmp_path / "waits")
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


@pytest.mark.parametrize(("by", "by_hand"), [(0, True), (1, False)])
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
    assert "its program had ended, so it does not make this call" in ends[0].text
    assert "if rank == 0:" in ends[0].text


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


def make_different_calls(folder: str) -> None:
    # The ranks find out by themselves when they come together; here the watcher is to.
    with mock.patch.object(rollcall, "SIGNAL_GRACE", LONG):
        model = build(2, patience=0.5)
        evaluate(model)
        if my_rank() == 0:
            model.save_parallelized(folder)
        evaluate(model)


def test_calls_that_can_never_end_together_are_an_error_on_every_rank(tmp_path: Path) -> None:
    for rank, end in enumerate(run_ranks(2, make_different_calls, str(tmp_path))):
        assert end.kind == "PipelineFailure", f"rank {rank}: {end}"
        assert "in save_parallelized" in end.text and "in evaluation" in end.text
        assert "every rank must make the same calls; this can never end" in end.text


def make_another_call_after_a_long_silence(folder: str) -> None:
    """Rank 1 is stopped inside its call, before rank 0 makes another one, and goes on after four seconds."""
    stopped = Path(folder, "stopped")
    with mock.patch.object(rollcall, "SIGNAL_GRACE", LONG), mock.patch.object(inquiry, "ASK_AGAIN_FACTOR", 3):
        model = build(2, patience=0.5)
        evaluate(model)
        board = model.pipeline.board

        def stand_still_in_a_call() -> None:
            wait_until(board.position.waits)
            if os.fork() == 0:
                stopped.touch()
                time.sleep(4.0)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)

        if my_rank() == 0:
            wait_until(stopped.exists)
            model.save_parallelized(f"{folder}/saved")
        else:
            board.patience = LONG  # it does not ask itself
            threading.Thread(target=stand_still_in_a_call).start()
        evaluate(model)


def test_a_rank_that_has_not_answered_is_asked_again(tmp_path: Path) -> None:
    for rank, end in enumerate(run_ranks(2, make_another_call_after_a_long_silence, str(tmp_path))):
        assert end.kind == "PipelineFailure", f"rank {rank}: {end}"
        assert "this can never end" in end.text, end.text


def come_late_to_share_a_sequence(named: Path) -> list[str]:
    """Two batches, of two pipelines each. Rank 1 comes to an evaluation when rank 0, its partner, has named it; then it
    makes another call than its partner."""
    lines: list[str] = []

    def note(line: str) -> None:
        lines.append(line)
        if "rank 1 is in its own program" in line:
            named.touch()

    with mock.patch.object(rollcall, "SIGNAL_GRACE", LONG):
        model = parallelize(FAMILIES["llama"].build(), 1, num_microbatches=2, context_parallel_size=2, patience=0.5)
        evaluate(model)
        with mock.patch.object(inquiry.logger, "warning", note):
            if my_rank() == 1:
                wait_until(named.exists)
            evaluate(model)
        with contextlib.suppress(PipelineFailure):
            if my_rank() == 0:
                evaluate(model)
            run_step(model, batch("causal", 4))
        return [*lines, str(model.pipeline.board.failed)]


def test_a_partner_that_shares_a_sequence_is_asked_too(tmp_path: Path) -> None:
    values = [end.value for end in run_ranks(4, come_late_to_share_a_sequence, tmp_path / "named")]
    named = [line for line in values[0] if "; rank 1 is in its own program " in line]
    assert named and named[0].startswith("rank 0 has waited ") and "evaluation" in named[0]
    for lines in values:
        assert "in evaluation" in lines[-1] and "in training step" in lines[-1], lines
        assert "this can never end" in lines[-1]


SECONDS = 5.0  # that a transfer may take


@mock.patch.object(board_module, "DETAIL_WAIT", 0.2)  # the store tells them nothing more
def work_beside_one_that_stands_still(victim: int, moment: str) -> None:
    """A rank stands still where process groups are made, or between two steps."""
    model = build(3)  # on a busy machine the ranks come at different times: from here on they are together

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


def test_one_that_stands_still_with_the_store_ends_the_others_soon_after_their_timeout() -> None:
    """By hand the store is in rank 0's process: it answers nothing any more, not even that a failure is recorded."""
    moments = "forming", "training"
    run = partial(run_ranks, 3, work_beside_one_that_stands_still, 0, by_hand=True)
    with ThreadPoolExecutor() as at_once:  # most of it is waiting
        found = list(at_once.map(run, moments))
    for moment, (still, *others) in zip(moments, found, strict=True):
        assert still.kind == "stands still", moment
        for rank, end in enumerate(others, 1):
            assert end.kind == "PipelineFailure", f"{moment}: rank {rank}: {end}"
            assert end.fault_at is not None and end.at - end.fault_at < SECONDS + 5.0, f"{moment}: {end}"


# ---------------------------------------------------------------- nothing is left behind


def open_and_close() -> dict[str, Any]:
    others, hook = set(threading.enumerate()), sys.excepthook

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread not in others]

    def what_is_left() -> tuple[list[str], bool, int]:
        """Threads, whether there is a hook, and how many sockets, once the thread that asks the store has ended: it is
        told to as the pipeline closes, and its connection goes with it."""
        deadline = time.monotonic() + 10
        while threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        sockets = sum(str(link.readlink()).startswith("socket") for link in links if link.is_symlink())
        return threads(), sys.excepthook is not hook, sockets

    models = [build(2), build(2)]
    watchers, hooked = threads().count("penstock-watcher"), sys.excepthook is not hook
    for model in models:
        model.pipeline.close()
    left = [what_is_left()]
    for _ in range(3):
        model = build(2)
        run_step(model, batch("causal", 4))
        model.pipeline.close()
    return {"open": (watchers, hooked), "left": [*left, what_is_left()]}


def test_a_closed_pipeline_leaves_no_thread_no_hook_and_no_socket(pool: Pool) -> None:
    for found in pool.run(2, open_and_close):
        assert found["open"] == (1, True)
        (*first, sockets), (*last, more) = found["left"]
        assert first == last == [[], False]
        assert more <= sockets


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


def ring_of(rank: int, world_size: int, store: Any = None, host: str | None = "127.0.0.1", **told: Any) -> Ring:
    nobody: Any = dict.fromkeys(("on_news", "on_lost", "on_left"), lambda *_: None)
    return Ring(Keys(store or torch.distributed.HashStore(), 0.5), rank, world_size, host, **{**nobody, **told})


@contextlib.contextmanager
def serving(ring: Ring) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=ring.serve, args=(lambda: None, 0.2), daemon=True)
    thread.start()
    yield thread
    ring.stop(leave=False)
    thread.join(10)
    ring.close()


def test_a_rank_that_ends_early_hands_its_news_to_one_that_starts_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 learns that rank 1 is lost, and ends before rank 2, its other neighbour, has called it."""
    monkeypatch.setattr(ring_module, "NEWS_SECONDS", LONG)
    store, heard = torch.distributed.HashStore(), list[Any]()
    first = ring_of(0, 3, store, on_lost=lambda lost: first.tell({"lost": lost}))
    with serving(first) as ending:
        first._lose(1)
        first.stop()
        time.sleep(0.3)  # until it is ending
        on_lost, on_news = lambda lost: heard.append(("lost", lost)), lambda *news: heard.append(news)
        last = ring_of(2, 3, store, on_news=on_news, on_lost=on_lost, on_left=heard.append)
        with serving(last):
            ending.join(10)
            deadline = time.monotonic() + 10
            while len(heard) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
    assert heard == [(0, {"lost": 1}), 0]


def test_a_store_that_is_slow_at_first_ends_nothing() -> None:
    with mock.patch.object(Keys, "put", lambda keys, *_: keys.ask(lambda: time.sleep(1.0))):
        ring_of(0, 2).close()


def test_questions_to_the_store_are_put_by_one_thread() -> None:
    keys = Keys(torch.distributed.HashStore(), 5.0)
    assert len({id(thread) for thread in [keys.within(str(n)).ask(threading.current_thread) for n in range(9)]}) == 1


# ---------------------------------------------------------------- strangers


def test_who_calls_and_says_nothing_is_not_listened_to_for_ever() -> None:
    ring = ring_of(0, 2)
    place = "127.0.0.1", ring.address["port"]
    with mock.patch.object(ring_module, "CALLER_SECONDS", 0.5), serving(ring):
        call = socket.create_connection(place, timeout=10)
        assert b"number" in call.recv(1000)
        assert call.recv(1000) == b""
        call.close()


def test_who_knows_the_store_but_not_the_secret_takes_no_ranks_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the secret, the same call is taken for the rank's: its end without leave is a loss."""
    monkeypatch.setenv("PENSTOCK_SECRET", "known to the ranks")
    store, lost = torch.distributed.HashStore(), list[int]()
    with serving(ring_of(0, 3, store, on_lost=lost.append)):
        address = json.loads(store.get("penstock/ring/0/0"))
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


GARBAGE = b"GET / HTTP/1.0\r\n\r\n", b'{"calls": Infinity}\n', b"[" * 200_000 + b"\n"


def test_whatever_a_stranger_says_a_rank_goes_on_watching() -> None:
    """And whatever goes wrong in what follows from news."""
    heard, store, lost = threading.Event(), torch.distributed.HashStore(), list[int]()

    def on_news(origin: int, news: Any) -> None:
        heard.set()
        raise KeyError("a mistake in what follows from news")

    rings = [ring_of(rank, 2, store, on_news=on_news, on_lost=lost.append) for rank in range(2)]
    with serving(rings[0]) as one, serving(rings[1]) as other:
        for words in GARBAGE:
            for _ in range(5):
                call = socket.create_connection(("127.0.0.1", rings[0].address["port"]), timeout=10)
                call.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset as it goes
                with call, contextlib.suppress(OSError):
                    call.sendall(words)
            time.sleep(0.3)
            heard.clear()
            rings[1].tell({"news": "that is handled wrongly"})
            assert heard.wait(10), words[:20]
            time.sleep(0.1)
            assert one.is_alive() and other.is_alive() and lost == [], words[:20]


def test_a_rank_listens_only_where_the_others_are() -> None:
    """Ranks that meet at a loopback address are on one machine: 127.0.0.2 is another address of it."""
    for host, is_open in (("127.0.0.1", False), (None, True)):
        ring = ring_of(0, 3, host=host)
        try:
            with socket.create_connection(("127.0.0.2", ring.address["port"]), timeout=10):
                assert is_open
        except ConnectionRefusedError:
            assert not is_open
        ring.close()


ASK_TO_THE_END = """
import atexit, threading, time
# Called last.
atexit.register(lambda: print(*(thread.name for thread in threading.enumerate())))
import torch.distributed as dist
from penstock.runtime import threads
from penstock.runtime.failures.keys import Keys

threads.ENDING_SECONDS = 60.0  # as good as for ever
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
keys = Keys(store, 10.0)
keys.put("key", "value")
ending = threading.Event()

def ask():
    while not ending.is_set():
        store.set("key", "value")
    for _ in range(100):
        store.set("key", "value")
        time.sleep(0.002)

threads.start_thread(ask, name="asking")
atexit.register(ending.set)
"""


def test_a_thread_that_is_in_torch_as_the_process_ends_does_not_abort_it(tmp_path: Path) -> None:
    """And one that waits for a question to the store is told to end: it would hold the process up."""
    (tmp_path / "ask.py").write_text(ASK_TO_THE_END)
    ended = run_python(tmp_path / "ask.py", timeout=120, fresh=True)
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", "MainThread\n")
