"""What attaches context parallelism to an engine.

It cuts microbatches, lets attention see whole sequences, and joins outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from penstock.context_parallel.attention import KNOWN_ATTENTION, Exchange, computing, connect
from penstock.context_parallel.sequence import SHIFTED, AttentionWay, SequencePart, cut_inputs, length_of
from penstock.layout.layout import Layout
from penstock.modeling.graph.loss import NUM_ITEMS, Criterion, CriterionError, LossRule
from penstock.modeling.libraries import configuration_of
from penstock.modeling.stage.outputs import form_of, output_of
from penstock.modeling.stage.split import SplitModel
from penstock.runtime.context import RankContext
from penstock.runtime.options import SharesSequences

# Tokens of a sequence by which the loss is followed.
FEW = 8


def refuse_model(model: nn.Module) -> None:
    """Raise NotImplementedError for a model that is not of transformers, or whose attention takes no mask of a part, as
    its configuration tells; see `try_parts`."""
    if not isinstance(model, PreTrainedModel):
        raise NotImplementedError(
            f"context_parallel_size needs a model of transformers, and {type(model).__name__} is none: leave it out"
        )
    for name, module in model.named_modules():
        kind = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if kind not in (None, *KNOWN_ATTENTION):
            raise NotImplementedError(
                f"context_parallel_size with attn_implementation {kind!r} ({name or type(model).__name__}), which "
                f"takes no mask of a part: give the model one of {', '.join(map(repr, KNOWN_ATTENTION))}"
            )


def sharing_of(layout: Layout) -> SharesSequences | None:
    """What shares out sequences in a layout; None where each pipeline computes whole ones."""
    return ContextParallel if layout.context_parallel_size > 1 else None


# Position ids, (samples or 1, length), of a mask of whole sequences, if there is one, and their length.
Positions = Callable[[torch.Tensor | None, int], torch.Tensor]


def counted(attention_mask: torch.Tensor | None, length: int) -> torch.Tensor:
    """Position ids that count all tokens."""
    return torch.arange(length, device=None if attention_mask is None else attention_mask.device)[None]


def counted_by_mask(attention_mask: torch.Tensor | None, length: int) -> torch.Tensor:
    """Position ids that count the tokens of a mask, and are -1 for others."""
    if attention_mask is None:
        return counted(None, length)
    mask = attention_mask.to(torch.int64)
    return mask.cumsum(1) * mask - 1


# What a model may take as position ids where it is given none.
USUAL_POSITIONS = (counted, counted_by_mask)


class ContextParallel:
    """One rank's part of each sequence: `SequenceParts` of an engine.

    Attributes:
        positions: what the model takes as position ids where it is given none.
        way: which way attention goes.
    """

    def __init__(
        self,
        split: SplitModel,
        context: RankContext,
        *,
        way: AttentionWay = AttentionWay.BY_HEADS,
        positions: Positions = counted,
    ) -> None:
        assert context.groups.context_parallel is not None
        self.way, self.positions = way, positions
        self.exchange = Exchange(context.groups.context_parallel, context.device, context.board)
        self._split, self._num_shards = split, context.layout.tensor_parallel_size
        configs = (configuration_of(module) for module in split.model.modules())
        self._configs = [*{id(config): config for config in configs}.values()]
        self.takes_positions = "position_ids" in inspect.signature(split.model.forward).parameters
        split.computing = self._computing
        connect(split.model, self.exchange)

    def as_tried(self) -> SharesSequences:
        """Makes parts that go the same way and count the same positions, for the same model in another formation, or
        for a copy of it."""
        return partial(ContextParallel, way=self.way, positions=self.positions)

    def _computing(self, inputs: Mapping[str, Any]) -> AbstractContextManager[None]:
        return computing(inputs) if isinstance(inputs, SequencePart) else nullcontext()

    def cut(
        self, microbatches: Sequence[Mapping[str, Any]], criterion: Criterion | None
    ) -> Sequence[Mapping[str, Any]]:
        """This rank's part of each microbatch."""
        return [self._part_of(microbatch, criterion) for microbatch in microbatches]

    def _part_of(self, inputs: Mapping[str, Any], criterion: Criterion | None) -> SequencePart:
        asked = inputs.get("output_attentions")
        if asked or (asked is None and any(getattr(config, "output_attentions", False) for config in self._configs)):
            raise NotImplementedError(
                "under context_parallel_size no rank has the attentions of whole sequences; leave out output_attentions"
            )
        length = length_of(inputs)
        mean = self._mean_of(_first_tokens(inputs, length), criterion)
        positions = self.positions(inputs.get("attention_mask"), length) if self.takes_positions else None
        part = cut_inputs(
            inputs,
            self.exchange.index,
            self.exchange.size,
            compared=() if mean is None else mean.terms,
            positions=positions,
        )
        part.way, part.num_shares = self.way, self.exchange.size * self._num_shards
        _refuse_loss(self._mean_of(part, criterion))
        return part

    def _mean_of(self, inputs: Mapping[str, Any], criterion: Criterion | None) -> LossRule | None:
        """The rule of the loss as a mean, which tells what it compares with labels; of a sum this is not seen."""
        if NUM_ITEMS not in inputs:
            return self._split.plan(inputs, criterion=criterion).loss
        kept = {name: value for name, value in inputs.items() if name != NUM_ITEMS}
        if isinstance(inputs, SequencePart):
            kept = inputs.with_inputs(kept)
        try:
            return self._split.plan(kept, criterion=criterion).loss
        except CriterionError as error:
            raise NotImplementedError(
                f"context_parallel_size needs a criterion that takes a mean where it is given no {NUM_ITEMS}: {error}"
            ) from error

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sums over the parts."""
        return self.exchange.sums(torch.tensor(values, dtype=torch.float64)).tolist() if values else []

    def join(self, output: Any, part: Mapping[str, Any], whole: Mapping[str, Any], losses: Collection[str]) -> Any:
        """The output for whole sequences: losses are added up, and what has a row for each token is gathered."""
        assert isinstance(part, SequencePart)
        cut, shapes = part.cut, None
        fields: dict[str, Any] = {}
        for name, value in output.items():
            leaves, structure = pytree.tree_flatten(value)
            for place, leaf in enumerate(leaves):
                if not isinstance(leaf, torch.Tensor):
                    continue
                if name in losses:
                    leaves[place] = self.exchange.sums(leaf.double()).to(leaf.dtype)
                    continue
                shapes = shapes or self._split.output_shapes(whole)
                target = pytree.tree_leaves(shapes[name], is_leaf=_is_shape)[place]
                rows = leaf
                if leaf.dim() == len(target) and leaf.shape[1:] == target[1:] and leaf.shape[0] != target[0]:
                    rows = leaf.unflatten(0, (-1, cut.tokens))  # the tokens of all samples one after another
                    target = (rows.shape[0], cut.length, *target[1:])
                dim = next((dim for dim, size in enumerate(target) if size != rows.shape[dim]), None)
                if dim is not None:
                    joined = cut.join(self.exchange.gather(rows.contiguous()), dim)
                    leaves[place] = joined if rows is leaf else joined.flatten(0, 1)
            fields[name] = pytree.tree_unflatten(leaves, structure)
        return output_of(form_of(output) or type(output), fields)


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(size, int) for size in node)


def _first_tokens(inputs: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The inputs of a few tokens of each sequence: enough to see how the loss compares them with labels."""
    return {
        name: value[:, :FEW]
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length
        else value
        for name, value in inputs.items()
    }


def _refuse_loss(rule: LossRule | None) -> None:
    """Raise NotImplementedError for a loss that is not the sum of what its parts give."""
    if rule is None:
        return
    if not rule.exact or rule.rest is not None:
        raise NotImplementedError(
            "context_parallel_size needs a loss that is a mean or a sum over tokens, but this one is more "
            f"({rule.reason or 'another term is added'}): leave the rest out, such as output_router_logits"
        )
    for term in rule.terms:
        if term.kind != "tokens" or term.start or term.stop is not None:
            raise NotImplementedError(
                f"context_parallel_size needs a loss over tokens that takes {SHIFTED}, as those of transformers' "
                f"causal language models do, as a mean, but this one is over {term.kind} of {term.input or 'the batch'}"
                ": train it with such a loss, or leave context_parallel_size out"
            )
