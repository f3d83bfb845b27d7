"""Frozen parameters that several ranks hold: before and after initialize(), a tied weight under all its names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from penstock.runtime.comm.settings import SettingsMismatch
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import (
    Step,
    assert_steps_equal,
    gradients_of,
    kept_in_double,
    parallelize,
    rows,
    run_step,
    unsplit_step,
)


class LowRank(nn.Module):
    """A frozen layer with a trained detour of rank 2, as LoRA has it."""

    def __init__(self, layer: nn.Module, width: int):
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.linspace(-0.1, 0.1, width * 2, dtype=torch.float64).view(width, 2))
        self.up = nn.Parameter(torch.linspace(-0.2, 0.1, width * 2, dtype=torch.float64).view(2, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(hidden)
        return output + hidden @ self.down @ self.up


def build(what: str) -> Any:
    model: Any = FAMILIES["gpt2"].build()
    if what == "tied embedding":
        model.transformer.wte.weight.requires_grad = False
    elif what == "adapters":
        model.requires_grad_(False)
        for block in model.transformer.h:
            block.attn.c_proj = LowRank(block.attn.c_proj, model.config.n_embd)
    return model


def train_frozen(what: str, stages: int, schedule: str) -> tuple[list[Step], float, int]:
    """Two steps of a model that was frozen before it was split, the loss of an evaluation, and the bytes summed."""
    with kept_in_double():
        model = parallelize(build(what), stages, schedule=schedule)
        steps = []
        for seed in range(2):
            model.zero_grad()
            inputs = rows(batch("causal", 4, seed=seed), model.data_parallel_rank, model.data_parallel_size)
            steps.append(Step(run_step(model, inputs), gradients_of(model)))
        with torch.no_grad():
            loss = model(**batch("causal", 4)).loss.item()
        return steps, loss, model.pipeline.last_step.reduction.num_bytes if model.pipeline.last_step.reduction else 0


@pytest.mark.parametrize(
    ("what", "ranks", "stages", "schedule"),
    [
        ("tied embedding", 2, 2, "1f1b"),
        ("tied embedding", 2, 1, "1f1b"),
        ("adapters", 4, 2, "zb-h1"),
    ],
)
def test_what_is_frozen_before_the_split_stays_frozen(
    pool: Pool, what: str, ranks: int, stages: int, schedule: str
) -> None:
    found = pool.run(ranks, train_frozen, what, stages, schedule)
    model = build(what)
    for seed in range(2):
        expected = unsplit_step(model, (batch("causal", 4, seed=seed), 1.0))
        assert_steps_equal([steps[seed] for steps, _, _ in found], expected, replicas=ranks // stages)
    with torch.no_grad(), kept_in_double():
        evaluated = model(**batch("causal", 4)).loss.item()
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    for _, loss, _ in found:
        assert loss == pytest.approx(evaluated, rel=1e-10)
    if ranks > stages:  # each pipeline sums what is trained, and nothing else
        assert sum(summed for _, _, summed in found[:stages]) == 8 * trainable


def set_trainable(model: nn.Module, names: Sequence[str], flag: bool) -> None:
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(flag)


TIED = ["transformer.wte.weight", "lm_head.weight"]


def train_renaming(stages: int) -> tuple[list[str], list[Step]]:
    """A tied weight is frozen under one of its names, which is refused, and under all of them; and trained again."""
    with kept_in_double():
        model = parallelize(build("nothing"), stages)
        refusals, steps = [], []
        for seed, flag in enumerate((False, True)):
            inputs = rows(batch("causal", 4, seed=seed), model.data_parallel_rank, model.data_parallel_size)
            set_trainable(model, TIED[seed : seed + 1], flag)
            with pytest.raises(SettingsMismatch) as caught:
                run_step(model, inputs)
            refusals.append(str(caught.value))
            set_trainable(model, TIED, flag)
            model.zero_grad()
            steps.append(Step(run_step(model, inputs), gradients_of(model)))
        return refusals, steps


def test_a_tied_weight_is_frozen_under_all_its_names_or_refused_by_them(pool: Pool) -> None:
    found = pool.run(4, train_renaming, 2)
    model: Any = build("nothing")
    for seed, flag in enumerate((False, True)):
        model.lm_head.weight.requires_grad_(flag)
        expected = unsplit_step(model, (batch("causal", 4, seed=seed), 1.0))
        assert_steps_equal([steps[seed] for _, steps in found], expected, replicas=2)
    assert len({tuple(refusals) for refusals, _ in found}) == 1, "all ranks raise the same"
    for text in found[0][0]:
        assert "transformer.wte.weight: rank" in text and "frozen it" in text
        assert "transformer.wte.weight on rank 0, lm_head.weight on rank 1" in text


def accumulate(stages: int) -> dict[str, torch.Tensor | None]:
    """Gradients add up over steps: without a sum, with one after freezing, and with one after unfreezing."""
    with kept_in_double():
        model = parallelize(build("nothing"), stages)
        for seed in range(4):
            for parameter in model.get_submodule("transformer.h.1").parameters():
                parameter.requires_grad = seed not in (1, 2)
            inputs = rows(batch("causal", 4, seed=seed), model.data_parallel_rank, model.data_parallel_size)
            if seed == 0:
                with model.no_sync():
                    run_step(model, inputs)
            else:
                run_step(model, inputs)
        return gradients_of(model)


def test_gradients_that_a_frozen_parameter_has_already_are_summed_once(pool: Pool) -> None:
    expected: dict[str, Any] = {}
    for seed in range(4):
        model: Any = build("nothing")
        if seed in (1, 2):
            model.transformer.h[1].requires_grad_(False)
        for name, gradient in unsplit_step(model, (batch("causal", 4, seed=seed), 1.0)).gradients.items():
            expected[name] = expected.get(name, 0) + (0 if gradient is None else gradient)
    for gradients in pool.run(2, accumulate, 1):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-10)
