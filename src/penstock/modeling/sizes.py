"""How many parameters stages hold."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from penstock.modeling.tied import stage_of_parameter


def stage_sizes(model: nn.Module, stages: Sequence[Sequence[str]]) -> list[int]:
    """For each stage the elements of the parameters it holds: those of its units, and those outside of all units.

    A tied weight counts once on each stage that holds it, so the sum may exceed the model's size.

    Args:
        model: a whole model, maybe on the meta device.
        stages: the names of the units of each stage.
    """
    stage_of = {unit: stage for stage, units in enumerate(stages) for unit in units}
    held: list[dict[int, int]] = [{} for _ in stages]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stage = stage_of_parameter(name, stage_of)
        for holder in held if stage is None else [held[stage]]:
            holder[id(parameter)] = parameter.numel()
    return [sum(sizes.values()) for sizes in held]
