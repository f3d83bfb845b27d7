"""A rank holds its own share of the weights: other stages' storage is gone, also where an optimizer was made before."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import penstock
from penstock.planning.unit_cost import LiveBytes
from tests.support.ended import run_ranks
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import parallelize, run_step, train_family

MEBIBYTE = 2**20
ONE_STAGE = {"model_parallelism": {"pipeline_parallel_size": 1}}


def bytes_held(early: bool) -> dict[str, int]:
    """Bytes of all live parameter storage, of the model's parameters, and of Adam's state after a step."""
    model = FAMILIES["llama"].build()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    everything = list(model.parameters())
    optimizer = torch.optim.Adam(model.parameters()) if early else None
    model = parallelize(model, 2)
    optimizer = optimizer or torch.optim.Adam(model.parameters())
    run_step(model, batch("causal", 4))
    optimizer.step()
    gc.collect()
    held = {id(parameter.untyped_storage()): parameter.untyped_storage().nbytes() for parameter in everything}
    state = [value for values in optimizer.state.values() for value in values.values() if value.numel() > 1]
    return {
        "whole": whole,
        "live": sum(held.values()),
        "own": sum(parameter.nbytes for parameter in model.parameters()),
        "optimizer": sum(tensor.untyped_storage().nbytes() for tensor in state),
        "gradients": sum(p.grad.nbytes for p in everything if p.grad is not None),
        "in optimizer": sum(len(group["params"]) for group in optimizer.param_groups),
        "all": len(everything),
    }


@pytest.mark.parametrize("early", [True, False])
def test_other_stages_parameters_are_released_though_an_optimizer_holds_them(pool: Pool, early: bool) -> None:
    ranks = pool.run(2, bytes_held, early)
    for rank in ranks:
        assert rank["live"] == rank["own"] < 0.7 * rank["whole"]
        assert rank["optimizer"] == 2 * rank["own"]
        assert rank["gradients"] == rank["own"]
        assert (rank["in optimizer"] == rank["all"]) == early
    # Nothing is tied in this model: what one rank gave up, the other holds.
    assert sum(rank["own"] for rank in ranks) == ranks[0]["whole"]


def build() -> Any:
    """About 100 MB of weights."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=2048, n_embd=512, n_layer=8, n_head=8, n_positions=64))


def resident() -> int:
    """Bytes of this process's own memory in RAM: without pages of libraries, which come in when first used."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * 4096


def measure() -> dict[str, int]:
    """How much this rank's memory grew from before the model was built to after it was split."""
    import ctypes

    build()  # whatever is loaded or allocated once, is now
    gc.collect()
    trim = ctypes.CDLL("libc.so.6").malloc_trim
    trim(0)
    before = resident()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    whole = sum(parameter.nbytes for parameter in model.parameters())
    full = resident() - before
    model = parallelize(model, 2)
    gc.collect()
    trim(0)
    kept = resident() - before
    own = sum(parameter.nbytes for parameter in model.parameters())
    return {"whole": whole, "full": full, "kept": kept, "own": own, "groups": len(optimizer.param_groups)}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the kernel's account of memory")
def test_resident_memory_of_a_rank_is_its_share() -> None:
    for end in run_ranks(2, measure):
        assert end.kind == "nothing", end
        measured = end.value
        assert measured["whole"] > 100 * 10**6
        assert measured["full"] > 0.9 * measured["whole"], "the measure does not see the weights"
        # Up to a few MB for the engine: groups, connections, plans.
        assert measured["own"] < 0.6 * measured["whole"]
        assert measured["kept"] < measured["own"] + 16 * MEBIBYTE


class Asks(nn.Module):
    """Runs only with values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x / 2 if bool((x > 100).any()) else x)


class KeepsItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Asks() for _ in range(4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        self.kept = {"loss": functional.mse_loss(x, labels), "x": x}
        return self.kept


def left_over(closed: bool, keeps: bool) -> tuple[int, int]:
    """Of a pipeline that went out of use: how many parameters are still alive, and how many groups."""
    inputs = {"x": torch.ones(4, 4), "labels": torch.zeros(4, 4)} if keeps else batch("causal", 4)
    model = KeepsItsLoss() if keeps else FAMILIES["gpt2"].build()
    model = penstock.initialize(model, ONE_STAGE, example_inputs=inputs if keeps else None)
    run_step(model, inputs)
    watched = [weakref.ref(parameter) for parameter in model.parameters()]
    groups = [weakref.ref(group) for group in model.pipeline.context.groups._mine]
    if closed:
        model.pipeline.close()
    else:
        torch.distributed.destroy_process_group()
    del model
    gc.collect()
    return sum(reference() is not None for reference in watched), sum(reference() is not None for reference in groups)


@pytest.mark.parametrize("keeps", [False, True], ids=["gpt2", "a model that keeps its loss"])
@pytest.mark.parametrize("closed", [True, False])
def test_a_pipeline_out_of_use_is_forgotten(pool: Pool, closed: bool, keeps: bool) -> None:
    assert pool.run(2, left_over, closed, keeps) == [(0, 0), (0, 0)]


def num_threads() -> int:
    """Of process groups, once the watcher of pipelines that are gone has seen that nobody needs it: how many there are
    at every look for a second, as some are about to end."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "penstock-watcher":
            thread.join(10)
            assert not thread.is_alive(), "something keeps a pipeline"
    looks = []
    for _ in range(10):
        looks.append(0)
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                looks[-1] += "gloo" in (thread / "comm").read_text()
        time.sleep(0.1)
    return min(looks)


def test_pipelines_one_after_another_leave_no_threads(pool: Pool) -> None:
    """Each process group has threads of its own, which end when nothing refers to it."""
    pool.run(2, train_family, "gpt2", 2, [batch("causal", 4)])
    before = pool.run(2, num_threads)
    for _ in range(2):
        pool.run(2, train_family, "gpt2", 2, [batch("causal", 4)])
    assert pool.run(2, num_threads) == before


class RealBytes(LiveBytes):
    """Without meta tensors, which take no memory."""

    def _follow(self, storage: torch.UntypedStorage, counts: bool = True) -> None:
        super()._follow(storage, counts and storage.device.type != "meta")


def peaks_by_phase(vocabulary: int) -> list[float]:
    """Most bytes that this rank makes while it initialises, in the first step, the second, and an evaluation, besides
    the gradients of its weights."""
    torch.manual_seed(0)
    model: Any = FAMILIES["llama"].build(vocab_size=vocabulary, hidden_size=8, dtype=torch.float32)
    ids = torch.ones(2, 64, dtype=torch.long)
    found = []

    def measured(run: Callable[[], Any]) -> None:
        with RealBytes() as live:
            run()
        found.append(float(live.peak))

    def evaluate() -> None:
        with torch.no_grad():
            model.eval()(input_ids=ids[:, :2])

    measured(lambda: parallelize(model, 2))
    measured(lambda: run_step(model, {"input_ids": ids, "labels": ids}))
    found[-1] -= sum(parameter.grad.nbytes for parameter in model.parameters())
    measured(lambda: run_step(model, {"input_ids": ids, "labels": ids}))
    measured(evaluate)
    return found


def test_a_stage_makes_nothing_of_the_size_of_the_vocabulary_that_it_does_not_compute(pool: Pool) -> None:
    """The first stage has no head: a forward is followed there without logits, too."""
    small, large = (pool.run(2, peaks_by_phase, size)[0] for size in (512, 131072))
    of_embedding = 131072 * 8 * 4  # a gradient for it is made by each microbatch
    assert large[0] < small[0] + 1e5
    assert max(large[1:3]) < max(small[1:3]) + of_embedding
    assert large[3] < small[3] + 131072 * 4 * 4  # the output, which every rank is given
