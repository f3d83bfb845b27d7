"""Recording steps as they ran: every action, wait and reduction of every rank, drawn like the simulator's."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, replace
from pathlib import Path

import torch.distributed as dist

from penstock.runtime.comm.exchange import Ranks
from penstock.runtime.engine import Engine
from penstock.simulation.timeline import EventKind, TimedEvent, with_waits, write_timeline

# Waits shorter than this are the cost of the check, not waiting.
SHORTEST_WAIT = 20e-6


class Timeline:
    """Writes `engine.trace`: the timeline of the first pipeline in the steps that `engine.trace_steps` says."""

    def observing(self, engine: Engine, number: int) -> AbstractContextManager[Recorder | None]:
        steps = engine.trace_steps
        covered = engine.trace and (steps is None or steps[0] <= number <= steps[1])
        return self._recording(engine, number) if covered else nullcontext()

    @contextmanager
    def _recording(self, engine: Engine, number: int) -> Iterator[Recorder]:
        steps = engine.trace_steps
        recorder = engine.of_formation(Recorder)
        with recorder.recording():
            yield recorder
        goes_on = steps is not None and number > steps[0]
        recorder.gather(engine.trace if engine.rank == 0 else None, number, goes_on)


class Recorder:
    """Collects one rank's events, step by step. Times are this process's monotonic clock, in seconds."""

    def __init__(self, engine: Engine):
        self._context, self._channels = engine.context, engine.channels
        self._rank = self._context.place.pipeline_rank
        self._events: list[TimedEvent] = []
        self._waited_until = 0.0
        # Where the file is written, the events of all ranks in the steps that are in it.
        self._written: list[TimedEvent] = []
        self._began: float | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around a step."""
        self._events.clear()
        self._channels.on_wait = self.wait
        try:
            yield
        finally:
            self._channels.on_wait = None

    def gather(self, path: str | os.PathLike[str] | None, number: int, goes_on: bool) -> None:
        """Gather what all ranks of the pipeline recorded in the training step `number`. If a path is given, write it
        there, after the steps that are there already if it `goes_on`."""
        group = self._context.groups.pipeline_control
        with self._context.board.guard("working together"):  # a rank that cannot write ends the others, too
            events, began = self._gather(group)
            if path is not None:
                self._write(Path(path), events, began, number, goes_on)

    def _write(self, path: Path, events: list[TimedEvent], began: float, number: int, goes_on: bool) -> None:
        if not goes_on:
            self._written, self._began = [], None
        if self._began is None:
            self._began = began
        later = began - self._began
        self._written += [
            replace(event, start=event.start + later, end=event.end + later, step=number) for event in events
        ]
        numbers = sorted({event.step for event in self._written if event.step is not None})
        which = f"steps {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else "a step"
        draft = path.with_name(f".{path.stem}.draft{path.suffix}")
        num_ranks = dist.get_world_size(self._context.groups.pipeline_control)
        write_timeline(self._written, draft, f"{which} on {num_ranks} ranks, as run")
        os.replace(draft, path)  # whole or not at all

    def action(self, kind: str, stage: int, microbatch: int, start: float, end: float) -> None:
        """An action that ran from `start` to `end`; what it waited for its input is not counted as its own."""
        start = min(max(start, self._waited_until), end)
        self._events.append(TimedEvent(self._rank, EventKind(kind), start, end, stage, microbatch))

    def wait(self, start: float, end: float) -> None:
        """A wait for a message, inside an action."""
        self._waited_until = end

    def reductions(self, intervals: Iterable[tuple[float, float]]) -> None:
        """Buckets of gradients that were under way in these intervals."""
        self._events += [TimedEvent(self._rank, EventKind.REDUCTION, start, end) for start, end in intervals]

    def _gather(self, group: dist.ProcessGroup) -> tuple[list[TimedEvent], float]:
        """All ranks' events of the step, from time 0, and when that was. Every rank of the pipeline calls this.

        On one machine the clocks are one. Between machines they are not, so there each machine's events begin at 0.
        """
        here = socket.gethostname()
        ranks = Ranks(group, self._context.board.guard)
        by_rank = ranks.exchange([here, [astuple(event) for event in self._events]], "gathering the timeline")
        origins: dict[str, float] = {}
        for host, events in by_rank:
            for _, _, start, *_ in events:
                origins[host] = min(origins.get(host, start), start)
        shifted = [
            TimedEvent(rank, EventKind(kind), start - origins[host], end - origins[host], *others)
            for host, events in by_rank
            for rank, kind, start, end, *others in events
        ]
        return with_waits(shifted, SHORTEST_WAIT), origins.get(here, 0.0)
