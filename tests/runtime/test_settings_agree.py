"""Settings and calls that differ between ranks: each rank gets an error that names what differs and where."""

from __future__ import annotations

import contextlib
import random
import re
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2LMHeadModel

from penstock.layout.layout import Layout
from penstock.layout.partition import partition
from penstock.modeling.graph import costs
from penstock.modeling.graph.units import list_units
from penstock.runtime import formation
from penstock.runtime.formation import digest_of
from penstock.schedule.registry import build
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import (
    EXACT,
    assert_same_gradients,
    gradients_of,
    kept_in_double,
    parallelize,
    rows,
    run_step,
    unsplit_step,
)

WORDS = {
    "autocast": ["autocast", r"rank 1 has torch\.bfloat16"],
    "eval": ["train or eval mode", "rank 1 has eval mode"],
    "unit": ["train or eval mode"],
    "scale": ["the loss scale", "rank 1 has 8"],
    "no_sync": [r"no_sync\(\)", "rank 1 has entered it"],
    "frozen": ["requires_grad=False", r"(ln_f|norm)\.weight", "rank 1 has frozen it"],
}


def steps_with(settings: Sequence[str], stages: int, tensor_parallel_size: int) -> list[dict[str, Any]]:
    """For each setting a step in which rank 1 alone has it, and then one in which no rank has."""
    model = parallelize(
        FAMILIES["llama"].build(vocab_size=98) if tensor_parallel_size > 1 else FAMILIES["gpt2"].build(),
        stages,
        num_microbatches=2,
        tensor_parallel_size=tensor_parallel_size,
    )
    inputs = rows(batch("causal", 8), model.data_parallel_rank, model.data_parallel_size)
    seen = []
    for what in settings:
        found: dict[str, Any] = {"what": what}
        with contextlib.ExitStack() as only_here:
            if dist.get_rank() == 1:
                if what == "autocast":
                    only_here.enter_context(torch.autocast("cpu", torch.bfloat16))
                elif what == "no_sync":
                    only_here.enter_context(model.no_sync())
                elif what == "eval":
                    model.eval()
                elif what == "unit":
                    model.get_submodule(model.pipeline.layout.units[1]).eval()
                elif what == "scale":
                    model.pipeline.loss_scale = 8.0
                elif what == "frozen":
                    for name, parameter in model.named_parameters():
                        if parameter.requires_grad and name.endswith(("ln_f.weight", "norm.weight")):
                            parameter.requires_grad = False
            try:
                run_step(model, inputs)
            except Exception as error:
                found["error"] = type(error).__name__, str(error)
        model.train()
        model.pipeline.loss_scale = 1.0
        for parameter in model.parameters():
            parameter.requires_grad = True
        found["losses"] = run_step(model, inputs)
        seen.append(found)
    return seen


@pytest.mark.parametrize(("ranks", "stages", "size"), [(2, 2, 1), (2, 1, 1), (2, 1, 2), (4, 2, 1)])
def test_a_setting_of_one_rank_is_an_error_on_all_and_leaves_the_pipeline_usable(
    pool: Pool, ranks: int, stages: int, size: int
) -> None:
    settings = ["autocast", "eval", "unit", "scale", "no_sync"] if ranks == 2 else []
    settings += ["frozen"] if ranks > stages else []  # what one rank alone has, it may freeze alone
    for rank in pool.run(ranks, steps_with, settings, stages, size):
        assert [found["what"] for found in rank] == settings
        for found in rank:
            kind, text = found["error"]
            assert kind == "SettingsMismatch", found
            assert all(re.search(word, text) for word in WORDS[found["what"]]), found
            assert len(found["losses"]) == 2, found


def freeze_a_whole_stage() -> dict[str, torch.Tensor | None]:
    """Frozen on the only rank that holds it: no difference between ranks."""
    model = parallelize(FAMILIES["llama"].build(), 2, num_microbatches=2)
    if dist.get_rank() == 0:
        model.get_input_embeddings().weight.requires_grad = False
    run_step(model, batch("causal", 4))
    return gradients_of(model)


def test_parameters_frozen_on_all_their_holders_are_no_difference(pool: Pool) -> None:
    first, second = pool.run(2, freeze_a_whole_stage)
    assert first["model.embed_tokens.weight"] is None
    assert any(value is not None for value in second.values())


def units_where_rank_1_estimates_otherwise() -> tuple[list[list[str]], list[float], dict[str, torch.Tensor | None]]:
    """Rank 1 takes the first units to be much dearer than rank 0 does."""
    estimate = costs.unit_costs

    def skewed(model: Any, units: Any, **options: Any) -> list[float]:
        costs = estimate(model, units, **options)
        return [cost * (50 if index < 2 else 1) for index, cost in enumerate(costs)]

    with kept_in_double(), mock.patch.object(costs, "unit_costs", skewed if dist.get_rank() else estimate):
        model = parallelize(FAMILIES["gpt2"].build(), 2, num_microbatches=2)
        losses = run_step(model, batch("causal", 4))
        return [list(stage) for stage in model.pipeline.layout.pipelines[0].stages], losses, gradients_of(model)


def test_all_ranks_balance_stages_by_the_costs_of_rank_0(pool: Pool) -> None:
    model, inputs = FAMILIES["gpt2"].build(), batch("causal", 4)
    units = list_units(model)
    first = partition(costs.unit_costs(model, units), [1.0, 1.0]).sizes[0]
    expected = unsplit_step(model, (inputs, 1.0))
    found = pool.run(2, units_where_rank_1_estimates_otherwise)
    for stages, losses, gradients in found:
        assert stages == [units[:first], units[first:]]
        assert sum(losses) == pytest.approx(sum(expected.losses), abs=EXACT)
        assert_same_gradients(gradients, expected.gradients)
    assert set().union(*(gradients for _, _, gradients in found)) == set(expected.gradients)


def form_another_layout(what: str) -> str:
    model, other = FAMILIES["gpt2"].build(), dist.get_rank() == 1
    units = list_units(model)
    first = 3 if other and what == "sizes" else 2
    if other and what == "units":
        units[:2] = units[1::-1]
    stages = [units[:first], units[first:]]
    layout = Layout.place([stages], [(1, 0) if other and what == "ranks" else (0, 1)])
    if other and what == "number":
        layout = Layout.place([[units], [units]])
    with pytest.raises(ValueError, match="different layouts") as caught:
        formation.parallelize(model, layout, partial(build, "1f1b", 2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("sizes", r"pipeline 0's split into units of each stage is \[2, \d\] on rank 0 and \[3, \d\] on rank 1"),
        ("number", r"given the same: the number of pipelines is 1 on rank 0 and 2 on rank 1"),
        ("units", r"unit 0 of pipeline 0 is 'transformer\.\S+' on rank 0 and 'transformer\.\S+' on rank 1"),
        ("ranks", r"pipeline 0's order of ranks that hold its stages is \(0, 1\) on rank 0 and \(1, 0\) on rank 1"),
    ],
)
def test_ranks_with_different_layouts_are_refused(pool: Pool, what: str, words: str) -> None:
    for text in pool.run(2, form_another_layout, what):
        assert re.search(words, text), text


def test_the_digest_of_what_must_be_alike_does_not_know_the_order_of_mappings() -> None:
    facts: dict[str, Any] = {"scaling": {"factor": 2.0, "type": "linear"}, "heads": {0, 1}}
    turned = {"heads": {1, 0}, "scaling": {"type": "linear", "factor": 2.0}}
    assert digest_of(facts) == digest_of(turned)
    assert digest_of(facts) != digest_of(facts | {"heads": {0, 2}})


class Detour(GPT2LMHeadModel):
    """Calls its head once more on rank 1."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if dist.get_rank():
            self.lm_head(torch.zeros(1, 1, self.config.n_embd))
        return output


def generate_with_a_detour(groups: int) -> list[str]:
    model: Any = parallelize(Detour(FAMILIES["gpt2"].build().config), 2)
    texts = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            model.generate(batch("causal", 4)["input_ids"], max_new_tokens=2, generation_groups=groups)
        texts.append(f"{type(caught.value).__name__}: {caught.value}")
    return texts


@pytest.mark.parametrize("groups", [1, 2])
def test_a_generation_that_goes_another_way_on_one_rank_is_refused(pool: Pool, groups: int) -> None:
    for texts in pool.run(2, generate_with_a_detour, groups):
        assert len(texts) == 2
        for text in texts:
            assert text.startswith("SettingsMismatch: the ranks of a pipeline followed the model's forward in")


class DropsLayers(nn.Module):
    """Leaves layers out, drawn from Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.probability = [0.0]  # no plain attribute, which would be followed anew

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if random.random() >= self.probability[0]:
                x = layer(x)
        return x.square().mean()


def drop_layers() -> str:
    model = parallelize(DropsLayers(), 2, num_microbatches=2)
    run_step(model, {"x": torch.ones(4, 4)})  # the plan, in which all ranks agree, has every layer
    dist.barrier()  # no rank begins the next step, and fails in it, before all have ended this one
    random.seed(5 * dist.get_rank())
    model.probability[0] = 0.5
    with pytest.raises(RuntimeError) as caught:
        run_step(model, {"x": torch.ones(4, 4)})
    return f"{type(caught.value).__name__}: {caught.value}"


def test_layers_left_out_on_one_rank_only_are_said_to_be(pool: Pool) -> None:
    for text in pool.run(2, drop_layers):
        assert "RuntimeError: The model took another path than it was planned for" in text
        assert "random numbers such as those that leave layers out" in text and "set that probability to 0" in text


def clip_one_by_one(single: bool) -> list[str]:
    model: Any = parallelize(FAMILIES["gpt2"].build(), 2, num_microbatches=2)
    run_step(model, batch("causal", 4))
    weights = [weight for weight in model.parameters() if weight.dim() == 1]
    chosen = [*weights[:3], weights[-1]]  # the last one is the other rank's
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for part in [[weight] for weight in chosen[:3]] if single else [chosen, [chosen[0], chosen[-1]]]:
            torch.nn.utils.clip_grad_norm_(part, 0.1)
    return [str(each.message) for each in caught]


def test_a_norm_of_another_single_weight_on_each_rank_is_warned_of(pool: Pool) -> None:
    for texts in pool.run(2, clip_one_by_one, True):
        assert len(texts) == 3
        assert all("a gradient norm was asked of a single parameter (transformer." in text for text in texts)
    assert pool.run(2, clip_one_by_one, False) == [[], []]


def clip_differently() -> str:
    model = parallelize(FAMILIES["gpt2"].build(), 2, num_microbatches=2)
    run_step(model, batch("causal", 4))
    with pytest.raises(RuntimeError) as caught:
        model.clip_grad_norm_(1.0 + dist.get_rank())
    return str(caught.value)


def test_norms_that_differ_are_refused(pool: Pool) -> None:
    for text in pool.run(2, clip_differently):
        assert "max_norm differs: rank 0 has 1, rank 1 has 2" in text


def form_with_a_maker_that_fails() -> None:
    model = FAMILIES["gpt2"].build()
    units = list_units(model)
    layout = Layout.place([[units[:2], units[2:]]], [(0, 1)])

    def fail(num_microbatches: int) -> Any:
        raise KeyError("no such schedule")

    meeting = mock.patch.object(formation, "Groups", side_effect=AssertionError("groups were made"))
    with meeting, pytest.raises(KeyError, match="no such schedule"):
        formation.parallelize(model, layout, fail)


def test_a_schedule_that_cannot_be_made_is_refused_before_groups_are(pool: Pool) -> None:
    pool.run(2, form_with_a_maker_that_fails)
