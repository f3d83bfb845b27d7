"""initialize() on every family, in real processes: the loss and every gradient are those of the unsplit model."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from families import FAMILIES, batch
from pool import Pool
from training import Step, assert_steps_equal, cut, train_family, unsplit_step, weigh

SAMPLES, SIZES = 4, (2, 1, 1)
# The router's balance loss is no mean over tokens: exact against the unsplit model accumulating over the microbatches.
ACCUMULATING = ("mixtral",)


@cache
def oracle(family: str) -> Step:
    kind = FAMILIES[family].kind
    inputs = batch(kind, SAMPLES)
    pieces = weigh(kind, cut(inputs, SIZES)) if family in ACCUMULATING else [(inputs, 1.0)]
    return unsplit_step(FAMILIES[family].build(), *pieces)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_in_processes_give_the_unsplit_loss_and_gradients(pool: Pool, family: str, stages: int) -> None:
    inputs = batch(FAMILIES[family].kind, SAMPLES)
    ranks = pool.run(stages, train_family, family, stages, [inputs], num_microbatches=len(SIZES))
    assert_steps_equal([steps[0] for steps in ranks], oracle(family))


@pytest.mark.parametrize("family", ["gpt2", "bert_mlm", "t5", "bart"])
def test_every_holder_of_a_tied_weight_has_its_whole_gradient(pool: Pool, family: str) -> None:
    model = FAMILIES[family].build()
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    ranks = pool.run(3, train_family, family, 3, [batch(FAMILIES[family].kind, SAMPLES)])
    holders = {rank: [name for name in steps[0].gradients if name in tied] for rank, steps in enumerate(ranks)}
    assert sum(map(bool, holders.values())) >= 2, "the family's tied weights all sit on one stage"
    for rank, names in holders.items():
        for name in names:
            found, expected = ranks[rank][0].gradients[name], oracle(family).gradients[name]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_a_model_on_one_rank_is_one_stage(pool: Pool) -> None:
    (steps,) = pool.run(1, train_family, "gpt2", 1, [batch("causal", SAMPLES)])
    assert_steps_equal(steps, oracle("gpt2"))


def test_as_many_stages_as_units_train_exactly(pool: Pool) -> None:
    """The embeddings, each of two layers and the head on a rank of their own."""
    settings = {"num_hidden_layers": 2}
    inputs = batch("masked", SAMPLES)
    ranks = pool.run(4, train_family, "bert_mlm", 4, [inputs], settings)
    expected = unsplit_step(FAMILIES["bert_mlm"].build(**settings), (inputs, 1.0))
    assert_steps_equal([steps[0] for steps in ranks], expected)
