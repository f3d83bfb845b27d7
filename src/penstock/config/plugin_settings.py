"""The arguments of `HeterogeneousParallelPlugin`, checked."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.arguments import check_count, check_number
from penstock.config.configuration import check_value, check_whole_head
from penstock.config.elastic import ELASTIC_TIMEOUT, Elastic, check_elastic
from penstock.layout.pipelines import Schedules, check_schedule
from penstock.runtime.failures.position import PATIENCE_SECONDS
from penstock.runtime.options import EngineOptions
from penstock.schedule.registry import AUTO
from penstock.sharded_optimizer.updates import owner_choice_for

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# What must be equal on all ranks, by name. With elastic= also `schedule`, see `facts`. `patience` and `timeout` may
# differ: each rank waits by its own.
_EQUAL_ON_ALL_RANKS = (
    "tp_size", "microbatch_size", "precision", "max_norm", "batch_dim", "loss_chunk_tokens", "sharded_optimizer",
    "context_parallel_size",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PluginSettings:
    """See `HeterogeneousParallelPlugin`, whose arguments have these names. Raises TypeError or ValueError."""

    tp_size: int = 1
    microbatch_size: int = 1
    precision: str = "fp32"
    max_norm: float = 0.0
    schedule: Schedules = AUTO
    patience: float = PATIENCE_SECONDS
    timeout: float | None = None
    elastic: Elastic | None = None
    global_batch_size: int | None = None
    batch_dim: Mapping[str, int | None] | None = None
    loss_chunk_tokens: int | None = None
    sharded_optimizer: bool | int = False
    context_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name in ("tp_size", "microbatch_size", "context_parallel_size"):
            check_count(name, getattr(self, name))
        if not isinstance(self.precision, str) or self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        check_number("max_norm", self.max_norm)
        if not self.max_norm >= 0:
            raise ValueError(f"max_norm must not be negative, got {self.max_norm}")
        check_schedule(self.schedule)
        # These are keys of the configuration, checked as there. The counts above are not: the plugin has always raised
        # TypeError for what is no integer, and in the configuration some have other names or may be null.
        for key in ("batch_dim", "loss_chunk_tokens", "sharded_optimizer", "patience", "timeout"):
            check_value(key, getattr(self, key))
        check_whole_head("loss_chunk_tokens", self.loss_chunk_tokens, "tp_size", self.tp_size)
        if self.elastic is not None:
            check_elastic(self.elastic, self.global_batch_size, self.microbatch_size)
            if self.context_parallel_size > 1:
                raise ValueError(
                    f"context_parallel_size {self.context_parallel_size} with elastic=: the pipelines that are chosen "
                    "after a loss share no sequences; leave one out"
                )
        elif self.global_batch_size is not None:
            raise ValueError("global_batch_size goes with elastic=; otherwise set_pipelines says how many microbatches")

    @property
    def time_limit(self) -> datetime.timedelta | None:
        """`timeout` as a timedelta, or None."""
        return None if self.timeout is None else datetime.timedelta(seconds=self.timeout)

    def engine_options(self) -> EngineOptions:
        # The members of an elastic run have little time to meet, but not to work.
        usual = None if self.elastic is None else ELASTIC_TIMEOUT
        return EngineOptions(
            microbatch_size=self.microbatch_size,
            batch_dim=self.batch_dim or {},
            loss_chunk_tokens=self.loss_chunk_tokens,
            timeout=self.time_limit or usual,
            patience=float(self.patience),
            autocast=PRECISIONS[self.precision],
            owner_choice=owner_choice_for(int(self.sharded_optimizer)),
        )

    def facts(self) -> dict[str, Any]:
        """What must be the same on all ranks, whatever the pipelines are, by name."""
        names = _EQUAL_ON_ALL_RANKS if self.elastic is None else (*_EQUAL_ON_ALL_RANKS, "schedule")
        return {f"the plugin's {name}": getattr(self, name) for name in names}
