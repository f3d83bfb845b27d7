"""Mode "pp": this library's pipelines, alike or not, on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from penstock.bench.clock import Clock
from penstock.bench.configs import GPTConfig
from penstock.bench.models import GPT
from penstock.bench.modes import Batch, Contestant, apply_policy, blocks_of, cut
from penstock.bench.options import Options
from penstock.modeling.costs import unit_costs
from penstock.modeling.split import SplitModel
from penstock.modeling.units import list_units
from penstock.planning.layout import Layout
from penstock.planning.partition import partition
from penstock.runtime.engine import Pipeline
from penstock.schedule import build


class Pipelines(Contestant):
    """One rank of `options.pipelines`. Only its own stage's weights are ever made."""

    def __init__(self, options: Options, device: torch.device) -> None:
        assert isinstance(options.config, GPTConfig)
        model = GPT(options.config, device="meta", dtype=options.torch_dtype).train()
        layout = place(model, options)
        mine = layout.place_of(dist.get_rank())
        held = layout.pipelines[mine.pipeline]
        split = SplitModel(model, held.stages, held.stages_of(mine.rank_in_pipeline))
        model.materialize(device, options.seed)
        apply_policy(blocks_of(model), options.activation)
        self._device, self._index = device, mine.pipeline
        self._counts = [microbatches for _, microbatches in options.pipelines]
        make_schedule = partial(build, options.schedule, held.num_ranks)
        self.pipeline = Pipeline(split, layout, make_schedule, device, num_microbatches=self._counts[self._index])
        self._clock: Clock | None = None
        # The engine runs forwards and backwards in turns; a forward is timed where it computes.
        split.forward = self._timed(split.forward)  # type: ignore[method-assign]  # on this object alone
        self.parameters = list(model.parameters())

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._clock is None:
                return forward(*args, **kwargs)
            with self._clock.phase("forward"):
                return forward(*args, **kwargs)

        return run

    def step(self, batch: Batch, clock: Clock) -> float:
        self._clock = clock
        on_device = {name: tensor.to(self._device) for name, tensor in batch.items()}
        mine = cut(on_device, self._counts)[self._index]
        first = sum(self._counts[: self._index])
        sizes = [len(microbatch["input_ids"]) for microbatch in mine]
        for out in self.pipeline.train_microbatches(mine, sizes, first_microbatch=first):
            with clock.phase("backward"):
                out.loss.backward()
        report = self.pipeline.last_step
        assert report is not None
        return report.global_loss / dist.get_world_size()

    def efficiency(self, phases: dict[str, float]) -> float | None:
        """From the time this rank waited for others, which a GPU's host does not know: there it is None, and the
        backward's time includes waiting in the stream."""
        report = self.pipeline.last_step
        assert report is not None
        if report.bubble is None:
            return None
        phases["backward"] = max(0.0, report.seconds * (1 - report.bubble) - phases.get("forward", 0.0))
        return 1 - report.bubble

    def close(self) -> None:
        self.pipeline.close()


def place(model: GPT, options: Options) -> Layout:
    """The layout of `options.pipelines`, each with the model's units balanced over its stages by cost."""
    assert isinstance(options.config, GPTConfig)
    units = list_units(model)
    costs = unit_costs(model, units, tokens=options.config.block_size)
    stages_per_pipeline, stage_to_rank = [], []
    for ranks, _ in options.pipelines:
        mapping = build(options.schedule, ranks, 1).stage_to_rank
        stages, start = [], 0
        for size in partition(costs, [1.0] * len(mapping)).sizes:
            stages.append(units[start : start + size])
            start += size
        stages_per_pipeline.append(stages)
        stage_to_rank.append(mapping)
    return Layout.place(stages_per_pipeline, stage_to_rank)
