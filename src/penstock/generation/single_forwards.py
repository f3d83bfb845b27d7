"""Single forwards over the stages of one rank: what each receives, computes and sends. `decoding` drives them.

Messages are asked for before they are taken, and forwards of other groups may go by meanwhile. What kind of messages a
forward has follows from its inputs, so that most of them need no header; see `Series`. A forward over prompts may be
run as several; see `Prefill`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from penstock.data.microbatch import microbatch_sizes, split_batch
from penstock.generation.series import ExpectedMessage, Series, series_over
from penstock.modeling.graph.plan import DataflowPlan
from penstock.modeling.placeholders.caches import decoder_part, layer_placeholder, past_length
from penstock.modeling.stage.outputs import merge_outputs
from penstock.modeling.stage.split import SplitModel
from penstock.random_state import mixed
from penstock.runtime.boundary.p2p import P2PChannels
from penstock.runtime.context import RankContext
from penstock.runtime.report import label


@dataclass
class Forward:
    """A forward that has begun, or a part of it with some of its samples. `key`, `family`: what decides what crosses
    the boundaries; see `Series`. `handed`: what a stage hands to the next one on this rank. `output`: the model's, in
    which only the values of the last stage are right; None until this rank's last stage has run."""

    plan: DataflowPlan
    inputs: Mapping[str, Any]
    key: Hashable
    family: Hashable | None
    caches: StageCaches | None
    seed: int | None
    incoming: dict[int, ExpectedMessage] = field(default_factory=dict)
    handed: Sequence[torch.Tensor] = ()
    output: Any = None

    def send(self, series: Series, tensors: Sequence[torch.Tensor]) -> None:
        """Send what crosses a boundary."""
        if tensors:
            series.give(tensors, self.key, self.family)


class SingleForwards:
    """Runs single forwards over the stages of one rank. `seed`: of the dropout of the last forward; None before the
    first one of a generation. `consecutive_stages`: this rank's stages, in lists of those that follow one another
    without another rank's in between."""

    def __init__(self, context: RankContext, split: SplitModel, channels: P2PChannels) -> None:
        self.seed: int | None = None
        self._split, self._channels, self._device = split, channels, context.device
        self._own_stages = stages = context.stages
        runs = groupby(enumerate(stages), lambda numbered: numbered[1] - numbered[0])
        self.consecutive_stages = [[stage for _, stage in run] for _, run in runs]
        last = context.pipeline.num_stages - 1
        # The series over the boundaries to other ranks, by the stage of this rank.
        self._from_previous, self._to_next = (
            {
                stage: series_over(self._channels, boundary, downstream, self._device)
                for stage, boundary, neighbour in (
                    (each, each - downstream, each + (-1 if downstream else 1)) for each in stages
                )
                if 0 <= neighbour <= last and neighbour not in stages
            }
            for downstream in (True, False)
        )
        for series in (*self._from_previous.values(), *self._to_next.values()):
            context.board.on_close(series.clear)

    def begin(self, plan: DataflowPlan, inputs: Mapping[str, Any]) -> Forward:
        """Begin a forward with these inputs: post receives for what this rank's only stage receives in it. What a later
        one of several receives is asked for after the one before it, so that forwards ask in the order of their turns.

        On an accelerator that is asked for only when the stage is to run: a receive that is posted holds up what is
        computed after it, and what it waits for may follow from that.
        """
        autocast = torch.is_autocast_enabled(self._device.type)
        family = _family(plan, inputs)
        key = (plan.digest, autocast, *_shapes(inputs))
        caches = StageCaches(plan, self._own_stages, inputs) if len(self._own_stages) > 1 else None
        begun = Forward(plan, inputs, key, family and (autocast, family), caches, self._next_seed(plan))
        if len(self._own_stages) == 1:
            self._ask_ahead(begun, self._own_stages[0])
        return begun

    def _ask_ahead(self, begun: Forward, stage: int) -> None:
        if self._channels.receives_ahead:
            self._ask(begun, stage)

    def _ask(self, begun: Forward, stage: int) -> None:
        """Ask for what a stage receives, unless that was done."""
        series, count = self._from_previous.get(stage), len(begun.plan.boundaries[stage - 1]) if stage else 0
        if series is not None and count and stage not in begun.incoming:
            begun.incoming[stage] = series.expect(count, begun.key, begun.family)

    def run(self, begun: Forward, stage: int, call: Callable[..., Any] | None) -> None:
        """Run the model's forward, or `call`, on one of this rank's stages, in their order."""
        plan, caches, to_next = begun.plan, begun.caches, self._to_next.get(stage)
        self._ask(begun, stage)
        expected, handed = begun.incoming.get(stage), begun.handed
        with label(f"F stage {stage}"):
            # Received when the forward first needs it, sent as soon as it is there; and the forward goes on to its end.
            receive = (lambda: handed) if expected is None else partial(self._from_previous[stage].take, expected)
            received = _PendingValues(len(plan.boundaries[stage - 1]) if stage else 0, receive)
            output = self._split.run_to_end(
                plan,
                stage,
                begun.inputs if caches is None else caches.inputs(stage),
                received,
                seed=begun.seed,
                early_exit=stage != self._own_stages[-1] and caches is not None and caches.given,
                call=call,
                hand_over=partial(setattr, begun, "handed") if to_next is None else partial(begun.send, to_next),
            )
            received.values()  # also what the forward had no use for
        if caches is not None:
            caches.take(stage, output)
        if stage == self._own_stages[-1]:
            begun.output = output
        else:
            self._ask_ahead(begun, self._own_stages[self._own_stages.index(stage) + 1])

    def _next_seed(self, plan: DataflowPlan) -> int | None:
        """Where random numbers are drawn: a seed of its own for each forward, so that all generators move alike."""
        if not self._split.draws(plan):
            return None
        self.seed = int(torch.randint(1 << 62, ())) if self.seed is None else mixed(self.seed, 1)
        return self.seed


class _PendingValues(Sequence[torch.Tensor]):
    """Values on their way: their number is known, they are waited for when the first one is asked for."""

    def __init__(self, count: int, receive: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._count = count
        self._receive: Callable[[], Sequence[torch.Tensor]] = receive
        self._values: Sequence[torch.Tensor] | None = None

    def values(self) -> Sequence[torch.Tensor]:
        if self._values is None:
            self._values = self._receive()
        return self._values

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self.values()[index]


def _shapes(inputs: Mapping[str, Any]) -> Iterator[Hashable]:
    """What decides the shapes at every boundary: those of the inputs, and the lengths of caches."""
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            yield name, value.shape, value.dtype
        elif isinstance(value, Cache):
            yield name, type(value), past_length(value), _limits(value)
        elif value is not None:
            yield (name, *((x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in pytree.tree_leaves(value)))


def _family(plan: DataflowPlan, inputs: Mapping[str, Any]) -> Hashable | None:
    """What forwards of one more token each have in common, whatever was cached before; None for other forwards."""
    cache = next((value for value in inputs.values() if isinstance(value, Cache)), None)
    new = next((inputs[name] for name in ("decoder_input_ids", "input_ids") if inputs.get(name) is not None), None)
    if cache is None or new is None or new.shape[1] != 1:
        return None
    total = past_length(cache) + 1

    def without_length(name: str, value: Any) -> Hashable:
        if isinstance(value, Cache):
            return name, type(value), _limits(value)
        return name, *(
            ((*x.shape[:1], *("length" if size == total else size for size in x.shape[1:])), x.dtype)
            if isinstance(x, torch.Tensor)
            else x
            for x in pytree.tree_leaves(value)
        )

    return (plan.digest, *(without_length(name, value) for name, value in inputs.items() if value is not None))


def _limits(cache: Cache) -> Hashable:
    """How long the layers of a static cache can become."""
    part = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return frozenset(getattr(layer, "max_cache_len", None) for layer in part.layers)


class StageCaches:
    """One cache of keys and values for a rank that holds several stages; the last stage's forward counts.

    Such a rank runs the model once for each of its stages, but every forward lengthens all layers of the cache: its own
    ones with keys and values, the others so that lengths are right. Of a cache among the inputs each forward is given a
    view in which only those layers are real that shall outlive it; without one each forward makes a cache of its own.
    Afterwards the layers of all stages are put together.
    """

    def __init__(self, plan: DataflowPlan, stages: Sequence[int], inputs: Mapping[str, Any]) -> None:
        self._inputs = inputs
        self._stages = stages
        self._name = next((name for name, value in inputs.items() if isinstance(value, Cache)), None)
        growths = [(call.output.cache, call.stage) for call in plan.calls if call.output.cache]
        self._owner = {layer: stage for growth, stage in growths for layer in growth.layers}
        # With those that have no keys and values, but a convolution's or a recurrence's state.
        self._owner_of_all = self._owner | {layer: stage for growth, stage in growths for layer in growth.state_layers}
        # All views are made before the first forward: a placeholder must have the cache's length before it.
        self._views = {} if self._name is None else {stage: self._view(inputs[self._name], stage) for stage in stages}
        # The caches that the forwards of earlier stages made, by their fields in the output.
        self._made: dict[int, dict[str, Cache]] = {}

    @property
    def given(self) -> bool:
        """Whether there is one among the inputs."""
        return self._name is not None

    def inputs(self, stage: int) -> Mapping[str, Any]:
        """The arguments for the forward of one stage."""
        return self._inputs if self._name is None else {**self._inputs, self._name: self._views[stage]}

    def take(self, stage: int, output: Any) -> None:
        """After a stage's forward: take its caches. After the last one: put the whole cache into that one's output."""
        last = stage == self._stages[-1]
        if self._name is None:
            fields = output.items() if isinstance(output, dict) else ()
            made = {name: value for name, value in fields if isinstance(value, Cache)}
            if not last:
                self._made[stage] = made
                return
            for earlier, theirs in self._made.items():
                for name, cache in made.items():
                    self._fill(cache, theirs[name], earlier)
        elif last:
            whole, complete = self._inputs[self._name], self._views[stage]
            for earlier in self._stages[:-1]:
                self._fill(complete, self._views[earlier], earlier)
            decoder_part(whole).layers = decoder_part(complete).layers
            for name in [name for name, value in output.items() if isinstance(value, Cache)]:
                output[name] = whole

    def _fill(self, cache: Cache, source: Cache, stage: int) -> None:
        """Put the layers of `stage` into `cache` as its forward left them."""
        for layer in (layer for layer, owner in self._owner_of_all.items() if owner == stage):
            decoder_part(cache).layers[layer] = decoder_part(source).layers[layer]
            if isinstance(cache, EncoderDecoderCache) and isinstance(source, EncoderDecoderCache):
                layers, theirs = cache.cross_attention_cache.layers, source.cross_attention_cache.layers
                layers += theirs[len(layers) :]
                if layer < len(theirs):
                    layers[layer] = theirs[layer]
                cache.is_updated[layer] = source.is_updated.get(layer, False)

    def _view(self, whole: Cache, stage: int) -> Cache:
        """A cache with the layers of `stage`, and placeholders for what other forwards lengthen."""
        if isinstance(whole, EncoderDecoderCache):
            # Of the cross-attention part a forward touches its own layers only.
            view = copy.copy(whole)
            view.self_attention_cache = self._view(whole.self_attention_cache, stage)
            return view
        last = stage == self._stages[-1]
        view = copy.copy(whole)
        view.layers = [
            layer if self._is_real(index, stage, last) else layer_placeholder(layer)
            for index, layer in enumerate(whole.layers)
        ]
        return view

    def _is_real(self, layer: int, stage: int, last: bool) -> bool:
        # A layer that no unit lengthens (linear attention) is touched by its owner only.
        owner = self._owner.get(layer, stage)
        return owner == stage or (last and owner not in self._stages)


MOST_PARTS = 4
LEAST_SAMPLES = 2
# Tensors that are simply one row for each sample.
INPUTS = frozenset(("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids"))
# Layers of a cache whose keys and values have one row for each sample, and nothing else that depends on the samples.
LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


class Prefill:
    """A forward over the prompts of a batch, as several forwards over some of its samples each.

    A stage can then hand on the first samples while it works on the next ones. Every part fills a cache of its own, and
    the batch's is put together of them. This is done only where nothing but the samples' own rows can matter: with the
    ordinary growing cache, still empty, and inputs that are known to have one row for each sample.
    """

    def __init__(self, inputs: Mapping[str, Any], name: str, batch_size: int, number: int) -> None:
        self._name, self._cache = name, inputs[name]
        self._sizes = microbatch_sizes(batch_size, number)
        self._caches = [_like(self._cache) for _ in self._sizes]
        parts = split_batch({key: value for key, value in inputs.items() if key != name}, batch_size, self._sizes)
        self.parts = [{**part, name: cache} for part, cache in zip(parts, self._caches, strict=True)]

    @classmethod
    def of(cls, inputs: Mapping[str, Any], least_tokens: int) -> Prefill | None:
        """A forward in parts of at least `least_tokens` tokens; None if it can or should only be run whole."""
        tokens = inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
        name = next((name for name, value in inputs.items() if isinstance(value, Cache)), None)
        if name is None or not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
            return None
        batch_size, length = tokens.shape[:2]
        number = min(MOST_PARTS, batch_size // LEAST_SAMPLES, batch_size * length // least_tokens)
        if number < 2 or not _is_empty(inputs[name]):
            return None
        for key, value in inputs.items():
            if isinstance(value, torch.Tensor):
                per_axis = key == "position_ids" and value.dim() != 2
                if key not in INPUTS or value.dim() < 2 or value.shape[0] != batch_size or per_axis:
                    return None
            elif key != name and not (value is None or isinstance(value, (bool, int, float, str))):
                return None
        return cls(inputs, name, batch_size, number)

    def joined(self, outputs: Sequence[Any]) -> Any:
        """One output of the parts', with logits of the last position alone and the batch's cache."""
        for output in outputs:
            if isinstance(logits := output.get("logits"), torch.Tensor) and logits.dim() == 3:
                output["logits"] = logits[:, -1:]
        cached = [name for name, value in outputs[0].items() if isinstance(value, Cache)]
        merged = merge_outputs(outputs, self._sizes)
        self._cache.layers = [_joined(layers) for layers in zip(*(each.layers for each in self._caches), strict=True)]
        for name in cached:
            merged[name] = self._cache
        return merged


def _is_empty(cache: Any) -> bool:
    """Whether it is an ordinary cache that is still empty."""
    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and all(type(layer) in LAYERS and not layer.is_initialized for layer in cache.layers)
    )


def _like(cache: Any) -> Any:
    """A new empty cache of the same kind."""
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    return made


def _joined(layers: Sequence[Any]) -> Any:
    """A layer with the samples of all `layers`, which are emptied."""
    first = layers[0]
    if first.is_initialized:
        for states in ("keys", "values"):
            joined = torch.cat([getattr(layer, states) for layer in layers])
            for layer in layers:
                setattr(layer, states, None)
            setattr(first, states, joined)
    return first
