"""`verify`: one's own model over stages beside itself unsplit, in processes on this machine's CPU."""

from __future__ import annotations

import datetime
import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from penstock.api.initialize import ConfigLike
from penstock.checking.batches import build, made_batch
from penstock.checking.compare import ACCUMULATED, DIFFERS, EXACT, FAILED, NOT_TRIED, REFUSED, Comparison, Row
from penstock.checking.double import in_double, kept_in_double, without_noise
from penstock.config.configuration import Configuration
from penstock.modeling.graph.dummy_inputs import dtype_of
from penstock.modeling.graph.loss import Criterion
from penstock.random_state import seeded
from penstock.tables import wrapped

# From good to bad: of what ranks say of one thing, the worst is what came out.
_RESULTS = (EXACT, ACCUMULATED, NOT_TRIED, REFUSED, DIFFERS, FAILED)
# The longest that a rank waits for another.
_PATIENCE = datetime.timedelta(minutes=10)
NOT_LOOKED_AT = (
    "your devices and their kernels, NCCL, half precision and autocast; your optimizer, schedulers and data; other "
    "batches; replicas; the time and memory of a step (penstock fit)"
)

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Verification:
    """What `verify` found: about which model over which stages, and the rows of what was compared."""

    about: str
    rows: tuple[Row, ...]

    @property
    def exact(self) -> bool:
        """Whether all that was compared is exact, or exact against accumulation where a warning says so in training."""
        return all(row.result in (EXACT, ACCUMULATED, NOT_TRIED) for row in self.rows)

    def data(self) -> dict[str, Any]:
        finite = [row if math.isfinite(row.difference or 0) else replace(row, difference=None) for row in self.rows]
        rows = {"rows": [asdict(row) for row in finite], "not_looked_at": NOT_LOOKED_AT}
        return {"about": self.about, "exact": self.exact, **rows}

    def render(self) -> str:
        lines = [wrapped(self.about)]
        for row in self.rows:
            compared = "" if row.difference is None else f"{row.difference:7.1e}  {row.where if row.difference else ''}"
            lines.append(wrapped(f"  {row.what:<10}  {row.result:<25}  {compared}".rstrip()))
        for reason in dict.fromkeys(row.reason for row in self.rows if row.reason):
            concerned = ", ".join(row.what for row in self.rows if row.reason == reason)
            lines.append(wrapped(f"{concerned}: {reason}"))
        return "\n".join([*lines, wrapped(f"Not looked at: {NOT_LOOKED_AT}.")])

    __str__ = render


def verify(
    make_model: Callable[[], nn.Module] | type | PretrainedConfig | str,
    batch: Batch | Callable[[], Batch] | None = None,
    *,
    config: ConfigLike,
    criterion: Criterion | None = None,
    steps: int = 3,
    layers: int | None = None,
    trust_remote_code: bool = False,
) -> Verification:
    """Run a model unsplit and over stages, and compare all that comes out.

    Losses, the gradients of all parameters in the first step, weights after the steps, an evaluation, greedy tokens,
    and a checkpoint, loaded without Penstock. In processes on this machine's CPU, in double precision where the model's
    code allows it, without dropout. The optimizer is SGD with momentum.

    Args:
        make_model: returns a whole model; or, as for `penstock check`, a class of transformers or its name, a
            configuration, or the folder of a checkpoint: then with the weights in the folder, else with random ones.
        batch: keyword arguments of the model, on the CPU, or what returns them. Without it one is made up.
        config, criterion: as for `initialize`. There is one pipeline, of as many processes as it has ranks, or one for
            each part of a sequence.
        steps: optimizer steps, all on the same batch.
        layers: makes a model of a configuration with so many layers only.
        trust_remote_code: whether code beside a checkpoint may be run.

    Raises:
        ConfigurationError, ValueError: wrong arguments, a model that does not run unsplit or does not fit in memory.
        RuntimeError: the GPU is in use in this process, or it has joined a process group: there is no forking it.
    """
    configuration = Configuration.from_any(config)
    stages = configuration.pipeline_parallel_size
    if not isinstance(stages, int):
        raise ValueError('verify() needs a number of stages (pipeline_parallel_size), not "auto"')
    make: Any = make_model
    named = isinstance(make, (PretrainedConfig, str)) or (isinstance(make, type) and issubclass(make, PreTrainedModel))
    if layers is not None and not named:
        raise ValueError("layers= is for checkpoints, classes and configurations: your code makes its model itself")
    if torch.cuda.is_initialized():
        raise RuntimeError("verify() forks processes that use the CPU: call it before anything uses the GPU")
    if dist.is_initialized():
        raise RuntimeError(
            "verify() forks processes that form a group of their own: call it in a program of its own, or before "
            "initialize() and whatever else joins a process group"
        )
    parts = configuration.context_parallel_size
    ranks = stages * configuration.tensor_parallel_size * parts
    if named:
        make = partial(build, make, layers, ranks, trust_remote_code)
    launch = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id="verify", start_method="fork", max_restarts=0,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", monitor_interval=0.05,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        by_rank = elastic_launch(launch, _on_rank)(make, batch, configuration, criterion, steps, Path(folder))
    outcomes = [by_rank[rank] for rank in sorted(by_rank)]
    if isinstance(outcomes[0], str):
        raise ValueError(outcomes[0])
    return Verification(outcomes[0][0], worst([row for _, rows in outcomes for row in rows]))


def worst(rows: list[Row]) -> tuple[Row, ...]:
    """The worst of what the ranks say of one thing."""

    def weight(row: Row) -> tuple[int, float, bool]:  # what only heard of another rank's error says less
        return _RESULTS.index(row.result), row.difference or 0, not row.reason.startswith("PipelineFailure")

    names = dict.fromkeys(row.what for row in rows)
    return tuple(max((row for row in rows if row.what == name), key=weight) for name in names)


def _on_rank(
    make: Callable[[], nn.Module],
    batch: Batch | Callable[[], Batch] | None,
    configuration: Configuration,
    criterion: Criterion | None,
    steps: int,
    folder: Path,
) -> tuple[str, list[Row]] | str:
    """What was run and what came out; or what is wrong with the model or the batch."""
    torch.set_num_threads(1)  # this is a fork: OpenMP has no other threads here
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # Of no use beside the table: what the stages are, and who waits for whom on a loaded machine. Errors are rows.
    os.environ["PENSTOCK_QUIET"] = "1"
    logging.getLogger("penstock").setLevel(logging.ERROR)
    with mock.patch.object(torch.accelerator, "is_available", lambda: False), kept_in_double():
        dist.init_process_group("gloo", timeout=_PATIENCE)
        try:
            with seeded(0):
                model = make()
                noise = without_noise(model.train())
                samples = 2 * (configuration.num_microbatches or 4) + 1
                inputs = batch() if callable(batch) else made_batch(model, samples) if batch is None else batch
                if not isinstance(inputs, Mapping):
                    raise TypeError(f"a batch is a mapping of the model's arguments, not a {type(inputs).__name__}")
                model, inputs = in_double(model, inputs)
                compared = Comparison(model, inputs, configuration, criterion, steps)
        except Exception as error:  # of the user's code, or the same on all ranks
            return f"the unsplit model does not run: {type(error).__name__}: {error}"
        rows = compared.rows(folder)
        parts = configuration.context_parallel_size
        in_parts = f", each sequence in {parts} parts," if parts > 1 else ""
        about = (
            f"{type(model).__name__}, {sum(each.numel() for each in model.parameters()):,} parameters, over "
            f"{compared.num_stages} stages ({compared.schedule}){in_parts} beside itself unsplit; {steps} "
            f"steps, {str(dtype_of(model)).removeprefix('torch.')}"
            f"{', dropout and the like set to zero' if noise else ''}"
        )
        return about, rows
