"""What each unit of a model costs: measured on a device, or estimated from operations and bytes on the meta device.

Each kind of unit is run alone, see `unit_cost`: a model needs not fit the device. Units of equal shapes are run once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from penstock.checking.check import build_on_meta, check
from penstock.modeling.graph.dummy_inputs import dummy_inputs
from penstock.modeling.graph.shapes import OutputShape, ShapeFunctions, flatten
from penstock.modeling.graph.units import trace_units
from penstock.planning.profile import Profile, UnitCost
from penstock.planning.unit_cost import Call, Cost, cost_of


def profile_model(
    subject: Any,
    batch: int = 1,
    length: int = 128,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    operations_per_second: float = 312e12,
    optimizer_states: int = 2,
) -> Profile:
    """The costs of a model's units for microbatches of `batch` samples of `length` tokens.

    Args:
        subject: see `penstock.checking.check.check`.
        dtype: of weights and activations; a model has its own.
        device: where the units are run; None estimates the seconds and runs nothing.
        operations_per_second: of the device that seconds are estimated for.
        optimizer_states: numbers that the optimizer keeps for each parameter: 2 for Adam.

    Raises:
        NotImplementedError: the model cannot be split.
    """
    model = subject if isinstance(subject, nn.Module) else build_on_meta(subject).to(dtype)
    inputs = _inputs(model, batch, length)
    report = check(model, inputs)
    if report.reason:
        raise NotImplementedError(f"Auto policy for {report.model} is not implemented... {report.reason}")
    names = [unit.name for unit in report.units]
    calls = _calls(model, names, inputs)
    known: dict[Any, Cost] = {}
    units = []
    for index, name in enumerate(names):
        module, is_last = model.get_submodule(name), index == len(names) - 1
        key = (_shapes(module), *(_key(call) for call in calls.get(name, ())), is_last)
        if key not in known:
            runs = [cost_of(module, call, device, is_last, operations_per_second) for call in calls.get(name, ())]
            known[key] = Cost.of_all(runs)
        size = float(sum(parameter.nbytes for parameter in module.parameters()))
        boundary = report.boundaries[index] if index < len(report.boundaries) else None
        units.append(
            UnitCost(
                name,
                **known[key]._asdict(),
                weights=size,
                gradients=size,
                optimizer=optimizer_states * size,
                crossing=float(sum(crossing.num_bytes for crossing in boundary.crossing)) if boundary else 0.0,
                joined=bool(boundary and boundary.reason),
            )
        )
    where = "estimated" if device is None else str(device)
    about: dict[str, str | int | float] = {
        "microbatch": batch,
        "length": length,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "device": where,
    }
    if device is None:
        about["operations per second"] = operations_per_second
    return Profile(report.model, tuple(units), device is not None, about)


def _inputs(model: nn.Module, batch: int, length: int) -> dict[str, Any]:
    """The first guess of inputs that the model can be traced with; of so many samples, if there is one."""
    guesses = sorted(
        dummy_inputs(model, batch, length),
        key=lambda guess: not any(isinstance(x, torch.Tensor) and len(x) == batch for x in guess.values()),
    )
    device = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), torch.device("cpu"))
    guesses = [{name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in g.items()} for g in guesses]
    return next((guess for guess in guesses if not check(model, guess).reason), guesses[0])


# ---------------------------------------------------------------- what units are called with


class _Recorder(ShapeFunctions):
    """Shape functions that remember the arguments of each call."""

    def __init__(self, units: dict[str, nn.Module]) -> None:
        super().__init__(units)
        self.calls: dict[str, list[Call]] = {}

    def __call__(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], known: tuple[int, ...] = ()
    ) -> OutputShape:
        leaves, spec = flatten((args, kwargs))
        self.calls.setdefault(name, []).append((leaves, spec))
        return super().__call__(name, args, kwargs, known)


def _calls(model: nn.Module, names: list[str], inputs: Mapping[str, Any]) -> dict[str, list[Call]]:
    modules = {name: model.get_submodule(name) for name in names}
    recorder = _Recorder(modules)
    trace_units(model, recorder, inputs)
    return {name: calls for name, calls in recorder.calls.items() if name in modules}


def _shapes(module: nn.Module) -> Any:
    return type(module), tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())


def _key(call: Call) -> Any:
    return tuple(
        (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x) if isinstance(x, Cache) else repr(x)
        for x in call[0]
    )
