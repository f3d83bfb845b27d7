"""Schedules of pipelines as a user gives them: a name, a file or rows, of all or per template. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from penstock.layout.pipelines import Schedules
from penstock.layout.template import StageTemplate
from penstock.schedule.actions import Schedule
from penstock.schedule.registry import AUTO, build, default_stages_per_rank
from penstock.schedule.text import own_or_named, written_schedule


def check_schedule(schedule: Schedules) -> None:
    """Check what a user gave as the schedule of pipelines, as far as can be told without the pipelines."""
    if isinstance(schedule, Mapping):
        for template in schedule:
            if not isinstance(template, StageTemplate):
                raise TypeError(f"the keys of schedule must be pipeline templates, got {template!r}")
    for one in schedule.values() if isinstance(schedule, Mapping) else (schedule,):
        if not isinstance(one, str | Path | Sequence):
            raise TypeError(
                "schedule must be a name, the path of a .csv file, a list with a row for each rank, or a dict with one "
                f"of these for each template, got {one!r}"
            )
        written_schedule(one)


def schedule_maker(template: StageTemplate, schedule: Schedules) -> Callable[[int], Schedule]:
    """What makes a template's schedule for any number of microbatches. It tells the template's ranks, too.

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
