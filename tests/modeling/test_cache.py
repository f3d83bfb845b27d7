"""Caches of keys and values: decoding over stages gives the logits of the unsplit model with its own cache."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, LinearAttentionAndFullAttentionLayer

from penstock.generation.single_forwards import StageCaches
from penstock.modeling.placeholders.caches import CacheGrowth
from tests.support.families import FAMILIES, batch
from tests.support.stage_driver import split, walk


@pytest.mark.parametrize(
    ("family", "static"),
    [("gpt2", False), ("llama", True), ("mistral", True), ("gemma3", False), ("gemma3", True), ("falcon", False),
     ("mixtral", False)],
)  # fmt: skip
@torch.no_grad()
def test_decoding_with_a_cache_gives_the_unsplit_logits(family: str, static: bool) -> None:
    model = FAMILIES[family].build(**({"output_router_logits": False} if family == "mixtral" else {})).eval()
    tokens = batch("causal")["input_ids"]
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0  # left-padded
    splits = split(model, 3)

    def cache() -> Any:
        return StaticCache(config=model.config, max_cache_len=16) if static else DynamicCache(config=model.config)

    caches = [cache() for _ in splits]
    expected_cache = cache()
    for start, end in ((0, 5), (5, 6), (6, 7), (7, 9)):
        step = {"input_ids": tokens[:, start:end], "attention_mask": mask[:, :end], "use_cache": True}
        expected = model(**step, past_key_values=expected_cache)
        output = walk(splits, [{**step, "past_key_values": own} for own in caches])
        torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=1e-10)
        for own in caches:
            assert int(own.get_seq_length()) == end == int(expected_cache.get_seq_length())
    if not static:
        # One number per token for each layer of another stage, instead of heads x dimensions of them.
        held = sum(layer.keys.numel() for own in caches for layer in own.layers)
        whole = sum(layer.keys.numel() for layer in expected_cache.layers)
        assert held == whole + 2 * sum(layer.keys[:, :1, :, :1].numel() for layer in expected_cache.layers)


@torch.no_grad()
def test_planning_leaves_a_filled_cache_as_it_is() -> None:
    model = FAMILIES["llama"].build().eval()
    (first, _) = split(model, 2)
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.ones(1, 4, dtype=torch.long), past_key_values=cache)
    before = copy.deepcopy(cache)
    first.plan({"input_ids": torch.ones(1, 1, dtype=torch.long), "past_key_values": cache, "use_cache": True})
    for layer, kept in zip(cache.layers, before.layers, strict=True):
        assert torch.equal(layer.keys, kept.keys) and torch.equal(layer.values, kept.values)


def test_the_stages_of_a_rank_share_the_states_of_all_layers() -> None:
    cache = Cache(layers=[LinearAttentionAndFullAttentionLayer() for _ in range(2)])
    for index in range(2):
        cache.update(torch.rand(1, 4, 3, 8), torch.rand(1, 4, 3, 8), index)
        cache.update_conv_state(torch.rand(1, 16, 4), index)
        cache.update_recurrent_state(torch.rand(1, 4, 8, 8), index)
    growths = [CacheGrowth((stage,), (stage,), (), 0, 1) for stage in (0, 1)]
    calls = [SimpleNamespace(stage=stage, output=SimpleNamespace(cache=growth)) for stage, growth in enumerate(growths)]
    plan: Any = SimpleNamespace(calls=calls)
    caches = StageCaches(plan, [0, 1], {"past_key_values": cache})
    for stage in (0, 1):
        own, other = (caches.inputs(stage)["past_key_values"].layers[index] for index in (stage, 1 - stage))
        real = cache.layers[1 - stage]
        assert own is cache.layers[stage]
        # Of a layer of the other stage only the length is kept: no copy of its states is made for each forward.
        assert other.keys.shape == other.values.shape == (1, 1, 3, 1)
        assert other.recurrent_states[0] is real.recurrent_states[0]
        assert other.conv_states[0] is real.conv_states[0]
        # What a walk notes there, the owner's walk does not see.
        other.has_previous_state[0] = False
        assert real.has_previous_state[0]
