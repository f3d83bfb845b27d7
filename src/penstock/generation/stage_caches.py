"""One cache of keys and values for a rank that holds several stages.

Such a rank walks the model once for each of its stages, but every walk lengthens all layers of the cache: its own ones
with keys and values, the others so that lengths are right. So each walk is given a view in which only those layers are
real that shall outlive it; afterwards the views are put together again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.cache_utils import Cache, EncoderDecoderCache

from penstock.modeling.graph.plan import ForwardPlan
from penstock.modeling.placeholders.caches import decoder_part, layer_placeholder


class StageCaches:
    """Views of the cache among some inputs, one for each local stage; the last stage's walk is the one that counts.

    Args:
        inputs: arguments of the forward, of which at most one is a cache.
    """

    def __init__(self, plan: ForwardPlan, stages: Sequence[int], inputs: Mapping[str, Any]) -> None:
        self._inputs = inputs
        self._stages = stages
        self._name = next((name for name, value in inputs.items() if isinstance(value, Cache)), None)
        self._owner = {
            layer: call.stage for call in plan.calls if call.output.cache for layer in call.output.cache.layers
        }
        # All views are made before the first walk: a placeholder must have the cache's length before the forward.
        self._views = {} if self._name is None else {stage: self._view(inputs[self._name], stage) for stage in stages}

    def inputs(self, stage: int) -> Mapping[str, Any]:
        """The arguments for the walk of one stage."""
        return self._inputs if self._name is None else {**self._inputs, self._name: self._views[stage]}

    def merge(self, output: Any) -> None:
        """After all walks: complete the caller's cache, and put it into the last walk's output in place of the view."""
        made = [name for name, value in output.items() if isinstance(value, Cache)]
        if self._name is None:
            if made:
                raise NotImplementedError(
                    "its forward makes a cache itself, which the stages on one rank cannot share: pass "
                    "use_cache=False or a cache, or place one stage on each rank"
                )
            return
        whole = self._inputs[self._name]
        layers = decoder_part(self._views[self._stages[-1]]).layers
        for stage in self._stages[:-1]:
            walked = decoder_part(self._views[stage]).layers
            for layer, owner in self._owner.items():
                if owner == stage:
                    layers[layer] = walked[layer]
        decoder_part(whole).layers = layers
        for name in made:
            output[name] = whole

    def _view(self, whole: Cache, stage: int) -> Cache:
        """A cache with the layers of `stage`, and placeholders for what other walks lengthen."""
        if isinstance(whole, EncoderDecoderCache):
            # Of the cross-attention part a walk touches its own layers only.
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
