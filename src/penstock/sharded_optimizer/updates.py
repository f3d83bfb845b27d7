"""What happens around each step of an optimizer over parameters that have owners."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from penstock.runtime.comm.gloo import wait_for_all
from penstock.runtime.comm.rollcall import Call
from penstock.runtime.comm.settings import MODULUS
from penstock.runtime.engine import Engine
from penstock.runtime.gradients.holders import HeldParameter
from penstock.runtime.options import OwnerChoice
from penstock.runtime.torch_calls import engines_of
from penstock.sharded_optimizer.owners import with_owners

_version = attrgetter("_version")
# Tensors of fewer bytes are sent together.
SENT_ALONE = 2**18

# In which formation and training step of each engine an optimizer has begun a step that has not ended.
_under_way: weakref.WeakKeyDictionary[Optimizer, list[tuple[int, int]]] = weakref.WeakKeyDictionary()
_hooks: weakref.WeakKeyDictionary[Optimizer, list[RemovableHandle]] = weakref.WeakKeyDictionary()


def owner_choice_for(copies: int) -> OwnerChoice | None:
    """What an engine is given so that so many holders of each parameter update it; None for 0: all do."""
    if not copies:
        return None
    _install()
    return functools.partial(with_owners, copies=copies)


@functools.cache
def _install() -> None:
    handle = register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))
    # Before the hook of `torch_calls` that counts updates: one that is refused has not begun.
    hooks: Any = _global_optimizer_pre_hooks
    hooks.move_to_end(handle.id, last=False)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Before each step of any optimizer: let it pass over what this rank does not own."""
    engines = engines_of(parameter for group in optimizer.param_groups for parameter in group["params"])
    begun_in = [(id(engine.parts), engine.step_number) for engine in engines]
    if _under_way.get(optimizer) == begun_in:
        return  # this is its base class's step, called inside its own; torch runs hooks around both
    for handle in _hooks.pop(optimizer, []):  # of an earlier step, perhaps of a model that is gone
        handle.remove()
    for engine in engines:
        if engine.options.owner_choice is None:
            continue
        # In an elastic run there may be owners after the next change of members.
        if not (engine.recovery.repeats or (engine.is_open and engine.parts.sends_updates)):
            continue
        if callable(getattr(optimizer, "eval", None)):
            raise NotImplementedError(
                f"{type(optimizer).__name__} has other weights in evaluation, which it computes from its state: with "
                "sharded_optimizer only the owner of a weight has that. Take one without train() and eval()"
            )
        others = [weight.parameter for weight in _trained(engine, optimizer) if engine.rank not in weight.keepers]
        for parameter in others:
            parameter.grad = None
            optimizer.state.pop(parameter, None)  # made in its __init__, or loaded by other means than a checkpoint
        _share_afterwards(engine, optimizer, others)
        _under_way[optimizer] = begun_in


def _share_afterwards(engine: Engine, optimizer: Optimizer, others: Sequence[torch.Tensor]) -> None:
    versions, refused = list(map(_version, others)), False

    def after_step(*_: Any) -> None:
        nonlocal refused
        _under_way.pop(optimizer, None)
        refused |= versions != list(map(_version, others)) or any(optimizer.state.get(each) for each in others)
        # After a loss an elastic run may make an update with no other ranks to send to.
        engine.recovery.complete_update(functools.partial(_share, engine, optimizer, refused))
        # If a class's `step` calls its base's, torch calls this twice: after the inner step and after the outer one.
        # Weights are sent both times, as what comes between may read them, or change them in ways that no version
        # shows; in an elastic run after the outer one alone.
        versions[:] = map(_version, others)

    handle = optimizer.register_step_post_hook(torch.compiler.disable(after_step))
    # Hooks cannot go while they are called: the next step removes this one.
    _hooks.setdefault(optimizer, []).append(handle)
    # Before the hooks of users, who may look at the weights.
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)


@torch.no_grad()
def _share(engine: Engine, optimizer: Optimizer, refused: bool) -> None:
    """Give all holders the weights that the optimizer has changed at their owners. All ranks call this together."""
    context, trained = engine.context, _trained(engine, optimizer)
    equality = sum(weight.equality_term(context.rank, weight.ranks) for weight in trained) % MODULUS
    with engine.together(Call.SEND_UPDATES, [equality, int(refused)]) as facts_by_rank:
        if any(facts[1] for facts in facts_by_rank.values()):
            raise NotImplementedError(
                f"{type(optimizer).__name__} changes weights, or makes state for them, where they have no gradient: "
                "sharded_optimizer needs one that passes over them, such as torch.optim.AdamW"
            )
        if sum(facts[0] for facts in facts_by_rank.values()) % MODULUS:
            raise ValueError(
                "the optimizers of some ranks lack parameters that those of others have: with sharded_optimizer give "
                "each weight to the optimizers of all ranks that hold it, or of none"
            )
        with context.board.guard("sending updated weights", context.everyone):
            under_way = []
            for ranks, owner, parameters in _messages(trained):
                alone = len(parameters) == 1 and parameters[0].is_contiguous()
                flat = (
                    parameters[0].detach() if alone else torch.cat([parameter.reshape(-1) for parameter in parameters])
                )
                real = torch.view_as_real(flat) if flat.is_complex() else flat
                group = context.groups.reduction[ranks]
                work = group.broadcast(real, ranks.index(owner))
                under_way.append((work, group, owner, parameters, None if alone else flat))
            for work, group, owner, parameters, joined in under_way:
                wait_for_all(work, group, parameters[0].device, context.board.check)
                if context.rank == owner or joined is None:
                    torch.autograd.graph.increment_version(parameters)  # also where the optimizer has left one alone
                    continue
                pieces = joined.split([parameter.numel() for parameter in parameters])
                torch._foreach_copy_(parameters, [p.view(q.shape) for p, q in zip(pieces, parameters, strict=True)])


def _trained(engine: Engine, optimizer: Optimizer) -> list[HeldParameter]:
    """Those of an optimizer that have owners and whose gradients are summed, in an order all ranks share."""
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    held = {id(weight.parameter): weight for weight in engine.held if weight.owners and id(weight.parameter) in mine}
    return [held[id(parameter)] for bucket in engine.summed for parameter in bucket if id(parameter) in held]


def _messages(trained: Sequence[HeldParameter]) -> Iterator[tuple[tuple[int, ...], int, list[torch.Tensor]]]:
    """What is sent at once: to which holders, by whom, and what. Large ones go from where they are to where they will
    be, without a copy."""
    small: dict[tuple[tuple[int, ...], int, torch.dtype], list[torch.Tensor]] = {}
    for weight in trained:
        if len(weight.owners) == len(weight.ranks):
            continue
        if weight.parameter.nbytes >= SENT_ALONE:
            yield weight.ranks, weight.owners[0], [weight.parameter]
        else:
            small.setdefault((weight.ranks, weight.owners[0], weight.parameter.dtype), []).append(weight.parameter)
    for (ranks, owner, _), together in small.items():
        yield ranks, owner, together
