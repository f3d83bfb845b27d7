"""transformers' `num_parameters`, of the unsplit model."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from penstock.modeling.placeholders.ghosts import shown_whole
from penstock.modeling.weights.whole import packed_weights, whole_shape
from penstock.runtime.comm.rollcall import Call


def num_parameters_of_whole(model: Any, only_trainable: bool, exclude_embeddings: bool) -> int:
    """See `PipelineModel.num_parameters`. With `only_trainable` every rank calls it."""
    pipeline, left_out = model.pipeline, set[str]()
    if exclude_embeddings:
        left_out = {f"{name}.weight" for name, child in model.named_modules() if isinstance(child, nn.Embedding)}
    if only_trainable:
        index = pipeline.place.tensor_parallel_rank
        own = sum(
            one.parameter.numel()
            for one in pipeline.held
            if one.parameter.requires_grad and one.name not in left_out and one.counted_by(pipeline.rank, index)
        )
        with pipeline.together(Call.COUNT, [own]) as said:
            return sum(facts[0] for facts in said.values())
    with shown_whole(model):
        whole, packed = dict(model.named_parameters(remove_duplicate=False)), packed_weights(model)
    counted = [names[0] for names in pipeline.split.aliases if names[0] not in left_out]
    return sum(packed.get(name) or math.prod(whole_shape(model, name, whole[name])) for name in counted)
