"""Which pipelines a run has: their templates' ranks and microbatches, checked, or written as `1x3,2x5`. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from penstock.schedule import default_stages_per_rank, schedule_names
from penstock.template import PipelineTemplate

# Per template, or one number for each pipeline.
Microbatches = Mapping[PipelineTemplate, int] | Sequence[int]


def parse_pipelines(text: str) -> list[tuple[int, int]]:
    """Read pipelines written as stages x microbatches: `1x3,2x5` is `[(1, 3), (2, 5)]`.

    Raises:
        ValueError: it is not written so, or a number is 0.
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


def check_schedule(name: str) -> None:
    """Raise ValueError unless `name` is a schedule that puts one stage on each rank, as templates do."""
    if name not in schedule_names():
        raise ValueError(f"schedule must be one of {', '.join(schedule_names())}, got {name!r}")
    if default_stages_per_rank(name) != 1:
        fitting = ", ".join(known for known in schedule_names() if default_stages_per_rank(known) == 1)
        raise ValueError(
            f"schedule {name!r} puts {default_stages_per_rank(name)} stages on each rank, but a pipeline template has "
            f"one stage for each rank: use one of {fitting}"
        )


def check_templates(pipelines: Sequence[PipelineTemplate]) -> tuple[PipelineTemplate, ...]:
    """The templates of a run, which must place the same modules.

    Raises:
        TypeError: `pipelines` is no sequence of templates.
        ValueError: there are none, or two are for different models.
    """
    if isinstance(pipelines, PipelineTemplate) or not isinstance(pipelines, Sequence):
        raise TypeError(f"pipelines must be a list of PipelineTemplate, got {pipelines!r}")
    for template in pipelines:
        if not isinstance(template, PipelineTemplate):
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


def check_ranks(pipelines: Sequence[PipelineTemplate], tp_size: int, world_size: int) -> None:
    """Check that the pipelines use all ranks of the world.

    Raises:
        AssertionError: they need more or fewer.
    """
    stages = [template.num_stages for template in pipelines]
    needed = sum(stages) * tp_size
    if needed != world_size:
        raise AssertionError(
            "Number of ranks in pipeline templates does not match world size: the pipelines need "
            f"({' + '.join(map(str, stages))}) x tp_size {tp_size} = {needed} ranks, but the world has {world_size}"
        )


def check_microbatches(pipelines: Sequence[PipelineTemplate], num_microbatches: Microbatches) -> tuple[int, ...]:
    """The number of microbatches of each pipeline.

    Raises:
        AssertionError: a pipeline has none given.
        TypeError: `num_microbatches` is neither a mapping nor a sequence, or holds something that is no integer.
        ValueError: a number below 1.
    """
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
