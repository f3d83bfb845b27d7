"""With gradients disabled a call returns the unsplit model's output for the whole batch, on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput

import penstock
from penstock.modeling.stage.outputs import merge_outputs, shapes_of
from penstock.runtime import evaluation
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import EXACT, Batch, cut, kept_in_double, parallelize, rows, run_step, tokens_in_loss, weigh

Fields = dict[str, Any]


def build(family: str) -> Any:
    return FAMILIES[family].build().eval()


def fields_of(output: Any) -> Fields:
    """An output as a dictionary, with the name of its class, and without caches of keys and values."""
    fields = {name: value for name, value in output.items() if name != "past_key_values"}
    return {"class": type(output).__name__, **fields}


def evaluate(
    family: str, stages: int, batches: Sequence[Batch], extra: Mapping[str, Any], **options: Any
) -> list[Fields]:
    with kept_in_double():
        model = parallelize(build(family), stages, **options)
        model.set_attn_implementation("eager")
        assert not model.training
        with torch.no_grad():
            return [
                fields_of(model(**rows_of(inputs, model.data_parallel_rank, model.data_parallel_size), **extra))
                for inputs in batches
            ]


def without_labels(kind: str, labelled: Batch) -> Batch:
    """A batch's inputs alone. An encoder-decoder model then needs the decoder's own inputs."""
    inputs = {name: value for name, value in labelled.items() if name != "labels"}
    if kind in ("sequences", "speech"):
        inputs["decoder_input_ids"] = labelled["labels"].clamp(min=0)
    return inputs


def rows_of(inputs: Batch, replica: int, replicas: int) -> Batch:
    return rows(inputs, replica, replicas) if replicas > 1 else inputs


def unsplit(family: str, inputs: Batch, extra: Mapping[str, Any] | None = None) -> Fields:
    model = build(family)
    model.set_attn_implementation("eager")
    with torch.no_grad(), kept_in_double():
        return fields_of(model(**inputs, **(extra or {})))


def assert_same(found: Fields, expected: Fields) -> None:
    assert found.keys() == expected.keys()
    ours, theirs = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=EXACT)
        else:
            assert one == other


@pytest.mark.parametrize("family", ["gpt2", "gpt2_classification", "vit", "t5", "whisper"])
def test_every_rank_gets_the_unsplit_output(pool: Pool, family: str) -> None:
    """With labels and without, uneven batches, and one smaller than the number of microbatches."""
    kind = FAMILIES[family].kind
    labelled = [batch(kind, size, 5 + size, seed=size) for size in (5, 2)]
    batches = [*labelled, without_labels(kind, labelled[0])]
    found = pool.run(3, evaluate, family, 3, batches, {}, num_microbatches=3)
    for number, inputs in enumerate(batches):
        expected = unsplit(family, inputs)
        assert ("loss" in expected) == ("labels" in inputs)
        for outputs in found:
            assert_same(outputs[number], expected)


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_hidden_states_and_attentions_come_from_all_stages(pool: Pool, family: str) -> None:
    extra = {"output_hidden_states": True, "output_attentions": True}
    inputs = batch(FAMILIES[family].kind, 3)
    expected = unsplit(family, inputs, extra)
    assert sum(name.endswith(("hidden_states", "attentions")) for name in expected) >= 2
    for (output,) in pool.run(2, evaluate, family, 2, [inputs], extra):
        assert_same(output, expected)


def test_a_routers_loss_is_averaged_over_microbatches(pool: Pool) -> None:
    """It is no mean over tokens: the unsplit model evaluated microbatch by microbatch is the oracle."""
    inputs = batch("causal", 4)
    pieces = weigh("causal", cut(inputs, (2, 1, 1)))
    outputs = [(unsplit("mixtral", piece), share, len(piece["labels"]) / 4) for piece, share in pieces]
    for (found,) in pool.run(2, evaluate, "mixtral", 2, [inputs], {}, num_microbatches=3):
        torch.testing.assert_close(
            found["loss"], sum(out["loss"] * share for out, share, _ in outputs), rtol=0, atol=EXACT
        )
        balance = sum(out["aux_loss"] * weight for out, _, weight in outputs)
        torch.testing.assert_close(found["aux_loss"], balance, rtol=0, atol=EXACT)
        torch.testing.assert_close(found["logits"], unsplit("mixtral", inputs)["logits"], rtol=0, atol=EXACT)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-v"])
def test_every_schedule_evaluates(pool: Pool, schedule: str) -> None:
    inputs = batch("causal", 4)
    for (output,) in pool.run(2, evaluate, "gpt2", 2, [inputs], {}, schedule=schedule):
        assert_same(output, unsplit("gpt2", inputs))


def test_each_replica_evaluates_its_own_batch(pool: Pool) -> None:
    inputs = batch("causal", 6)
    found = pool.run(4, evaluate, "gpt2", 2, [inputs], {})
    for rank, (output,) in enumerate(found):
        assert_same(output, unsplit("gpt2", rows(inputs, rank // 2, 2)))


def train_and_evaluate() -> list[float]:
    """A loop that evaluates between steps, by each way to disable gradients."""
    losses = []
    with kept_in_double():
        model = parallelize(FAMILIES["gpt2"].build(), 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for number, context in enumerate((torch.no_grad, torch.inference_mode)):
            optimizer.zero_grad()
            run_step(model, batch("causal", 4, seed=number))
            optimizer.step()
            model.eval()
            with context():
                losses.append(model(**batch("causal", 3, 12, seed=9)).loss.item())
            model.train()
    return losses


def test_evaluation_between_training_steps_sees_the_updated_weights(pool: Pool) -> None:
    model = FAMILIES["gpt2"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    with kept_in_double():
        for number in range(2):
            optimizer.zero_grad()
            model(**batch("causal", 4, seed=number)).loss.backward()
            optimizer.step()
            with torch.no_grad():
                expected.append(model(**batch("causal", 3, 12, seed=9)).loss.item())
    assert expected[0] != pytest.approx(expected[1], rel=1e-4)
    for losses in pool.run(2, train_and_evaluate):
        assert losses == pytest.approx(expected, rel=EXACT)


def test_evaluation_weighs_microbatches_by_tokens() -> None:
    """What the exactness above rests on: the batch's microbatches do have unequal numbers of tokens."""
    counts = [tokens_in_loss("causal", part) for part in cut(batch("causal", 4), (2, 1, 1))]
    assert len(set(counts)) > 1 and counts[0] != 2 * counts[1]


def test_lists_with_an_entry_for_each_sample_or_image_are_joined_and_those_for_layers_are_not() -> None:
    def output(samples: int, images: int) -> BaseModelOutput:
        per_layer = tuple(torch.full((samples, 3), float(samples)) for _ in range(2))
        return BaseModelOutput(
            last_hidden_state=torch.zeros(samples, 2), hidden_states=per_layer,
            attentions=[torch.zeros(image + 1, 2) for image in range(images)],
        )  # fmt: skip

    def merged(sizes: list[int], images: list[int]) -> Any:
        parts = [output(size, number) for size, number in zip(sizes, images, strict=True)]
        return merge_outputs(parts, sizes, grown=lambda: shapes_of(output(sizes[0] + 1, images[0] + 1)))

    for sizes, images in (([3, 2], [4, 2]), ([2, 2], [2, 2])):  # of the second, the lengths alone do not tell
        found = merged(sizes, images)
        assert [tuple(layer.shape) for layer in found.hidden_states] == [(sum(sizes), 3)] * 2
        assert [len(rows) for rows in found.attentions] == [*range(1, images[0] + 1), *range(1, images[1] + 1)]


def ask_for_tuples() -> list[str]:
    model = parallelize(FAMILIES["gpt2"].build(), 2)
    messages = []
    for context in (torch.no_grad, torch.enable_grad):
        with context(), pytest.raises(ValueError) as caught:
            model(**batch("causal", 4), return_dict=False)
        messages.append(str(caught.value))
    with torch.no_grad():
        assert len(model(**batch("causal", 4)).to_tuple()) == 2
    return messages


def test_outputs_without_names_are_refused(pool: Pool) -> None:
    for messages in pool.run(2, ask_for_tuples):
        assert all("return_dict=False" in message for message in messages)


def evaluate_with_gradients_enabled() -> tuple[float, float]:
    model = parallelize(FAMILIES["gpt2"].build(), 2)
    inputs = batch("causal", 4)
    trained = sum(run_step(model, inputs))
    return trained, float(evaluation.evaluate(model.pipeline, inputs).loss)


def test_the_pipelines_own_evaluation_needs_no_context(pool: Pool) -> None:
    for trained, evaluated in pool.run(2, evaluate_with_gradients_enabled):
        assert trained == pytest.approx(evaluated, rel=1e-6)


class Turned(nn.Module):
    """Its output, and what crosses, are conjugates that torch has not computed yet."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Turn(number) for number in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Turn(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).conj()


def evaluate_conjugates(num_microbatches: int) -> torch.Tensor:
    given = torch.randn(4, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(9))
    options = {"pipeline_parallel_size": 2, "num_microbatches": num_microbatches}
    model = penstock.initialize(
        Turned(), options, criterion=lambda output, batch: output.abs().mean(), example_inputs={"x": given}
    )
    with torch.no_grad():
        return model(x=given).output.resolve_conj()


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_an_output_that_is_a_conjugate_view_comes_to_all_ranks(pool: Pool, num_microbatches: int) -> None:
    given = torch.randn(4, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(9))
    expected = Turned()(given).detach()
    for found in pool.run(2, evaluate_conjugates, num_microbatches):
        assert torch.allclose(found, expected, rtol=EXACT, atol=0)
