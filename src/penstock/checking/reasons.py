"""Why a model's results over stages differ from the unsplit model's: what no pipeline can keep of its forward."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.checking.copies import copied
from penstock.data.microbatch import split_batch
from penstock.nested import named_tensors
from penstock.random_state import all_restored, generators_in_use

# Of nn.Module itself.
_OF_MODULES = frozenset(vars(nn.Module()))
LossOf = Callable[[nn.Module, Mapping[str, Any]], torch.Tensor]


def inputs_of_forward(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that the model's forward takes; the others are for a criterion."""
    parameters = inspect.signature(model.forward).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(inputs)
    return {name: value for name, value in inputs.items() if name in parameters}


NOT_FOUND = "not found: this may be a defect of Penstock; please report it with this table"
OF_ACCUMULATION = (
    "the unsplit model gives the same when it accumulates over the same microbatches: what it computes for a sample "
    "depends on the others (experts with room for so many tokens), or on roundings in single precision"
)


def reason_of_difference(
    model: nn.Module,
    inputs: Mapping[str, Any],
    pieces: Sequence[tuple[Mapping[str, Any], float]],
    loss_of: LossOf,
) -> str:
    """Why training on `inputs` in microbatches, `pieces` with their shares, differs, in words, with what to do."""
    first, used = _forward(model, inputs, 0, 0)
    if not _same(first, _forward(model, inputs, 0, 1)[0]):
        return (
            "the forward draws random numbers outside of torch (random, numpy): each microbatch and each rank draws "
            "its own. Draw them with torch, whose generators Penstock seeds by step, microbatch and unit"
        )
    if not _same(first, _forward(model, inputs, 1, 0)[0]):
        return (
            "the forward draws random numbers in training that are no dropout, so that no two runs are alike: leave "
            "them out to compare it"
        )
    if changed := sorted(_changed(model, used)):
        names = ", ".join(changed[:3]) + (", ..." if len(changed) > 3 else "")
        return (
            f"a forward changes what the next one finds: {names}. Over stages it runs for each microbatch, so what it "
            "keeps is that of the last, or of all of them: change it in your loop, once in a step"
        )
    whole = _loss(model, inputs, loss_of)
    if near(sum(_loss(model, part, loss_of) * share for part, share in pieces), whole):
        return NOT_FOUND
    for dims in _other_dims(inputs):
        size = next(inputs[name].shape[dim] for name, dim in dims.items() if dim)
        halves = [size - size // 2, size // 2]
        try:
            split = split_batch(inputs, size, halves, dims=dims)
            total = sum(_loss(model, part, loss_of) * half / size for part, half in zip(split, halves, strict=True))
        except Exception:  # whatever a model's own code raises for a shape
            continue
        if near(total, whole):
            return f"the samples are not along the first dimension: configure batch_dim={dims}"
    return (
        "the samples of a batch depend on each other (statistics over the batch, contrasts between samples): a "
        "microbatch by itself gives another result, as in any accumulation of gradients"
    )


def _forward(model: nn.Module, inputs: Mapping[str, Any], seed: int, other_seed: int) -> tuple[list[Any], nn.Module]:
    """What a forward of a copy returns; and that copy. `seed`: of torch's generators, `other_seed`: of all others."""
    used = copied(model)
    with all_restored(generators_in_use()), torch.no_grad():
        torch.manual_seed(seed)
        random.seed(other_seed)
        np.random.seed(other_seed)
        output = used(**inputs_of_forward(used, inputs))
    return list(named_tensors({"output": output}).values()), used


def _changed(model: nn.Module, used: nn.Module) -> Iterator[str]:
    """Names of what is not in `used` as it is in `model`. Batch normalisation is warned of by itself."""
    modules = dict(used.named_modules())
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            continue
        pair = [{**vars(each), **each._buffers} for each in (module, modules[name])]
        before, after = ({k: v for k, v in each.items() if k not in _OF_MODULES} for each in pair)
        for key in before.keys() | after.keys():
            if not _same(before.get(key), after.get(key)):
                yield f"{name}.{key}" if name else key


def _same(one: Any, other: Any) -> bool:
    try:
        torch.testing.assert_close(one, other, equal_nan=True)
    except AssertionError:
        return False
    except (TypeError, ValueError):  # nothing that is compared, such as a function
        return bool(one == other) if isinstance(one, (str, bytes)) else True
    return True


def _loss(model: nn.Module, inputs: Mapping[str, Any], loss_of: LossOf) -> float:
    with torch.no_grad():
        return float(loss_of(copied(model), inputs))


def near(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-6 * max(1.0, abs(other))


def _other_dims(inputs: Mapping[str, Any]) -> Iterator[dict[str, int | None]]:
    """Other dimensions that the samples may be in: a size that some tensors have there, and others in the first."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    for dim in (1, 2):
        for size in sorted({value.shape[dim] for value in tensors.values() if value.dim() > dim} - {1}):
            yield {
                name: dim if value.dim() > dim and value.shape[dim] == size
                else 0 if 0 < value.dim() <= dim and value.shape[0] == size
                else None
                for name, value in tensors.items()
            }  # fmt: skip
