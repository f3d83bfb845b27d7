"""Which pipelines a run has: their templates' ranks and microbatches, checked, or written as `1x3,2x5`.

No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from penstock.layout.template import StageTemplate
from penstock.schedule.registry import default_stages_per_rank

AnyTemplate = TypeVar("AnyTemplate", bound=StageTemplate)
# Per template, or one number for each pipeline.
Microbatches = Mapping[StageTemplate, int] | Sequence[int]
# A name, the path of a .csv file, or rows; of every pipeline, or per template.
OneSchedule = str | Path | Sequence[str]
Schedules = OneSchedule | Mapping[StageTemplate, OneSchedule]


def parse_pipelines(text: str) -> list[tuple[int, int]]:
    """Read pipelines written as stages x microbatches: `1x3,2x5` is `[(1, 3), (2, 5)]`.

    Under a schedule that puts several stages on a rank the first number is that of ranks; see `num_stages_on`.
    """
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*[xX×]\s*(\d+)\s*", part)
        if match is None or 0 in (int(match[1]), int(match[2])):
            raise ValueError(
                "pipelines are written as stages x microbatches with commas between them, such as 1x3,2x5; "
                f"{part!r} in {text!r} is not"
            )
        found.append((int(match[1]), int(match[2])))
    return found


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


def check_ranks(ranks: Sequence[int], stages: Sequence[int], tp_size: int, world_size: int) -> None:
    """Check that pipelines of so many `stages`, on so many ranks each, use all ranks of the world."""
    needed = sum(ranks) * tp_size
    if needed != world_size:
        need = f"({' + '.join(map(str, ranks))})"
        if list(ranks) != list(stages):
            need += f" for {' + '.join(map(str, stages))} stages, of which the schedule puts several on a rank,"
        raise AssertionError(
            f"Number of ranks in pipeline templates does not match world size: the pipelines need {need} x tp_size "
            f"{tp_size} = {needed} ranks, but the world has {world_size}"
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
