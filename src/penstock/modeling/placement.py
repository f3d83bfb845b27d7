"""Checking which unit stands on which stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn


def checked_placement(
    model: nn.Module, stages: Sequence[Sequence[str]], local_stages: Collection[int]
) -> dict[str, int]:
    """The stage of each unit.

    Raises:
        ValueError: a unit is unknown, placed twice or inside another, or a local stage does not exist.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    placement: dict[str, int] = {}
    for stage, names in enumerate(stages):
        for name in names:
            if name not in modules:
                raise ValueError(f"stage {stage} holds {name!r}, which is no module of {type(model).__name__}")
            if name in placement:
                raise ValueError(f"{name!r} is placed on stage {placement[name]} and again on stage {stage}")
            placement[name] = stage
    for name in placement:
        parts = name.split(".")
        for end in range(1, len(parts)):
            outer = ".".join(parts[:end])
            if outer in placement:
                raise ValueError(f"{name!r} is part of {outer!r}; place only one of them")
    for stage in local_stages:
        if not 0 <= stage < len(stages):
            raise ValueError(f"local stage {stage} does not exist: the pipeline has stages 0 to {len(stages) - 1}")
    return placement
