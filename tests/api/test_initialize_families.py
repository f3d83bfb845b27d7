"""initialize() on every family, in real processes: the loss and every gradient are those of the unsplit model."""

from __future__ import annotations

from functools import cache

import pytest

from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import Step, assert_steps_equal, cut, train_family, unsplit_step, weigh

SAMPLES, SIZES = 4, (2, 1, 1)
# The router's balance loss is no mean over tokens: exact against the unsplit model accumulating over the microbatches.
ACCUMULATING = ("mixtral",)


@cache
def oracle(family: str) -> Step:
    kind = FAMILIES[family].kind
    inputs = batch(kind, SAMPLES)
    pieces = weigh(kind, cut(inputs, SIZES)) if family in ACCUMULATING else [(inputs, 1.0)]
    return unsplit_step(FAMILIES[family].build(), *pieces)


# Tied weights, of which three stages have some on several.
TIED = ("gpt2", "bert_mlm", "t5", "bart")


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_in_processes_give_the_unsplit_loss_and_gradients(pool: Pool, family: str) -> None:
    stages = 3 if family in (*TIED, "whisper") else 2 + sorted(FAMILIES).index(family) % 2
    inputs = batch(FAMILIES[family].kind, SAMPLES)
    ranks = pool.run(stages, train_family, family, stages, [inputs], num_microbatches=len(SIZES))
    assert_steps_equal([steps[0] for steps in ranks], oracle(family))
    if family in TIED:
        keys = FAMILIES[family].build().all_tied_weights_keys
        tied = {*keys, *keys.values()}
        assert sum(not tied.isdisjoint(steps[0].gradients) for steps in ranks) >= 2, "tied weights all on one stage"


def test_as_many_stages_as_units_train_exactly(pool: Pool) -> None:
    """The embeddings, each of two layers and the head on a rank of their own."""
    settings = {"num_hidden_layers": 2}
    inputs = batch("masked", SAMPLES)
    ranks = pool.run(4, train_family, "bert_mlm", 4, [inputs], settings)
    expected = unsplit_step(FAMILIES["bert_mlm"].build(**settings), (inputs, 1.0))
    assert_steps_equal([steps[0] for steps in ranks], expected)
