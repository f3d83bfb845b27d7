"""Microbatches of one batch for which unlike numbers of values cross a boundary, as where only some have pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from penstock.data.batch import MicrobatchedBatch
from tests.support.pool import Pool
from tests.support.training import (
    EXACT,
    Step,
    assert_same_gradients,
    gradients_of,
    kept_in_double,
    parallelize,
    run_step,
)

IMAGE, SAMPLES = 99, 4
# Which samples have a picture, in three steps in a row; each sample is a microbatch.
PICTURES = ([3], [], [0, 2])


def llava() -> Any:
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(**vision, image_size=8, patch_size=4, projection_dim=32),
            text_config=LlamaConfig(vocab_size=100, num_key_value_heads=4, **text),
            image_token_id=IMAGE,
        )
    ).double()


def described(pictures: Sequence[int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(pictures))
    ids = torch.randint(1, 90, (SAMPLES, 10), generator=generator)
    ids[list(pictures), 1:5] = IMAGE
    inputs = {"input_ids": ids, "labels": torch.where(ids == IMAGE, -100, ids)}
    if pictures:
        inputs["pixel_values"] = torch.randn(len(pictures), 3, 8, 8, generator=generator, dtype=torch.float64)
    return inputs


def run_llava(stages: int, schedule: str) -> list[tuple[float, Step]]:
    """On a worker: an evaluation and a step of each batch."""
    with kept_in_double():
        model = parallelize(llava(), stages, num_microbatches=SAMPLES, schedule=schedule)
        found = []
        for pictures in PICTURES:
            inputs = described(pictures)
            with torch.no_grad():
                evaluated = model(**inputs).loss.item()
            model.zero_grad()
            found.append((evaluated, Step(run_step(model, inputs), gradients_of(model))))
        return found


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (2, "zb-v"), (3, "zb-h1")])
def test_pictures_in_some_microbatches_only_are_exact(pool: Pool, ranks: int, schedule: str) -> None:
    model = llava()
    expected = []
    with kept_in_double():
        for pictures in PICTURES:
            model.zero_grad()
            loss = model(**described(pictures)).loss
            loss.backward()
            expected.append((loss.item(), gradients_of(model)))
    for steps in pool.run(ranks, run_llava, ranks, schedule):
        for (evaluated, found), (loss, gradients) in zip(steps, expected, strict=True):
            assert evaluated == pytest.approx(loss, abs=EXACT)
            assert sum(found.losses) == pytest.approx(loss, abs=EXACT)
            # Where no microbatch has a picture, none has a gradient for what looks at them.
            assert_same_gradients(found.gradients, {name: gradients[name] for name in found.gradients})


class Kept(nn.Module):
    """Keeps its first value beside the hidden one if it is asked to, or needs nothing of another stage at all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, how: str = "one") -> dict[str, torch.Tensor]:
        first = hidden = self.blocks[0](x)
        for block in self.blocks[1:]:
            hidden = block(x if how == "none" else hidden)
        loss = functional.mse_loss(hidden + first if how == "two" else hidden, x)
        return {"loss": loss, "hidden": hidden, **({"first": first} if how == "two" else {})}


class Sometimes(Kept):
    """Has a second mean in its loss where it is asked to."""

    def forward(self, x: torch.Tensor, how: str = "one", labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        output = super().forward(x)
        if how == "two":
            assert labels is not None
            output["loss"] = output["loss"] + functional.cross_entropy(output["hidden"], labels)
        return output


def refused_by_name() -> str:
    model: Any = parallelize(Sometimes().double(), 2)
    try:
        batches = [{**inputs, "labels": torch.tensor([1, -100])} for inputs in kept_batches()]
        run_step(model, MicrobatchedBatch(batches, 2 * len(HOW)))
    except NotImplementedError as error:
        return str(error)
    return "none"


def test_losses_made_of_unlike_means_are_refused_by_name(pool: Pool) -> None:
    for told in pool.run(2, refused_by_name):
        assert told.startswith("the loss of microbatch 1 is made of other means"), told


HOW = ("one", "two", "none", "two", "none", "one")


def kept_batches() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(2, 6, generator=generator, dtype=torch.float64), "how": how} for how in HOW]


def kept() -> nn.Module:
    torch.manual_seed(0)
    return Kept().double()


def run_kept(stages: int, schedule: str) -> tuple[Step, float, torch.Tensor]:
    model: Any = parallelize(kept(), stages, schedule=schedule)
    given = MicrobatchedBatch(kept_batches(), 2 * len(HOW))
    with torch.no_grad():
        evaluated = model(**given)
    return Step(run_step(model, given), gradients_of(model)), evaluated["loss"].item(), evaluated["first"]


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (2, "zb-v"), (4, "gpipe")])
def test_one_value_two_or_none_may_cross_a_boundary(pool: Pool, ranks: int, schedule: str) -> None:
    model = kept()
    outputs = [model(**inputs) for inputs in kept_batches()]
    loss = sum(output["loss"] for output in outputs) / len(HOW)
    loss.backward()
    gradients = gradients_of(model)
    first = torch.cat([output["first"] for output in outputs if "first" in output])
    for step, evaluated, found in pool.run(ranks, run_kept, ranks, schedule):
        assert evaluated == pytest.approx(loss.item(), abs=EXACT)
        assert sum(step.losses) == pytest.approx(loss.item(), abs=EXACT)
        assert_same_gradients(step.gradients, {name: gradients[name] for name in step.gradients})
        assert torch.allclose(found, first, atol=EXACT)
