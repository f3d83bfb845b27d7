"""The settings of a run that survives lost devices."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from penstock.arguments import check_count, check_number
from penstock.modeling.pipeline_template import PipelineTemplate

# How long a transfer of an elastic run may take: a rank that writes a checkpoint keeps the others waiting. One that
# stands still is noticed by its heartbeat.
ELASTIC_TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class Elastic:
    """Training goes on when devices are lost, and takes in new ones; see docs/elastic.md.

    Args:
        store: where the processes meet: "tcp://host:port" of a store that `penstock store` serves, or
            "file:///folder" that all of them share.
        copies: how many devices hold each part of the model at least; one fewer may be lost at once. If there are too
            few devices for that, each part gets as many copies as possible.
        start: how many processes begin the run; None: as many as come until none has come for `gather` seconds.
        gather: see `start`.
        hang_timeout: seconds of silence after which a process counts as lost although its connections are open; after
            10 s while a new generation forms.
        templates: the pipelines to choose from; none: the planner makes them.
        memory: bytes of each device that the run may use; None: nine tenths of a GPU's, no limit on a CPU.
        bandwidth: bytes per second of a link; with `horizon` it decides how much may move for a faster layout.
        horizon: seconds that a layout is expected to last.
        run: the run's name; runs with different names share a store.
        leave_on_sigterm: after a SIGTERM this process moves its state to the others and leaves at the end of the step.

    Raises:
        TypeError, ValueError: an argument that cannot be used.
    """

    store: str
    copies: int = 2
    start: int | None = None
    gather: float = 5.0
    hang_timeout: float = 60.0
    templates: Sequence[PipelineTemplate] = ()
    memory: float | None = None
    bandwidth: float = 1e9
    horizon: float = 600.0
    run: str = "run"
    leave_on_sigterm: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.store, str):
            raise TypeError(f"store must be a string such as tcp://host:29400, got {self.store!r}")
        parse_address(self.store)
        check_count("copies", self.copies)
        if self.start is not None:
            check_count("start", self.start)
        for name in ("gather", "hang_timeout", "memory", "bandwidth", "horizon"):
            value = getattr(self, name)
            if name == "memory" and value is None:
                continue
            check_number(name, value)
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        for template in self.templates:
            if not isinstance(template, PipelineTemplate):
                raise TypeError(f"templates must be PipelineTemplates, got {template!r}")
        if not self.run or not isinstance(self.run, str):
            raise ValueError(f"run must be a name, got {self.run!r}")


def check_elastic(elastic: Any, global_batch_size: Any, microbatch_size: int) -> None:
    """Raise TypeError or ValueError unless a plugin can be made with these arguments."""
    if not isinstance(elastic, Elastic):
        raise TypeError(f"elastic must be a penstock.Elastic, got {elastic!r}")
    if isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int):
        raise TypeError(f"elastic= needs global_batch_size, an integer, got {global_batch_size!r}")
    if global_batch_size < 1 or global_batch_size % microbatch_size:
        raise ValueError(
            f"global_batch_size must be a multiple of microbatch_size ({microbatch_size}), got {global_batch_size}"
        )


def parse_address(address: str) -> tuple[str, int] | Path:
    """Host and port of `tcp://host:port`, or the folder of `file:///folder`. Raises ValueError for anything else."""
    if match := re.fullmatch(r"tcp://(\[[0-9a-fA-F:]+\]|[^:/\s]+):(\d+)/?", address):
        return match[1].strip("[]"), int(match[2])
    if match := re.fullmatch(r"file://(/.+)", address):
        return Path(unquote(match[1]))
    raise ValueError(f"store must be tcp://host:port or file:///folder, got {address!r}")
