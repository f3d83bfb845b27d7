"""Whether a model computes the same of a sequence's parts as of the whole: tried, on a few tokens, before it trains.

What a layer mixes of a sequence by other means than attention through transformers' registry (a convolution, a
recurrence, biases by distance) then differs, and so do positions that a model does not take from its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from penstock.context_parallel.apply import USUAL_POSITIONS, ContextParallel
from penstock.context_parallel.sequence import Cut, SequencePart
from penstock.modeling.graph.attributes import Attributes
from penstock.modeling.libraries import configuration_of
from penstock.modeling.placeholders.ghosts import shown_whole
from penstock.runtime.comm.exchange import Ranks
from penstock.runtime.engine import Engine
from penstock.runtime.evaluation import evaluate

# Tokens in each of a part's two pieces.
PIECE = 6


@torch.no_grad()
def try_parts(engine: Engine) -> None:
    """Find which way attention goes and which positions the model takes, by running a few tokens whole and in parts;
    refuse a model for which none is right. What is found holds for later formations of the engine, and for copies of
    its model. All ranks call this together.

    Raises:
        NotImplementedError: on every rank, naming the first unit that differs, or saying why nothing can be cut.
    """
    sequences, model = engine.parts.sequences, engine.split.model
    assert isinstance(sequences, ContextParallel)
    cut = Cut(2 * sequences.exchange.size * PIECE - 1, sequences.exchange.index, sequences.exchange.size)
    vocabulary = int(getattr(configuration_of(model), "vocab_size", 0) or 2)
    ids = (torch.arange(2 * cut.length, device=engine.device).view(2, -1) * 5 + 3) % min(vocabulary, 97)
    mask = torch.ones_like(ids)
    mask[1, : PIECE // 2] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    firsts = []
    with _in_evaluation_mode(model), _tables_as_they_were(model):
        guessed = engine.split.guessed
        try:
            engine.split.plan(inputs)
            before = set(guessed)
            (part,) = sequences.cut([inputs], None)
            assert isinstance(part, SequencePart)
            engine.split.output_shapes(part)  # traces it anew
            sequences.way = part.way
        except NotImplementedError as error:
            raise NotImplementedError(
                f"context_parallel_size: a part of a sequence of tokens alone: {error}"
            ) from error
        if unlike := next((unit for unit in guessed if unit not in before), None):
            raise _refusal(engine, unlike, f" ({guessed[unlike]})")
        expected = _outputs_of_units(engine, lambda: evaluate(engine, inputs, in_parts=False))
        for positions in USUAL_POSITIONS:
            sequences.positions = positions
            outputs = _outputs_of_units(engine, lambda: evaluate(engine, inputs))
            firsts.append(_first_of_all(engine, _first_different(engine, expected, outputs, cut)))
            if firsts[-1] is None:
                break
        else:
            raise _refusal(engine, engine.layout.units[max(first for first in firsts if first is not None)])
    engine.num_evaluations = 0
    engine.options = replace(engine.options, share_sequences=sequences.as_tried())  # for a copy of the model, too


def _refusal(engine: Engine, unit: str, why: str = "") -> NotImplementedError:
    return NotImplementedError(
        f"context_parallel_size: {unit} of {type(engine.split.model).__name__} gives other results for a part of a "
        f"sequence than for the whole{why}, so it mixes tokens, or knows their places, by other means than attention "
        "through transformers' registry and position_ids"
    )


def _first_of_all(engine: Engine, mine: int | None) -> int | None:
    """The first of the units that the ranks have found."""
    ranks = Ranks(engine.context.groups.world_control, engine.board.guard)
    every = ranks.exchange(mine, "comparing parts of sequences with the whole")
    return min((index for index in every if index is not None), default=None)


@contextmanager
def _tables_as_they_were(model: torch.nn.Module) -> Iterator[None]:
    """Afterwards, tables of positions that grow with the longest sequence (dynamic RoPE) do not know of those tried, if
    they are in modules without weights."""
    with shown_whole(model):
        tables = {name: each for name, each in model.named_modules() if next(each.parameters(), None) is None}
    attributes = Attributes(tables)
    try:
        yield
    finally:
        attributes.set_back()


@contextmanager
def _in_evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    for module in modes:
        # In evaluation bitsandbytes may pack a weight anew on a CPU, for good, and then rounds more.
        module.training = any(not parameter.is_floating_point() for parameter in module.parameters(recurse=False))
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _outputs_of_units(engine: Engine, run: Callable[[], Any]) -> dict[str, list[torch.Tensor]]:
    """What each unit of this rank's stages returns, one call after the other: the first tensor that has tokens."""
    outputs: dict[str, list[torch.Tensor]] = {}
    hooks = []
    for stage in engine.context.stages:
        for unit in engine.split.stages[stage]:
            kept = outputs.setdefault(unit, [])

            def keep(_: Any, __: Any, output: Any, kept: list[torch.Tensor] = kept) -> None:
                tensors = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
                kept += [tensor for tensor in tensors if tensor.dim() > 1 and tensor.is_floating_point()][:1]

            hooks.append(engine.split.model.get_submodule(unit).register_forward_hook(keep))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _first_different(
    engine: Engine, whole: dict[str, list[torch.Tensor]], parts: dict[str, list[torch.Tensor]], cut: Cut
) -> int | None:
    """The index, among all units, of the first one here that returns something else for a part."""
    for index, unit in enumerate(engine.layout.units):
        if unit not in whole:
            continue
        if len(whole[unit]) != len(parts[unit]):
            return index
        for one, part in zip(whole[unit], parts[unit], strict=True):
            if one.shape[1] != cut.length:
                if one.shape != part.shape or not torch.equal(one, part):
                    return index
                continue
            here = cut.positions(part.device) < cut.length  # others were filled in
            expected = cut.take(one, 1)[:, here].double()
            tolerance = torch.finfo(one.dtype).eps ** 0.5
            scale = float(expected.nan_to_num().abs().max())
            if not torch.allclose(part[:, here].double(), expected, tolerance, tolerance * scale, equal_nan=True):
                return index
    return None
