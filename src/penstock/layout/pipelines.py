"""Which pipelines a run has: templates, schedules, stages and microbatches as a user gives them, checked and placed.

No torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from penstock.layout.layout import Layout
from penstock.layout.template import StageTemplate, shown
from penstock.schedule.actions import Schedule, check_trains
from penstock.schedule.registry import AUTO, build, default_stages_per_rank
from penstock.schedule.text import own_or_named, written_schedule

AnyTemplate = TypeVar("AnyTemplate", bound=StageTemplate)
# Per template, or one number for each pipeline.
Microbatches = Mapping[StageTemplate, int] | Sequence[int]
# A name, the path of a .csv file, or rows; of every pipeline, or per template.
OneSchedule = str | Path | Sequence[str]
Schedules = OneSchedule | Mapping[StageTemplate, OneSchedule]


@dataclass(frozen=True)
class PlacedPipelines(Generic[AnyTemplate]):
    """The pipelines of a run, the first on the first ranks, and so on. One whose sequences are shared out stands for
    `context_parallel_size` alike in the layout.

    Attributes:
        templates, schedules: of each pipeline; the schedule is that of a step.
        makers: make each pipeline's schedule for any number of microbatches.
    """

    templates: tuple[AnyTemplate, ...]
    makers: tuple[Callable[[int], Schedule], ...]
    schedules: tuple[Schedule, ...]
    layout: Layout

    @property
    def num_microbatches(self) -> tuple[int, ...]:
        """Of each pipeline in a step."""
        return tuple(schedule.num_microbatches for schedule in self.schedules)


def place_pipelines(
    templates: tuple[AnyTemplate, ...],
    schedule: Schedules,
    num_microbatches: Microbatches,
    tensor_parallel_size: int,
    world_size: int,
    context_parallel_size: int = 1,
) -> PlacedPipelines[AnyTemplate]:
    """Place checked `templates` on all ranks of the world. Raises AssertionError, TypeError or ValueError for numbers
    of ranks or microbatches, or for schedules, that do not fit."""
    makers = tuple(schedule_maker(template, schedule) for template in templates)
    ranks, stages = [make(1).num_ranks for make in makers], [template.num_stages for template in templates]
    check_ranks(ranks, stages, tensor_parallel_size, world_size, context_parallel_size)
    counts = check_microbatches(templates, num_microbatches)
    schedules = tuple(make(count) for make, count in zip(makers, counts, strict=True))
    for index, made in enumerate(schedules):
        check_trains(made, f"pipeline {index}")
    each = range(context_parallel_size)
    units = [template.modules_per_stage for template in templates for _ in each]
    mappings = [made.stage_to_rank for made in schedules for _ in each]
    layout = Layout.place(units, mappings, tensor_parallel_size, context_parallel_size)
    return PlacedPipelines(templates, makers, schedules, layout)


def parse_pipelines(text: str) -> list[tuple[int, int]]:
    """Read pipelines written as stages x microbatches: `1x3,2x5` is `[(1, 3), (2, 5)]`.

    Under a schedule that puts several stages on a rank the first number is that of ranks; see `num_stages_on`.
    """
    parsed = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*[xX×]\s*(\d+)\s*", part)
        if match is None or 0 in (int(match[1]), int(match[2])):
            raise ValueError(
                "pipelines are written as stages x microbatches with commas between them, such as 1x3,2x5; "
                f"{part!r} in {text!r} is not"
            )
        parsed.append((int(match[1]), int(match[2])))
    return parsed


def num_stages_on(num_ranks: int, schedule: str) -> int:
    """Stages of a pipeline on `num_ranks` ranks: as many on each as the named schedule has; on a single rank one, as
    there is nothing to overlap. Raises ValueError for an unknown name."""
    per_rank = default_stages_per_rank(schedule)
    return num_ranks if num_ranks == 1 else num_ranks * per_rank


def check_templates(pipelines: Sequence[AnyTemplate]) -> tuple[AnyTemplate, ...]:
    """The templates of a run, which must place the same modules."""
    if isinstance(pipelines, StageTemplate) or not isinstance(pipelines, Sequence):
        raise TypeError(f"pipelines must be a list of PipelineTemplate, got {pipelines!r}")
    for template in pipelines:
        if not isinstance(template, StageTemplate):
            raise TypeError(f"pipelines must be a list of PipelineTemplate, got {template!r} in it")
    if not pipelines:
        raise ValueError("pipelines is empty: at least one pipeline template is needed")
    first = pipelines[0]
    for template in pipelines[1:]:
        if set(template.modules) != set(first.modules):
            different = sorted(set(template.modules) ^ set(first.modules))
            raise ValueError(
                f"The pipeline templates are for different models: {first!r} and {template!r} differ in "
                f"{', '.join(different[:4])}"
            )
    return tuple(pipelines)


def check_ranks(
    ranks: Sequence[int],
    stages: Sequence[int],
    tensor_parallel_size: int,
    world_size: int,
    context_parallel_size: int = 1,
) -> None:
    """Check that pipelines of so many `stages`, on so many ranks each, use all ranks of the world."""
    needed = sum(ranks) * tensor_parallel_size * context_parallel_size
    if needed != world_size:
        need = f"({' + '.join(map(str, ranks))})"
        if list(ranks) != list(stages):
            need += f" for {' + '.join(map(str, stages))} stages, of which the schedule puts several on a rank,"
        parts = f" x context_parallel_size {context_parallel_size}" * (context_parallel_size > 1)
        raise AssertionError(
            f"Number of ranks in pipeline templates does not match world size: the pipelines need {need} x tp_size "
            f"{tensor_parallel_size}{parts} = {needed} ranks, but the world has {world_size}"
        )


def check_microbatches(pipelines: Sequence[StageTemplate], num_microbatches: Microbatches) -> tuple[int, ...]:
    """The number of microbatches of each pipeline."""
    missing = "All pipelines must have a corresponding number of microbatches"
    if isinstance(num_microbatches, Mapping):
        for template in pipelines:
            if template not in num_microbatches:
                raise AssertionError(f"{missing}: num_microbatches has no key {template!r}")
        counts = [num_microbatches[template] for template in pipelines]
    elif isinstance(num_microbatches, list | tuple):
        if len(num_microbatches) != len(pipelines):
            raise AssertionError(
                f"{missing}: there are {len(pipelines)} pipelines, but {len(num_microbatches)} numbers of microbatches"
            )
        counts = list(num_microbatches)
    else:
        raise TypeError(
            "num_microbatches must be a dict from pipeline templates to integers, or a list with an integer for each "
            f"pipeline, got {num_microbatches!r}"
        )
    for index, (template, count) in enumerate(zip(pipelines, counts, strict=True)):
        if isinstance(count, bool) or not hasattr(count, "__index__"):
            raise TypeError(f"the number of microbatches of pipeline {index} ({template!r}) is no integer: {count!r}")
        if count < 1:
            raise ValueError(f"pipeline {index} ({template!r}) needs at least 1 microbatch, but has {count}")
    return tuple(int(count) for count in counts)


def check_schedule(schedule: Schedules) -> None:
    """Check what a user gave as the schedule of pipelines, as far as can be told without the pipelines."""
    if isinstance(schedule, Mapping):
        for template in schedule:
            if not isinstance(template, StageTemplate):
                raise TypeError(f"the keys of schedule must be pipeline templates, got {template!r}")
    for given in schedule.values() if isinstance(schedule, Mapping) else (schedule,):
        if not isinstance(given, str | Path | Sequence):
            raise TypeError(
                "schedule must be a name, the path of a .csv file, a list with a row for each rank, or a dict with one "
                f"of these for each template, got {given!r}"
            )
        written_schedule(given)


def schedule_maker(template: StageTemplate, schedule: Schedules) -> Callable[[int], Schedule]:
    """What makes a template's schedule for any number of microbatches, which also tells how many ranks it takes.

    A template of one stage takes one rank under any named schedule. `schedule`: of all templates, or a dict with one
    for each."""
    if isinstance(schedule, Mapping):
        if template not in schedule:
            raise ValueError(f"schedule has no key {template!r}: give one for every template")
        schedule = schedule[template]
    written = written_schedule(schedule)
    if written is not None:
        if written.num_stages != template.num_stages:
            raise ValueError(
                f"schedule {written.name!r} is written for {written.num_stages} stages, but {template!r} has "
                f"{template.num_stages}"
                ": write one for as many stages, or give the name of one"
            )
        return own_or_named(schedule, written.num_ranks)
    assert isinstance(schedule, str)
    per_rank = default_stages_per_rank(schedule)
    if template.num_stages == 1:
        return partial(build, AUTO, 1)
    if template.num_stages % per_rank:
        raise ValueError(
            f"schedule {schedule!r} puts {per_rank} stages on each rank, but {template!r} has {template.num_stages}: "
            f"make templates with a multiple of {per_rank} stages, or choose another schedule for this one "
            "(schedule={template: name, ...})"
        )
    return partial(build, schedule, template.num_stages // per_rank)


def chosen_stages(units: Sequence[str], stages: Sequence[Sequence[str]]) -> list[list[str]]:
    """The units of each stage, from the modules of each. A module that holds several units stands for all of them.
    `stages`: for each stage the names of its modules, in forward order."""
    placed: list[list[str]] = []
    for index, names in enumerate(stages):
        placed.append([unit for name in names for unit in _units_of(name, units, f"stages[{index}]")])
    every = [unit for stage in placed for unit in stage]
    if missing := [unit for unit in units if unit not in every]:
        raise ValueError(f"stages must place every unit of the model, but leave out {shown(missing)}")
    if twice := [unit for unit in units if every.count(unit) > 1]:
        raise ValueError(f"stages must place each unit once, but place {shown(twice)} several times")
    wrong = next((place for place, unit in enumerate(units) if every[place] != unit), None)
    if wrong is not None:
        raise ValueError(
            f"stages must be in the order of the forward, but {every[wrong]} stands where {units[wrong]} is due; the "
            f"order is {shown(units)}"
        )
    return placed


def split_stages(units: Sequence[str], split_points: Sequence[str]) -> list[list[str]]:
    """The units of each stage, from the modules with which the second, the third, ... stage begins."""
    starts = [0]
    for name in split_points:
        start = units.index(_units_of(name, units, "split_points")[0])
        if start <= starts[-1]:
            what = "begins the first stage anyway" if start == 0 else f"does not come after {units[starts[-1]]}"
            raise ValueError(
                f"split_points must be in the order of the forward, each beginning a further stage, but {name} {what}; "
                f"the order is {shown(units)}"
            )
        starts.append(start)
    return [list(units[start:end]) for start, end in zip(starts, [*starts[1:], len(units)], strict=True)]


def _units_of(name: str, units: Sequence[str], where: str) -> list[str]:
    """The units that a module's name stands for."""
    if name in units:
        return [name]
    if inside := [unit for unit in units if unit.startswith(f"{name}.")]:
        return inside
    around = next((unit for unit in units if name.startswith(f"{unit}.")), None)
    if around is not None:
        raise ValueError(f"{where} names {name}, which is inside the unit {around}: a unit is placed as a whole")
    close = difflib.get_close_matches(name, units, n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise ValueError(f"{where} names {name!r}, which is no unit of the model{hint} Its units are {shown(units)}")
