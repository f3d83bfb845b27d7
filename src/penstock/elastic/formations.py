"""What the deciding member decides from the others' reports: who goes on, on which pipelines, at which ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from transformers import PreTrainedModel

from penstock.elastic.membership import Record
from penstock.elastic.protocol import Decision, Report
from penstock.elastic.settings import Elastic
from penstock.modeling.graph.costs import unit_costs
from penstock.planning.layout import Layout
from penstock.planning.pipelines import Schedules, num_stages_on, schedule_maker
from penstock.planning.planner import Infeasible
from penstock.planning.profile import Profile, UnitCost
from penstock.planning.reshape import Shape, best_shapes, choose, shape_of
from penstock.planning.template import PipelineTemplate
from penstock.runtime.comm.devices import device_memory
from penstock.runtime.profiling import profile_model

# Beside the weights, numbers of each parameter that an optimizer keeps: Adam's two.
STATES = 2


class Formations:
    """The pipelines that a model can be placed on.

    Args:
        model: a whole one; what is needed of it is read now.
        num_microbatches: of a step, over all pipelines.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: Elastic,
        schedule: Schedules,
        num_microbatches: int,
        microbatch_size: int,
        tp_size: int,
    ) -> None:
        self.model_name = type(model).__name__
        self.units = PipelineTemplate.get_modules(model)
        for template in settings.templates:
            template.validate(model, self.units)
        self._settings, self._schedule, self._num_microbatches = settings, schedule, num_microbatches
        self._tp_size = tp_size
        if not isinstance(schedule, str) and not settings.templates:
            raise TypeError(
                f"with elastic= the planner needs the name of one schedule, but the plugin has {schedule!r}"
            )
        self._memory = device_memory() if settings.memory is None else settings.memory
        if self._memory is not None and not settings.templates:
            self._profile = profile_model(model, microbatch_size)
        else:  # an estimate of the seconds is enough to balance stages
            costs = unit_costs(model, self.units)
            self._profile = Profile(
                self.model_name,
                tuple(UnitCost(unit, cost, cost, cost) for unit, cost in zip(self.units, costs, strict=True)),
            )
        self._size_of = {unit: _num_bytes(model.get_submodule(unit)) * (1 + STATES) for unit in self.units}

    @cached_property
    def _shapes(self) -> Mapping[int, Shape]:
        """The possible pipelines, by number of devices."""
        settings = self._settings
        if settings.templates:
            seconds = {unit.name: unit.seconds for unit in self._profile.units}
            found = {}
            for template in settings.templates:
                mapping = schedule_maker(template, self._schedule)(1).stage_to_rank
                shape = shape_of(template.modules_per_stage, mapping, seconds)
                found[shape.num_devices] = shape
            return found
        assert isinstance(self._schedule, str)
        most = len(self.units)
        mappings: dict[int, Sequence[int]] = {}
        for devices in range(1, most + 1):
            stages = num_stages_on(devices, self._schedule)
            template = PipelineTemplate(self.model_name, [[f"stage {index}"] for index in range(stages)])
            mappings[devices] = schedule_maker(template, self._schedule)(1).stage_to_rank
        memory = math.inf if self._memory is None else self._memory
        return best_shapes(self._profile, most, self._num_microbatches, memory, mappings)

    def layout(self, decision: Decision) -> tuple[list[PipelineTemplate], list[int]]:
        """The templates and microbatches of a generation's pipelines."""
        chosen = {template.modules_per_stage: template for template in self._settings.templates}
        templates = [
            chosen.get(stages) or PipelineTemplate(self.model_name, stages) for stages, _ in decision.pipelines
        ]
        return templates, [count for _, count in decision.pipelines]

    def decide(
        self,
        generation: int,
        reports: Sequence[Report],
        joining: Sequence[int],
        record: Callable[[int], Record | None],
        before: Decision | None = None,
        step: int = 0,
        checkpoint: Callable[[], tuple[int, str] | None] = lambda: None,
    ) -> Decision:
        """The next generation.

        Args:
            reports: of those that go on.
            joining: who comes new.
            record: what a member said of itself.
            before: the generation that ends, None at the beginning of a run.
            checkpoint: finds step and path of one to go back to, if nobody has some part of the model, or some member
                is on its way back.
        """
        started = time.monotonic()
        held = {report.member: report.held for report in reports} | dict.fromkeys(joining, ())
        devices = self._devices(list(held), record)
        members = [member for device in devices for member in device]
        old = () if before is None else before.members
        left = tuple(member for member in old if member not in members)
        restore = ""
        missing = [] if not reports else [
            unit for unit in self.units if not any(unit in held[device[0]] for device in devices)
        ]  # fmt: skip
        try:
            if not devices:
                raise Infeasible("no member is left to go on")
            going_back = any(report.going_back for report in reports)
            if (missing or going_back) and (found := checkpoint()) is not None:
                step, restore = found
                held = dict.fromkeys(held, ())  # all values come from there
            elif missing:
                raise Infeasible(
                    f"no device that is left has the values of {', '.join(missing[:4])}"
                    + (f" and {len(missing) - 4} more units" if len(missing) > 4 else "")
                )
            elif going_back:
                raise Infeasible("the checkpoint to go back to is gone")
            formation = choose(
                self._shapes,
                [held[device[0]] for device in devices],
                self._size_of,
                self._num_microbatches,
                self._settings.copies,
                self._pipelines_left(before, devices),
                self._settings.bandwidth,
                self._settings.horizon,
            )
        except (Infeasible, ValueError) as error:
            # Those who came new go on waiting, and all others are told.
            return Decision(generation, tuple(sorted(held)), step=step, end=str(error), lost=left)
        ranks = tuple(member for index in formation.devices for member in devices[index])
        pipelines = tuple(
            (shape.stages, count) for shape, count in zip(formation.shapes, formation.microbatches, strict=True)
        )
        return Decision(
            generation,
            ranks,
            tuple(member for member in joining if member in ranks),
            step,
            pipelines=pipelines,
            lost=left,
            restore=restore,
            seconds=time.monotonic() - started,
        )

    def _devices(self, members: Sequence[int], record: Callable[[int], Record | None]) -> list[list[int]]:
        """The members of each device: with tensor parallelism the shards of one group, if all are there."""
        groups: dict[str, dict[int, int]] = {}
        for member in sorted(members):
            about = record(member)
            if about is not None:
                groups.setdefault(about.group, {})[about.shard] = member
        complete = [shards for shards in groups.values() if len(shards) == self._tp_size]
        return [[shards[shard] for shard in range(self._tp_size)] for shards in complete]

    def _pipelines_left(self, before: Decision | None, devices: Sequence[Sequence[int]]) -> list[list[int]]:
        """The devices that are left of each former pipeline."""
        if before is None or not before.pipelines:
            return []
        templates, _ = self.layout(before)
        mappings = [schedule_maker(template, self._schedule)(1).stage_to_rank for template in templates]
        layout = Layout.place([template.modules_per_stage for template in templates], mappings, self._tp_size)
        index_of = {member: index for index, device in enumerate(devices) for member in device[:1]}
        return [
            [index_of[before.members[rank]] for rank in pipeline.ranks(0) if before.members[rank] in index_of]
            for pipeline in layout.pipelines
        ]


def _num_bytes(module: torch.nn.Module) -> float:
    return float(sum(parameter.nbytes for parameter in module.parameters()))
