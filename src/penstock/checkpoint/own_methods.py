"""Saving methods of a model's own class: they write the whole model in a format of theirs, on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.modeling.instrumentation import absent_of, original_class, record_of
from penstock.modeling.weights.whole import shards_of

from .model_methods import saving_ranks
from .plan import Content, FilePlan, Folder, SavingReport, each_file, first_holders, tell_reports, writers_of
from .save_pretrained import SaveOptions, refuse_unsupported
from .tensors import tied_groups


def save_by_own_method(model: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of the model's own class that saves it, on one rank, where the model is whole meanwhile.

    Returns:
        what it returned; None on the other ranks.

    Raises:
        CheckpointError: it failed, or a rank cannot give its part.
    """
    place, world = saving_ranks(model.pipeline).values()
    what, own, returned = f"save by {type(model).__name__}.{name}()", _WholeModel(model, SaveOptions()), list[Any]()

    def report() -> SavingReport:
        refuse_unsupported(model, merged=None)
        return own.report(place, "")

    def call(file: FilePlan, content: Content) -> None:
        assert not isinstance(content, bytes)
        for names in tied_groups(model):
            content.update((name, content[names[0]]) for name in names if name in content and names[0] in content)
        with _made_whole(model, content), _Alone(name):
            returned.append(getattr(model, name)(*args, **kwargs))

    with model.pipeline.saving():
        reports = tell_reports(world, what, report)
        world.together(f"running {name}() to {what}", lambda: each_file(own, reports, world, call))
    return returned[0] if returned else None


class _WholeModel(Folder):
    """What the rank that leads lacks of the model, as if it were one file."""

    def plan(self, reports: Sequence[SavingReport], rank: int) -> list[FilePlan]:
        leader, shards = writers_of(reports)[0], shards_of(self.model)
        sources = first_holders(reports, shards)
        lacking = {name: one for name, one in sources.items() if one.ranks[0] != leader or name in shards}
        return [FilePlan("the whole model", leader, lacking)]


class _Alone(TorchDispatchMode):
    """Inside, what ranks do together is refused: the others wait until this one is done."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise RuntimeError(
                f"{self._name}() calls torch.distributed ({func.__name__}), but it runs on one rank alone, which has "
                "the whole model meanwhile: leave out of it what ranks do together, such as a barrier"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def _made_whole(model: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, the model is whole: what it lacks as ghosts, or has in shards, has these values, by name; buffers, too.

    Parameters are themselves, so that what is tied stays tied. The model's class is its own, without what is mixed in.
    """
    with ExitStack() as undo:
        undo.callback(setattr, record_of(model), "tensor_parallel", record_of(model).tensor_parallel)
        record_of(model).tensor_parallel = None
        for full, value in values.items():
            prefix, _, name = full.rpartition(".")
            module = model.get_submodule(prefix)
            absent = absent_of(module).get(name)
            parameter = module._parameters.get(name) if absent is None else absent.tensor
            is_parameter = isinstance(parameter, nn.Parameter)
            if isinstance(parameter, nn.Parameter):
                undo.callback(setattr, parameter, "data", parameter.data)
                parameter.data, value = value, parameter
            registry: dict[str, Any] = module._parameters if is_parameter else module._buffers
            if name not in registry:
                undo.callback(vars(module).__setitem__, name, vars(module).pop(name))
                undo.callback(registry.pop, name)
                registry[name] = value
        undo.callback(setattr, model, "__class__", type(model))
        model.__class__ = original_class(type(model))
        yield
