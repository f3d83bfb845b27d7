"""What the deciding member decides from the others' reports: who goes on, on which pipelines, at which ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from transformers import PreTrainedModel

from penstock.config.plugin_settings import PluginSettings
from penstock.elastic.membership import MemberRecord, Membership
from penstock.elastic.protocol import Generation, MemberReport, View, successor
from penstock.elastic.reshape import Shape, best_shapes, choose, shape_of
from penstock.layout.layout import Layout
from penstock.layout.pipelines import Schedules, num_stages_on, schedule_maker
from penstock.modeling.graph.costs import unit_costs
from penstock.modeling.pipeline_template import PipelineTemplate
from penstock.modeling.weights.whole import alias_groups
from penstock.planning.planner import Infeasible
from penstock.planning.profile import Profile, UnitCost
from penstock.planning.profiling import profile_model
from penstock.runtime.comm.devices import device_memory

# How many numbers an optimizer keeps for each number of a weight: Adam's two.
STATES = 2


class LayoutPlanner:
    """The pipelines that a whole model can be placed on, by the settings of a plugin and its schedule, which is not
    "auto" any more."""

    def __init__(self, model: PreTrainedModel, plugin_settings: PluginSettings, schedule: Schedules) -> None:
        self._model_name = type(model).__name__
        self.units = PipelineTemplate.get_modules(model)
        settings, global_batch_size = plugin_settings.elastic, plugin_settings.global_batch_size
        assert settings is not None and global_batch_size is not None
        self._settings = settings = replace(
            settings, templates=tuple(template.fitted(model, self.units) for template in settings.templates)
        )
        self._schedule = schedule
        self._num_microbatches = global_batch_size // plugin_settings.microbatch_size
        self._tensor_parallel_size = plugin_settings.tp_size
        # With a sharded optimizer not all that hold a parameter have its state.
        self._owned = [names[0] for names in alias_groups(model)] if plugin_settings.sharded_optimizer else []
        if not isinstance(self._schedule, str) and not settings.templates:
            raise TypeError(
                f"with elastic= the planner needs the name of one schedule, but the plugin has {self._schedule!r}"
            )
        chunk = plugin_settings.loss_chunk_tokens
        self._memory = device_memory() if settings.memory is None else settings.memory
        if self._memory is not None and not settings.templates:
            self._profile = profile_model(model, plugin_settings.microbatch_size, loss_chunk_tokens=chunk)
        else:  # an estimate of the seconds is enough to balance stages
            costs = unit_costs(model, self.units, loss_in_chunks=chunk is not None)
            self._profile = Profile(
                self._model_name,
                tuple(UnitCost(unit, cost, cost, cost) for unit, cost in zip(self.units, costs, strict=True)),
            )
        self._size_of = {
            unit: sum(parameter.nbytes for parameter in model.get_submodule(unit).parameters()) * (1.0 + STATES)
            for unit in self.units
        }

    @cached_property
    def _shapes(self) -> Mapping[int, Shape]:
        """The possible pipelines, by number of devices."""
        settings = self._settings
        if settings.templates:
            seconds = {unit.name: unit.seconds for unit in self._profile.units}
            shapes = {}
            for template in settings.templates:
                mapping = schedule_maker(template, self._schedule)(1).stage_to_rank
                shape = shape_of(template.modules_per_stage, mapping, seconds)
                shapes[shape.num_devices] = shape
            return shapes
        assert isinstance(self._schedule, str)
        mappings: dict[int, Sequence[int]] = {}
        for devices in range(1, len(self.units) + 1):
            stages = num_stages_on(devices, self._schedule)
            template = PipelineTemplate(self._model_name, [[f"stage {index}"] for index in range(stages)])
            mappings[devices] = schedule_maker(template, self._schedule)(1).stage_to_rank
        memory = math.inf if self._memory is None else self._memory
        return best_shapes(self._profile, self._num_microbatches, memory, mappings)

    def layout(self, generation: Generation) -> tuple[list[PipelineTemplate], list[int]]:
        """The templates and microbatches of a generation's pipelines."""
        chosen = {template.modules_per_stage: template for template in self._settings.templates}
        templates = [
            chosen.get(stages) or PipelineTemplate(self._model_name, stages) for stages, _ in generation.pipelines
        ]
        return templates, [count for _, count in generation.pipelines]

    def following(
        self, view: View, now: Generation, membership: Membership, checkpoint: Callable[[], tuple[int, str] | None]
    ) -> Generation:
        """The generation after `now`, by what the member that decides sees. `checkpoint`: finds step and path of one to
        go back to, if nobody has some part of the model or of the optimizer's state, or some member is on its way
        back."""
        reports, step, calls, dropped = successor(view)
        joining = [report.member for report in reports if report.new]
        going_on = [report for report in reports if not report.new]
        requests = membership.num_requests()
        fresh = all(report.ready for report in going_on)
        if fresh:
            joining += membership.candidates(now.members)
        leaving = [report for report in view.reports.values() if report.leaving and report.member not in view.lost]
        handing_over = bool(leaving and joining and not going_on)
        if handing_over:  # those who have the model's values stay until those who come have them
            going_on, step = leaving, max(report.committed for report in leaving)
        # Only those who begin a run together make weights.
        makes_weights = now.is_first and all(report.new for report in view.reports.values())
        decide = partial(
            self.decide, number=now.number + 1, record=membership.pulse.record, before=now, step=step,
            checkpoint=checkpoint, makes_weights=makes_weights,
        )  # fmt: skip
        # While a run goes back to a checkpoint those who come wait: they have no `CheckpointManager` yet.
        waiting: list[int] = []
        decided = decide(going_on, [])
        if decided.restore:
            waiting, joining = joining, []
        elif joining:
            decided = decide(going_on, joining)
        while decided.reason_to_stop and joining:
            membership.refuse(joining.pop(), decided.reason_to_stop)  # the members go on without the last who came
            decided = decide(going_on, joining)
        if decided.restore and joining:  # the members alone are too few to go back
            waiting, joining = joining, []
            decided = decide(going_on, joining)
        if handing_over and not decided.joining:
            handing_over, decided = False, decide((), ())
        left = tuple(
            report.member for report in view.reports.values() if report.leaving and report.member not in decided.members
        )
        lost = tuple(member for member in decided.lost if member not in (*left, *waiting))
        if left and not lost and not decided.members:
            last = max(report.committed for report in view.reports.values())
            decided = replace(decided, step=last, reason_to_stop="all its members were told to leave it")
        if not fresh and not decided.restore:
            decided = replace(decided, calls=calls, dropped=dropped)
        requests = requests if fresh and not waiting else 0
        return replace(decided, fresh=fresh, requests=requests, left=left, lost=lost, handing_over=handing_over)

    def decide(
        self,
        reports: Sequence[MemberReport],
        joining: Sequence[int],
        number: int,
        record: Callable[[int], MemberRecord | None],
        before: Generation | None = None,
        step: int = 0,
        checkpoint: Callable[[], tuple[int, str] | None] = lambda: None,
        makes_weights: bool = True,
    ) -> Generation:
        """The generation of the members that go on, by their reports, and of those that come new, with its pipelines.
        `before`: the generation that ends, None at the beginning of a run. `makes_weights`: whether those that come new
        may make the model's values if nobody has any."""
        started = time.monotonic()
        held = {report.member: report.held for report in reports} | dict.fromkeys(joining, ())
        devices = self._devices(list(held), record)
        members = [member for device in devices for member in device]
        old = () if before is None else before.members
        lost = tuple(member for member in old if member not in members)
        restore = ""
        try:
            if not devices:
                raise Infeasible("no member is left to go on")
            if not reports and not makes_weights:
                raise Infeasible("none of the members that had the model's values is left")
            values = [held[device[0]] for device in devices]
            staying = [report for report in reports if report.member in members]
            if reports and (saved := self._to_go_back_to(staying, values, checkpoint)) is not None:
                step, restore = saved
                values = [() for _ in devices]  # all of them come from there
            chosen = choose(
                self._shapes,
                values,
                self._size_of,
                self._num_microbatches,
                self._settings,
                self._pipelines_left(before, devices),
            )
        except (Infeasible, ValueError) as error:
            # All are members of it, so that all are told why the run stops.
            return Generation(number, tuple(sorted(held)), step=step, reason_to_stop=str(error), lost=lost)
        ranks = tuple(member for index in chosen.devices for member in devices[index])
        pipelines = tuple(
            (shape.stages, count) for shape, count in zip(chosen.shapes, chosen.microbatches, strict=True)
        )
        return Generation(
            number,
            ranks,
            tuple(member for member in joining if member in ranks),
            step,
            pipelines=pipelines,
            lost=lost,
            restore=restore,
            seconds=time.monotonic() - started,
        )

    def _to_go_back_to(
        self,
        reports: Sequence[MemberReport],
        values: Sequence[Collection[str]],
        checkpoint: Callable[[], tuple[int, str] | None],
    ) -> tuple[int, str] | None:
        """Step and path of the checkpoint that all values come from; None if the devices have them."""
        missing = [unit for unit in self.units if not any(unit in has for has in values)]
        owned = {name for report in reports for name in report.owned}
        what = "values" if missing else "optimizer's state"
        missing = missing or [name for name in self._owned if name not in owned]
        if not missing and not any(report.going_back for report in reports):
            return None
        if (saved := checkpoint()) is not None:
            return saved
        if not missing:
            raise Infeasible("the checkpoint to go back to is gone")
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise Infeasible(f"no device that is left has the {what} of {', '.join(missing[:4])}{more}")

    def _devices(self, members: Sequence[int], record: Callable[[int], MemberRecord | None]) -> list[list[int]]:
        """The members of each device: with tensor parallelism the shards of one group, if all are there."""
        groups: dict[str, dict[int, int]] = {}
        for member in sorted(members):
            about = record(member)
            if about is not None:
                groups.setdefault(about.group, {})[about.shard] = member
        complete = [shards for shards in groups.values() if len(shards) == self._tensor_parallel_size]
        return [[shards[shard] for shard in range(self._tensor_parallel_size)] for shards in complete]

    def _pipelines_left(self, before: Generation | None, devices: Sequence[Sequence[int]]) -> list[list[int]]:
        """The devices that are left of each former pipeline."""
        if before is None or not before.pipelines:
            return []
        templates, _ = self.layout(before)
        mappings = [schedule_maker(template, self._schedule)(1).stage_to_rank for template in templates]
        layout = Layout.place(
            [template.modules_per_stage for template in templates], mappings, self._tensor_parallel_size
        )
        index_of = {member: index for index, device in enumerate(devices) for member in device[:1]}
        return [
            [index_of[before.members[rank]] for rank in pipeline.ranks(0) if before.members[rank] in index_of]
            for pipeline in layout.pipelines
        ]
