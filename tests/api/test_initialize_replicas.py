"""Ranks beyond one pipeline are replicas: gradients are the unsplit model's on all replicas' batches together."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import penstock
from penstock.data.loader import HeterogeneousDataLoader
from penstock.runtime.formation import PIECE_BYTES, copy_from_first_holders
from penstock.runtime.gradients.holders import HeldParameter
from tests.support.families import FAMILIES, batch, gpt2
from tests.support.pool import Pool
from tests.support.training import (
    EXACT,
    Batch,
    Step,
    assert_same_gradients,
    assert_steps_equal,
    gradients_of,
    kept_in_double,
    parallelize,
    run_step,
    train_family,
    unsplit_step,
    weigh,
)

STAGES, REPLICAS = 2, 2
WORLD = STAGES * REPLICAS


def unsplit(*batches: Batch, family: str = "gpt2") -> Step:
    """The oracle for one step on several replicas' batches: their mean over all tokens."""
    return unsplit_step(FAMILIES[family].build(), *weigh(FAMILIES[family].kind, batches))


# ---------------------------------------------------------------- on the workers


def train_on_own_batches(replicas: Sequence[Sequence[Batch]], waiting: int = 0, zero: bool = True) -> list[Step]:
    """A step on each of this replica's batches, of which the first `waiting` only accumulate."""
    with kept_in_double():
        model = parallelize(gpt2(), STAGES)
        steps = []
        for number, inputs in enumerate(replicas[model.data_parallel_rank]):
            if zero:
                model.zero_grad()
            if number < waiting:
                with model.no_sync():
                    losses = run_step(model, inputs)
            else:
                losses = run_step(model, inputs)
            steps.append(Step(losses, gradients_of(model)))
        return steps


def storages_of(model: torch.nn.Module) -> dict[int, int]:
    """Bytes of every storage of this process that is more than a shape."""
    gc.collect()
    tensors = [tensor for tensor in gc.get_objects() if isinstance(tensor, torch.Tensor)]
    tensors += [one.grad for one in model.parameters() if one.grad is not None]
    real = [one.untyped_storage() for one in tensors if not one.is_meta]
    return {one._cdata: one.nbytes() for one in real}


def held_in_a_step(sharded: bool) -> tuple[float, float]:
    """Bytes of this rank's weights, and the most that a step holds besides after a backward."""
    model: Any = parallelize(gpt2(n_embd=256, n_head=2), 1, sharded_optimizer=sharded)
    weights, before, most = sum(parameter.nbytes for parameter in model.parameters()), storages_of(model), 0
    for _ in range(2):
        model.zero_grad()
        for out in model(**batch("causal", 2)):
            out.loss.backward()
            most = max(most, sum(size for key, size in storages_of(model).items() if key not in before))
    return float(weights), float(most)


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def samples_of(size: int) -> list[dict[str, torch.Tensor]]:
    whole = batch("causal", size)
    return [{name: value[row] for name, value in whole.items()} for row in range(size)]


def train_with_loader(kind: str, num_samples: int, batch_size: int) -> list[tuple[dict[str, Any], Step]]:
    """An epoch, each replica reading its own batches; returns each batch as one dict of tensors, and its step."""
    dataset = samples_of(num_samples)
    with kept_in_double():
        model = parallelize(gpt2(), STAGES)
        rank, size = model.data_parallel_rank, model.data_parallel_size
        if kind == "sampler":
            sampler = DistributedSampler(dataset, num_replicas=size, rank=rank, shuffle=True, seed=3)
            loader: Any = DataLoader(dataset, batch_size=batch_size, sampler=sampler, collate_fn=collate)
        elif kind == "prepared":
            loader = model.prepare_dataloader(dataset, batch_size, shuffle=True, seed=3, collate_fn=collate)
        else:  # unequal shares: three microbatches to the first replica for each one to the second
            loader = HeterogeneousDataLoader(dataset, [3, 1], batch_size, rank, shuffle=True, collate_fn=collate)
        found = []
        for inputs in loader:
            model.zero_grad()
            losses = run_step(model, inputs)
            parts = getattr(inputs, "microbatches", [inputs])
            rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}
            found.append((rows, Step(losses, gradients_of(model))))
        return found


def start_from_other_weights() -> dict[str, torch.Tensor]:
    model = gpt2()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.distributed.get_rank())
    return dict(parallelize(model, STAGES).named_parameters(remove_duplicate=False))


# ---------------------------------------------------------------- the claims


@pytest.mark.parametrize(("family", "stages"), [("gpt2", 1), ("t5", 2), ("bert_classification", 2)])
def test_replicas_give_the_gradients_of_the_whole_batch(pool: Pool, family: str, stages: int) -> None:
    inputs = batch(FAMILIES[family].kind, 8)
    found = pool.run(WORLD, train_family, family, stages, [inputs])
    expected = unsplit_step(FAMILIES[family].build(), (inputs, 1.0))
    assert_steps_equal([steps[0] for steps in found], expected, replicas=WORLD // stages)


def test_replicas_with_unequal_token_counts_are_weighed_by_tokens(pool: Pool) -> None:
    """Averaging the replicas would be wrong here: one has seven times the other's tokens."""
    large, small = batch("causal", 5, 17, seed=1), batch("causal", 3, 5, seed=2)
    found = pool.run(WORLD, train_on_own_batches, [[large], [small]])
    assert_steps_equal([steps[0] for steps in found], unsplit(large, small), replicas=REPLICAS)


def test_steps_without_synchronisation_only_accumulate(pool: Pool) -> None:
    """Each step is its own mean over the replicas' tokens; the one outside no_sync() brings the sum of all."""
    batches = [[batch("causal", 4, 9, seed=10 * replica + step) for step in range(3)] for replica in range(REPLICAS)]
    found = pool.run(WORLD, train_on_own_batches, batches, waiting=2, zero=False)
    expected = summed([unsplit(*pair) for pair in zip(*batches, strict=True)])
    for steps in found:
        assert_same_gradients(steps[2].gradients, expected)
    # Before, each rank had its own replica's part: together the sum, alone not.
    first = unsplit(*(replica[0] for replica in batches)).gradients
    name = "transformer.ln_f.weight"
    parts = [steps[0].gradients[name] for steps in found if name in steps[0].gradients]
    assert len(parts) == REPLICAS and not torch.allclose(parts[0], first[name], atol=1e-4)
    torch.testing.assert_close(sum(parts), first[name], rtol=0, atol=EXACT)


def test_accumulating_over_synchronised_steps_counts_every_gradient_once(pool: Pool) -> None:
    batches = [[batch("causal", 4, 9, seed=10 * replica + step) for step in range(3)] for replica in range(REPLICAS)]
    found = pool.run(WORLD, train_on_own_batches, batches, waiting=0, zero=False)
    expected = [unsplit(*pair) for pair in zip(*batches, strict=True)]
    for step in range(3):
        for steps in found:
            assert_same_gradients(steps[step].gradients, summed(expected[: step + 1]))


def summed(steps: Sequence[Step]) -> dict[str, torch.Tensor | None]:
    return {name: sum(step.gradients[name] for step in steps) for name in steps[0].gradients}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "num_samples", "batch_size", "steps"),
    [("sampler", 12, 3, 2), ("prepared", 7, 3, 2), ("uneven", 9, 1, 3)],
)
def test_loaders_give_replicas_their_own_samples_of_one_global_batch(
    pool: Pool, kind: str, num_samples: int, batch_size: int, steps: int
) -> None:
    found = pool.run(WORLD, train_with_loader, kind, num_samples, batch_size)
    assert [len(rank) for rank in found] == [steps] * WORLD
    seen = []
    for step in range(steps):
        shares = [found[rank][step][0] for rank in range(WORLD)]
        for replica in range(REPLICAS):
            one, other = shares[replica * STAGES : (replica + 1) * STAGES]
            assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        own = [share for share in shares[::STAGES] if share]
        seen += [tuple(ids.tolist()) for share in own for ids in share["input_ids"]]
        assert_steps_equal([found[rank][step][1] for rank in range(WORLD)], unsplit(*own), replicas=REPLICAS)
    assert sorted(seen) == sorted(tuple(sample["input_ids"].tolist()) for sample in samples_of(num_samples))


def test_replicas_start_from_the_first_ones_weights(pool: Pool) -> None:
    """As data-parallel training does: a forgotten seed must not let replicas drift apart."""
    found = pool.run(WORLD, start_from_other_weights)
    for rank in range(STAGES):
        assert found[rank].keys() == found[rank + STAGES].keys()
        for name, parameter in found[rank].items():
            assert torch.equal(parameter, found[rank + STAGES][name]), name


def weights_of_all_kinds(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Module()
    model.large = nn.Parameter(torch.randn(3, PIECE_BYTES // 8))
    model.turned = nn.Parameter(torch.randn(5, 7).t())
    model.strided = nn.Parameter(torch.randn(6, 2)[:, 0])
    model.short, model.single = nn.Parameter(torch.randn(3).bfloat16()), nn.Parameter(torch.randn(()))
    model.flags = nn.Parameter(torch.rand(9) > 0.5, requires_grad=False)
    model.none = nn.Parameter(torch.empty(0))
    return model


def take_over_weights_of_all_kinds() -> dict[str, torch.Tensor]:
    model, everyone = weights_of_all_kinds(torch.distributed.get_rank()), (0, 1, 2)
    groups: Any = SimpleNamespace(reduction={everyone: torch.distributed.group.WORLD})
    held = [HeldParameter(name, parameter, everyone) for name, parameter in model.named_parameters()]
    copy_from_first_holders(held, model, groups, check=lambda: None)
    return dict(model.state_dict())


def test_weights_of_any_size_type_and_layout_pass_from_holder_to_holder(pool: Pool) -> None:
    expected = weights_of_all_kinds(0).state_dict()
    for found in pool.run(3, take_over_weights_of_all_kinds):
        assert found.keys() == expected.keys()
        assert [name for name, weight in found.items() if not torch.equal(weight, expected[name])] == []


def orders_of_an_unseeded_shuffle() -> list[int]:
    torch.manual_seed(torch.distributed.get_rank())
    parallelize(gpt2(), STAGES)
    loader = DataLoader(range(100), batch_size=100, shuffle=True)
    return [number for _ in range(2) for samples in loader for number in samples.tolist()]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_step_holds_each_gradient_once(pool: Pool, sharded: bool) -> None:
    """And no buffer of the step before."""
    for weights, held in pool.run(2, held_in_a_step, sharded):
        assert 0.95 * weights <= held <= 1.1 * weights


def test_an_unseeded_shuffle_has_one_order_on_all_ranks_of_a_pipeline(pool: Pool) -> None:
    """As in the tutorial: the ranks of a pipeline need the same batches, and its script sets no seed."""
    first, second, third, fourth = pool.run(WORLD, orders_of_an_unseeded_shuffle)
    assert first == second and third == fourth
    assert first != third and first[:100] != first[100:]


def warnings_of_batches(seeds: Sequence[int]) -> list[list[str]]:
    """Of each of two steps on a batch drawn from a seed of this rank's: what is warned of equal batches."""
    model: Any = penstock.initialize(gpt2(), pipeline_parallel_size=1, num_microbatches=2)
    found = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run_step(model, batch("causal", 4, seed=seeds[dist.get_rank()]))
        found.append([str(one.message) for one in seen if "the same batch" in str(one.message)])
    return found


def test_pipelines_that_are_given_the_same_batch_are_warned_of_once(pool: Pool) -> None:
    first, second, third = pool.run(3, warnings_of_batches, [1, 2, 2])
    (message,), *later = first
    assert "pipelines 1, 2 were given the same batch" in message and "model.prepare_dataloader" in message
    assert [later, second, third] == [[[]], [[], []], [[], []]]
    assert pool.run(2, warnings_of_batches, [1, 2]) == [[[], []]] * 2
