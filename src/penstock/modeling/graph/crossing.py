"""What would cross a boundary between two units, for reports: by a trace of the model's forward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from penstock.modeling.graph.dataflow import Value
from penstock.modeling.graph.plan import make_plan
from penstock.modeling.graph.trace import Trace


@dataclass(frozen=True)
class BoundaryValue:
    """One value that crosses a boundary, for the inputs of the trace."""

    origin: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def data(self) -> dict[str, Any]:
        dtype = str(self.dtype).removeprefix("torch.")
        return {"value": self.origin, "dtype": dtype, "shape": list(self.shape), "bytes": self.num_bytes}

    def __str__(self) -> str:
        return f"{self.origin} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class BoundaryReport:
    before: str  # the unit before the boundary
    crossing: tuple[BoundaryValue, ...]
    reason: str = ""  # why no stage can end here

    def in_words(self) -> str:
        return f"no boundary: {self.reason}" if self.reason else "; ".join(map(str, self.crossing)) or "nothing"


def boundary_before(traced: Trace, units: list[str], index: int) -> BoundaryReport:
    """What crosses the boundary before the unit `index`."""
    stage_of = {unit: int(place >= index) for place, unit in enumerate(units)}
    try:
        plan = make_plan(traced, stage_of, 2)
    except NotImplementedError as error:
        return BoundaryReport(units[index - 1], (), str(error))
    collected = {
        Value(call.unit, call.index, leaf): f" {key}"
        for call in traced.calls
        for key, leaf in call.output.captured
        if leaf is not None and leaf >= call.output.spec.num_leaves
    }
    crossing = []
    for value in plan.boundaries[0]:
        origin = value.unit + (f" (call {value.call + 1})" if value.call else "")
        origin += collected.get(value, f" output {value.leaf}" if value.leaf else "")
        shape = traced.shapes[value]
        crossing.append(BoundaryValue(origin, shape.shape, shape.dtype))
    return BoundaryReport(units[index - 1], tuple(crossing))
