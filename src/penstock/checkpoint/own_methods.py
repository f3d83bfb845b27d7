"""Saving methods of a model's own class: they write the whole model in a format of theirs, on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.modeling.instrumentation import absent_of, original_class, record_of

from .merge import MergePlan, Shard, describe_holdings, first_holders, write_merged
from .model_methods import saving_ranks
from .save_pretrained import refuse_unsupported
from .saving_ranks import SavingReport, tell_reports, writers_of
from .tensors import held_state, shards_of, tied_groups


def save_by_own_method(model: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of the model's own class that saves it, on one rank, where the model is whole meanwhile.

    Returns:
        what it returned; None on the other ranks.

    Raises:
        CheckpointError: it failed, or a rank cannot give its part.
    """
    pipeline, doing, own = (
        model.pipeline,
        f"save by {type(model).__name__}.{name}()",
        _OwnMethod(model, name, args, kwargs),
    )
    ranks = saving_ranks(pipeline)
    place, world, comm = ranks["place"], ranks["world_comm"], ranks["pipeline_comm"]
    state: dict[str, torch.Tensor] = {}

    def describe() -> SavingReport:
        refuse_unsupported(model)
        state.update(held_state(model) if place.is_writer else {})
        return SavingReport(place, [], describe_holdings(model, state), None, [])

    def write(reports: Sequence[SavingReport]) -> None:
        if not place.is_writer:
            return
        every, slicings = [report.holdings for report in writers_of(reports)], shards_of(model)
        sources, holdings = first_holders(every, slicings, place.tensor_parallel_size)
        needed = tuple(name for name in holdings if name not in every[0] or name in slicings)
        plan = MergePlan((Shard("the whole model", (), needed, assembler=0),), sources, holdings, slicings)
        write_merged(own, state, plan, "", comm)

    with pipeline.saving():
        reports = tell_reports(world, f"comparing what ranks hold to {doing}", describe)
        world.together(f"running {name}() to {doing}", lambda: write(reports))
    return own.result


@dataclass
class _OwnMethod:
    """A method of the model's own class that saves it, as what writes the tensors that were gathered."""

    model: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None

    def assemble(self, gathered: dict[str, torch.Tensor], shard: Shard, folder: str) -> None:
        for names in tied_groups(self.model):
            gathered.update((name, gathered[names[0]]) for name in names if name in gathered and names[0] in gathered)
        with _made_whole(self.model, gathered):
            self.result = getattr(self.model, self.name)(*self.args, **self.kwargs)


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
