"""Ctrl-C at any moment, caught, and then a save: the ranks are interrupted at different places, and go on together."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from penstock import PipelineFailure
from penstock.runtime import step as training_step
from penstock.runtime.comm import rollcall
from penstock.runtime.comm.rollcall import CallMismatch
from penstock.runtime.failures import interrupts
from penstock.runtime.failures.interrupts import Interrupts
from penstock.runtime.gradients.updates import Update, UpdateWatch, mixed_update
from tests.support import zygote
from tests.support.families import batch, gpt2
from tests.support.launch import ROOT, free_port
from tests.support.pool import Pool
from tests.support.training import (
    assert_same_gradients,
    gradients_of,
    kept_in_double,
    parallelize,
    rows,
    run_step,
    unsplit_step,
)

pytestmark = pytest.mark.slow

MICROBATCHES = 4


@contextlib.contextmanager
def default_handlers() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, whatever the process inherited."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Interrupter(threading.Thread):
    """Sends SIGINT to all ranks at a random moment after it is armed, to each a little later than to the one before."""

    def __init__(self, pids: list[int], seed: int, within: float, apart: float):
        super().__init__(daemon=True)
        self._pids, self._within, self._apart = pids, within, apart
        self._random = random.Random(seed)
        self._armed = threading.Event()
        self.start()

    def arm(self) -> None:
        self._armed.set()

    def run(self) -> None:
        while True:
            self._armed.wait()
            self._armed.clear()
            time.sleep(self._random.random() * self._within)
            self._random.shuffle(self._pids)
            for pid in self._pids:
                os.kill(pid, signal.SIGINT)
                time.sleep(self._random.random() * self._apart)


def train_and_be_interrupted(folder: str, trials: int, stages: int, schedule: str, apart: float) -> dict[str, Any]:
    """`trials` times: train until Ctrl-C, save. Then a step whose gradients are looked at."""
    with kept_in_double(), default_handlers():
        rank = dist.get_rank()
        pids: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        model = parallelize(gpt2(), stages, num_microbatches=MICROBATCHES, schedule=schedule)
        weights = {name: value.clone() for name, value in model.state_dict().items() if not value.is_meta}
        inputs = rows(batch("causal", 8), model.data_parallel_rank, model.data_parallel_size)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        # From one thread of one rank, so that all ranks are in a trial when it comes.
        start = time.monotonic()
        for _ in range(3):
            run_step(model, inputs)
        interrupter = (
            Interrupter(pids, seed=stages, within=time.monotonic() - start, apart=apart) if rank == 0 else None
        )
        found: dict[str, Any] = {"errors": [], "interrupted": 0}
        for trial in range(trials):
            try:
                for step in range(10_000):
                    optimizer.zero_grad()
                    for output in model(**inputs):
                        output.loss.backward()
                    model.clip_grad_norm_(1.0)
                    optimizer.step()
                    if step == 1 and interrupter is not None:
                        interrupter.arm()
            except KeyboardInterrupt:
                found["interrupted"] += 1
            try:
                model.save_parallelized(Path(folder) / f"checkpoint-{trial}")
            except BaseException as error:
                found["errors"].append(f"trial {trial}: {type(error).__name__}: {error}")
                break
        if not found["errors"]:
            with torch.no_grad():
                for name, value in model.state_dict().items():
                    if name in weights:
                        value.copy_(weights[name])
            model.zero_grad()
            run_step(model, inputs)
            found["gradients"] = gradients_of(model)
        return found


@pytest.mark.parametrize(
    ("ranks", "stages", "schedule", "apart"),
    [(3, 3, "1f1b", 0.0), (2, 2, "zb-v", 0.02), (4, 2, "1f1b", 0.05)],
)
def test_a_save_after_ctrl_c_at_any_moment_succeeds_and_training_goes_on_exactly(
    pool: Pool, tmp_path: Path, ranks: int, stages: int, schedule: str, apart: float
) -> None:
    trials = int(os.environ.get("PENSTOCK_INTERRUPTS", "3"))
    expected = unsplit_step(gpt2(), (batch("causal", 8), 1.0)).gradients
    found = pool.run(
        ranks, train_and_be_interrupted, str(tmp_path), trials, stages, schedule, apart, timeout=60 + 5 * trials
    )
    for rank in found:
        assert rank["errors"] == []
        assert rank["interrupted"] == trials
        assert_same_gradients(rank["gradients"], expected)
    for trial in range(trials):
        assert (tmp_path / f"checkpoint-{trial}" / "config.json").exists()


# ---------------------------------------------------------------- under a launcher, and without


def start(folder: Path, by: str) -> tuple[list[subprocess.Popen[bytes]], int]:
    """Two ranks of interrupted_training.py; the processes to wait for, and the group to interrupt."""
    script = [str(ROOT / "tests" / "support" / "interrupted_training.py"), str(folder), "60", "2", "1f1b"]
    python = zygote.executable()  # passes the signals that it gets on
    environment = zygote.environment() | {"PENSTOCK_STAND_IN": python}
    if by == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        processes = [subprocess.Popen([python, *launcher, *script], env=environment, start_new_session=True)]
        return processes, processes[0].pid
    port = free_port()
    processes = []
    for rank in range(2):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(
            subprocess.Popen(
                [python, *script],
                env=environment | {name: str(value) for name, value in variables.items()},
                process_group=processes[0].pid if processes else 0,
            )
        )
    return processes, processes[0].pid


@pytest.mark.parametrize("by", ["torchrun", "hand"])
def test_ctrl_c_in_a_terminal_saves_the_checkpoint(tmp_path: Path, by: str) -> None:
    processes, group = start(tmp_path, by)
    try:
        deadline = time.monotonic() + 120
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(group, signal.SIGINT)
        for process in processes:
            process.wait(60)
    finally:
        for process in processes:
            process.kill()
    for rank in range(2):
        found = json.loads((tmp_path / f"done-{rank}").read_text())
        assert found["ended"] == "interrupted" and found["saved"], found
    assert (tmp_path / "checkpoint" / "config.json").exists()


# ---------------------------------------------------------------- holding signals back


def send(signum: int) -> None:
    """To this process; Python looks at it at once."""
    os.kill(os.getpid(), signum)


def test_a_handler_that_returns_is_called_once_and_nothing_ends() -> None:
    held, seen = Interrupts(), []
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: seen.append(signum))
    try:
        with held.held():
            send(signal.SIGUSR1)
            assert not seen and held.pending
            held.deliver()
            assert seen == [signal.SIGUSR1]
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def fail_in_a_backward() -> bool:
    """Whether a repeated signal is held back in the code that goes on after the error."""
    model = parallelize(gpt2(), 1, num_microbatches=MICROBATCHES, schedule="zb-h1")
    inputs = batch("causal", MICROBATCHES)
    for out in model(**inputs):
        failing = mock.patch.object(training_step.TrainingStep, "_enter_backward", side_effect=MemoryError)
        with failing, pytest.raises(MemoryError):
            out.loss.backward()
        return bool(model.pipeline.context.interrupts.busy)
    raise AssertionError("unreachable")


def test_a_backward_that_fails_leaves_the_users_code_open_to_repeated_signals(pool: Pool) -> None:
    assert pool.run(1, fail_in_a_backward) == [False]


def test_a_repeated_signal_gets_through_in_the_users_code_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "REPEATED_AFTER", 0.05)
    held = Interrupts()
    with default_handlers():
        held.hold()
        held.busy = True
        send(signal.SIGINT)
        time.sleep(0.1)
        send(signal.SIGINT)  # the pipeline's own code goes on
        held.busy = False
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        held.release()  # nothing is left to deliver


def test_a_signal_that_no_one_would_see_raised_comes_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "RESEND_AFTER", 0.5)
    held = Interrupts()
    with default_handlers():
        held.hold()
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt) as caught:  # on a busy machine maybe before it sleeps
            held.release(deliver=False)
            time.sleep(5)
    assert "release" not in [entry.name for entry in caught.traceback]


# ---------------------------------------------------------------- the optimizer's step


def test_an_interrupted_update_is_told_from_a_whole_one() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
    optimizer = torch.optim.SGD(weights[:3], lr=0.1)  # the last one is nobody's
    watch = UpdateWatch(weights)
    states = []
    for _ in range(2):
        watch.begin_step()
        for weight in weights:
            weight.grad = torch.ones(2)
        watch.end_step()
        states.append(watch.state())
        optimizer.step()
        states.append(watch.state())
    # What an update is shows once a step follows it.
    assert states == [Update.UNKNOWN, Update.UNKNOWN, Update.NONE, Update.WHOLE]
    watch.begin_step()
    watch.end_step()
    with torch.no_grad():
        weights[0].sub_(0.1)
    assert watch.state() == Update.PART


def test_ranks_that_updated_differently_are_named() -> None:
    assert mixed_update({0: Update.WHOLE, 1: Update.WHOLE, 2: Update.UNKNOWN}) is None
    assert mixed_update({0: Update.NONE, 1: Update.NONE}) is None
    mixed = mixed_update({0: Update.WHOLE, 1: Update.NONE, 2: Update.WHOLE})
    assert mixed is not None and "ranks 0, 2 took it, rank 1 did not take it" in mixed
    part = mixed_update({0: Update.WHOLE, 1: Update.PART})
    assert part is not None and "rank 1 took a part of it" in part


def interrupt_one_optimizer(folder: str) -> list[str]:
    model = parallelize(gpt2(), 2, num_microbatches=MICROBATCHES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        run_step(model, batch("causal", 8))
        if step < 2 or dist.get_rank() == 0:
            optimizer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.save_parallelized(folder)
    return [str(warning.message) for warning in caught if "optimizer" in str(warning.message)]


def test_a_checkpoint_of_two_steps_says_so(pool: Pool, tmp_path: Path) -> None:
    for (warning,) in pool.run(2, interrupt_one_optimizer, str(tmp_path / "checkpoint")):
        assert "rank 0 took it, rank 1 did not take it" in warning


# ---------------------------------------------------------------- one rank alone


def interrupt_one_and_leave_another() -> str:
    with default_handlers():
        model = parallelize(gpt2(), 2, num_microbatches=MICROBATCHES)
        with pytest.raises((KeyboardInterrupt, RuntimeError)) as caught:
            for number, output in enumerate(model(**batch("causal", 8))):
                output.loss.backward()
                if number == 1 and dist.get_rank() == 0:
                    send(signal.SIGINT)
                elif number == 1:
                    break
            run_step(model, batch("causal", 8))
        with pytest.raises(PipelineFailure, match="rank 1 failed: left the training step at microbatch"):
            model.clip_grad_norm_(1.0)
        return caught.type.__name__


def test_an_interrupt_comes_though_another_rank_leaves_the_step(pool: Pool) -> None:
    assert pool.run(2, interrupt_one_and_leave_another, timeout=60) == ["KeyboardInterrupt", "PipelineFailure"]


def interrupt_one_rank(odd: int, folder: str) -> dict[str, Any]:
    """Ctrl-C reaches one rank only, in the middle of a step; then it saves, while the others train."""
    found: dict[str, Any] = {"interrupted": False}
    quickly = mock.patch.object(training_step, "LATE_SIGNAL", 0.2), mock.patch.object(rollcall, "SIGNAL_GRACE", 0.2)
    with default_handlers(), kept_in_double(), quickly[0], quickly[1]:
        model = parallelize(gpt2(), 2, num_microbatches=MICROBATCHES)
        inputs = batch("causal", 8)
        alone = dist.get_rank() == odd
        try:
            for number, output in enumerate(model(**inputs)):
                output.loss.backward()
                if number == 1 and alone:
                    send(signal.SIGINT)
        except KeyboardInterrupt:
            found["interrupted"] = True
        found["gradients"] = [gradients_of(model)]
        with pytest.raises(CallMismatch) as caught:
            if alone:
                model.save_parallelized(folder)
            else:
                run_step(model, inputs)
        found["refused"] = str(caught.value)
        model.zero_grad()
        run_step(model, inputs)
        found["gradients"].append(gradients_of(model))
        return found


def test_an_interrupt_of_one_rank_comes_after_a_whole_step_and_another_call_is_refused_by_name(
    pool: Pool, tmp_path: Path
) -> None:
    odd = 1
    expected = unsplit_step(gpt2(), (batch("causal", 8), 1.0)).gradients
    for rank, found in enumerate(pool.run(2, interrupt_one_rank, odd, str(tmp_path / "saved"), timeout=60)):
        assert found["interrupted"] == (rank == odd)
        assert f"rank {odd} entered save_parallelized" in found["refused"]
        assert f"rank {1 - odd} entered training step" in found["refused"]
        for gradients in found["gradients"]:
            assert_same_gradients(gradients, expected)
