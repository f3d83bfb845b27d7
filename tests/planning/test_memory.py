"""Predicted memory beside what the tensors of a step really take, counted as they come and go on each rank."""

from __future__ import annotations

import contextlib
from itertools import islice
from typing import Any

import pytest
import torch

import penstock
from penstock.layout.pipelines import num_stages_on
from penstock.modeling.graph.chunked_loss import ChunkedLossError
from penstock.planning.cluster import Cluster, DeviceClass
from penstock.planning.fit import Recipe, profiles_of, ways
from penstock.planning.memory import HeldBytes, memory_of_ranks
from penstock.planning.plan import Job, PlannedPipeline, evaluate
from penstock.planning.profile import Profile, held_by_stages
from penstock.planning.profiling import profile_model
from penstock.planning.unit_cost import LiveBytes
from penstock.schedule import build
from tests.support.families import FAMILIES
from tests.support.hetero import balanced
from tests.support.pool import Pool

MICROBATCHES, BATCH, LENGTH = 6, 2, 64
# Each schedule with and without checkpointing.
CASES = [(2, "1f1b", True), (2, "zb-h1", False), (2, "zb-v", True)]
CASES += [(3, "1f1b", False), (3, "zb-h1", True), (3, "zb-v", False)]


def build_model() -> Any:
    """Blocks wide enough that their activations are most of the memory, and a vocabulary that is felt."""
    torch.manual_seed(0)
    sizes = {"n_layer": 6, "n_embd": 128, "n_head": 2, "n_positions": LENGTH, "vocab_size": 512}
    return FAMILIES["gpt2"].build(dtype=torch.float32, **sizes)


def peak_of_a_step(model: Any, ids: torch.Tensor) -> float:
    """Bytes at most besides weights and their gradients, in a step that is not the first: there shapes are learned and
    gradients made."""
    live = LiveBytes()
    for counting in (contextlib.nullcontext(), live):
        with counting:
            for out in model(input_ids=ids, labels=ids):
                out.loss.backward()
    return float(live.peak)


def peaks_of_steps(num_ranks: int) -> list[tuple[float, float, list[list[str]]]]:
    """For each case of so many ranks: bytes of this rank's weights with gradients and of everything else at most, and
    the modules of each stage."""
    found = []
    for ranks, schedule, checkpointing in CASES:
        if ranks != num_ranks:
            continue
        model = build_model()
        template = balanced(model, num_stages_on(num_ranks, schedule))
        plugin = penstock.HeterogeneousParallelPlugin(microbatch_size=BATCH, schedule=schedule)
        plugin.set_pipelines([template], [MICROBATCHES])
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model, *_ = plugin.configure(model)
        peak = peak_of_a_step(model, torch.ones(BATCH * MICROBATCHES, LENGTH, dtype=torch.long))
        state = sum(parameter.nbytes + parameter.grad.nbytes for parameter in model.parameters())
        found.append((float(state), peak, [list(stage) for stage in template.modules_per_stage]))
        model.pipeline.close()
    return found


@pytest.fixture(scope="module")
def profiles() -> list[Profile]:
    """Measured, and estimated on the meta device."""
    return [profile_model(build_model(), BATCH, LENGTH, device=where, optimizer_states=0) for where in ("cpu", None)]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_takes_what_is_predicted_or_a_little_less(pool: Pool, profiles: list[Profile], num_ranks: int) -> None:
    ranks = pool.run(num_ranks, peaks_of_steps, num_ranks)
    wrong = []
    for number, (_, schedule, checkpointing) in enumerate(case for case in CASES if case[0] == num_ranks):
        for profile in profiles:
            units = {unit.name: unit.checkpointed() if checkpointing else unit for unit in profile.units}
            stages = held_by_stages([[units[name] for name in stage] for stage in ranks[0][number][2]])
            estimates = memory_of_ranks(build(schedule, num_ranks, MICROBATCHES), stages)
            for rank, (cases, estimate) in enumerate(zip(ranks, estimates, strict=True)):
                state, peak, _ = cases[number]
                # A weight that is tied to another on the same rank is predicted twice.
                of_all, of_step = estimate.total / (state + peak), estimate.activations / peak
                print(schedule, checkpointing, profile.measured, rank, f"{peak:.0f} {of_step:.3f} {of_all:.3f}")
                if not (
                    1.0 <= of_all <= 1.15 and 1.0 <= of_step <= 1.15 and state <= estimate.weights + estimate.gradients
                ):
                    wrong.append((schedule, checkpointing, profile.measured, rank, peak, of_step, of_all))
    assert not wrong


def peaks_with_logits(chunks: list[int | None]) -> list[float]:
    """Of a model with a large vocabulary."""
    peaks = []
    for tokens in chunks:
        model: Any = penstock.initialize(
            wide_vocabulary(), pipeline_parallel_size=2, num_microbatches=4, split_points=["model.layers.1"],
            loss_chunk_tokens=tokens,
        )  # fmt: skip
        peaks.append(peak_of_a_step(model, torch.ones(4, 128, dtype=torch.long)))
        model.pipeline.close()
    return peaks


def wide_vocabulary(**settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16384, "hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 128}
    return FAMILIES["llama"].build(dtype=torch.float32, **sizes, **settings)


def test_logits_take_what_is_predicted_whole_or_in_chunks(pool: Pool) -> None:
    chunks = [None, 32]
    for tokens, peaks in zip(chunks, zip(*pool.run(2, peaks_with_logits, chunks), strict=True), strict=True):
        profile = profile_model(wide_vocabulary(), 1, 128, optimizer_states=0, loss_chunk_tokens=tokens)
        names = [unit.name for unit in profile.units].index("model.layers.1")
        stages = held_by_stages([profile.units[:names], profile.units[names:]])
        for peak, estimate in zip(peaks, memory_of_ranks(build("1f1b", 2, 4), stages), strict=True):
            assert 0.9 <= estimate.activations / peak <= 1.1, tokens


def states_of_optimizer(stages: list[list[list[str]]], counts: list[int], parts: int) -> float:
    """Bytes of Adam's two numbers that this rank keeps after a step of pipelines of these stages."""
    model = wide_vocabulary()
    plugin = penstock.HeterogeneousParallelPlugin(
        microbatch_size=1, sharded_optimizer=True, context_parallel_size=parts
    )
    plugin.set_pipelines([penstock.PipelineTemplate(type(model).__name__, each) for each in stages], counts)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, *_ = plugin.configure(model, optimizer)
    ids = torch.ones(sum(counts), 16, dtype=torch.long)
    for out in model(input_ids=ids, labels=ids):
        out.loss.backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return float(sum(value.nbytes for value in states if value.dim()))


@pytest.mark.parametrize(
    ("devices", "parts"),
    [([(0, 1), (2,)], 1), ([(0, 1)], 2)],
    ids=["two stages beside one, whose rank holds all weights and owns few", "two parts of each sequence"],
)
def test_owners_are_those_of_the_run(pool: Pool, devices: list[tuple[int, ...]], parts: int) -> None:
    """A planned device stands for its parts, of which it has what the fullest one keeps."""
    profile = profile_model(wide_vocabulary(), 1, 16)
    stages = [(profile.units[:2], profile.units[2:]) if len(own) == 2 else (profile.units,) for own in devices]
    counts = [len(own) for own in devices]
    pipelines = [
        PlannedPipeline(own, units, build("1f1b", len(own), count))
        for own, units, count in zip(devices, stages, counts, strict=True)
    ]
    cluster = Cluster((DeviceClass("cpu", sum(counts)),))
    job = Job(profile, cluster, sum(counts), sharded=len(devices), context_parallel_size=parts)
    plan = evaluate(job, pipelines)
    assert plan is not None
    names = [[[unit.name for unit in stage] for stage in own] for own in stages]
    found = pool.run(parts * sum(counts), states_of_optimizer, names, counts, parts)
    ranks = iter(found)
    kept = [
        max(sizes) for count in counts for sizes in zip(*([*islice(ranks, count)] for _ in range(parts)), strict=True)
    ]
    assert [memory.optimizer for memory in plan.memory] == pytest.approx(kept, rel=1e-3)
    assert sum(found) == sum(unit.optimizer for unit in profile.units)


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "llama"])
def test_a_tied_weight_is_held_once_where_both_its_units_are(family: str) -> None:
    model = FAMILIES[family].build()
    profile = profile_model(model, 1, 8)
    whole = HeldBytes.summed(profile.units)
    assert whole.gradients == sum(parameter.nbytes for parameter in model.parameters())
    assert whole.optimizer == 2 * whole.gradients and whole.weights >= whole.gradients
    halves = [HeldBytes.summed(part) for part in (profile.units[:2], profile.units[2:])]
    head = model.get_output_embeddings().weight
    tied = head is model.get_input_embeddings().weight
    assert sum(half.gradients for half in halves) - whole.gradients == head.nbytes * tied
    assert HeldBytes.summed(halves).gradients == whole.gradients


def test_chunks_of_logits_are_planned_only_where_training_takes_them() -> None:
    gemma, llama = (FAMILIES[family].build() for family in ("gemma2", "llama"))
    assert profile_model(llama, 1, 8, loss_chunk_tokens=4).units
    with pytest.raises(ChunkedLossError, match="the logits are used by div"):
        profile_model(gemma, 1, 8, loss_chunk_tokens=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_fit_shows_of_activations_does_not_depend_on_how_logits_are_made(dtype: torch.dtype) -> None:
    """A copy of all logits, or of a chunk's, in float32 is theirs also where it is gone after the head's forward."""
    model = FAMILIES["llama"].build(vocab_size=32000, max_position_embeddings=2048)
    cluster = Cluster((DeviceClass("device", 1, memory=1e15),))
    parts = {
        (way.checkpointing, way.loss_chunk_tokens is None): way.bytes_by_kind()
        for way in ways(profiles_of(model, [Recipe("plain", dtype)], 1, 2048, 1e12), cluster, 2)
    }
    for checkpointing in (False, True):
        whole, chunks = parts[checkpointing, True], parts[checkpointing, False]
        assert whole["activations"] == chunks["activations"] < 2**25, parts
        assert whole["logits"] > chunks["logits"] > 1024 * 32000 * 4, parts
