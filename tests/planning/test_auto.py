"""`pipelines="auto"` and `"pipeline_parallel_size": "auto"`: the planner's pipelines train as the unsplit model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.planning.auto import auto_pipeline_size, auto_pipelines
from penstock.planning.cluster import Cluster, DeviceClass
from penstock.planning.context_parallel import share_sequences
from penstock.planning.memory import HeldBytes
from penstock.planning.plan import Job
from penstock.planning.planner import Infeasible
from penstock.planning.profiling import profile_model
from tests.cli.test_cli import run
from tests.support.families import FAMILIES
from tests.support.pool import Pool
from tests.support.training import kept_in_double

MODEL = "tests.planning.test_auto:build"  # for the commands
IDS = torch.arange(48).reshape(8, 6) % 13 + 3


def build() -> Any:
    torch.manual_seed(0)
    return FAMILIES["gpt2"].build(dtype=torch.float64)


def unsplit_loss() -> float:
    with kept_in_double(), torch.no_grad():
        return float(build()(input_ids=IDS, labels=IDS).loss)


def loss_of(model: Any, mine: torch.Tensor) -> float:
    with kept_in_double():
        for out in model(input_ids=mine, labels=mine):
            out.loss.backward()
    return float(model.pipeline.last_step.global_loss)


def train_with_plugin(schedule: str, memory: float | None) -> tuple[float, int, list[int]]:
    model = build()
    plugin = penstock.HeterogeneousParallelPlugin(microbatch_size=1, schedule=schedule)
    plugin.set_pipelines("auto", 8, model, memory=memory)
    counts = plugin.num_microbatches
    first = sum(counts[: plugin.pipeline_index])
    model, *_ = plugin.configure(model)
    mine = IDS[first : first + counts[plugin.pipeline_index]]
    return loss_of(model, mine), len(plugin.pipelines), list(counts)


@pytest.mark.parametrize(("num_ranks", "schedule"), [(3, "zb-h1"), (2, "zb-v")])
def test_the_plugins_own_pipelines_train_as_the_unsplit_model(pool: Pool, num_ranks: int, schedule: str) -> None:
    ranks = pool.run(num_ranks, train_with_plugin, schedule, None)
    assert all(rank == ranks[0] for rank in ranks)
    loss, num_pipelines, counts = ranks[0]
    assert loss == pytest.approx(unsplit_loss(), abs=1e-12)
    assert num_pipelines == num_ranks and sum(counts) == 8, "without a limit to memory replicas have no bubble"


def test_little_memory_makes_deeper_pipelines(pool: Pool) -> None:
    whole = HeldBytes.summed(profile_model(build()).units).with_live(1)
    loss, num_pipelines, _ = pool.run(2, train_with_plugin, "1f1b", 0.8 * whole)[0]
    assert num_pipelines == 1 and loss == pytest.approx(unsplit_loss(), abs=1e-12)
    with pytest.raises(Infeasible, match="no plan: "):
        auto_pipelines(build(), 2, 8, 1, "1f1b", memory=0.3 * whole)
    assert auto_pipeline_size(build(), 4, 8, 1, "1f1b") == 1
    assert auto_pipeline_size(build(), 4, 8, 1, "1f1b", memory=0.9 * whole) == 2
    with pytest.raises(ValueError, match="memory"):
        auto_pipelines(build(), 2, 8, 1, "1f1b", memory=0)


def test_devices_that_share_sequences_stand_as_one() -> None:
    """Four make at most two ranks, each of which holds a part of the activations, but whole weights."""
    job = share_sequences(Job(profile_model(build(), 1), Cluster((DeviceClass("device", 4),)), 8), 2)
    assert job is not None
    needed = HeldBytes.summed(job.profile.units).with_live(1)
    sizes = [auto_pipeline_size(build(), 4, 8, 1, "1f1b", memory, None, 2) for memory in (None, 0.9 * needed)]
    assert sizes == [1, 2]
    with pytest.raises(Infeasible, match="start a multiple of 2"):
        auto_pipeline_size(build(), 3, 8, 1, "1f1b", None, None, 2)


def test_advice_on_how_many_to_start_counts_processes() -> None:
    """A device of a plan is as many processes as share its matrices and its sequences."""
    with pytest.raises(Infeasible, match="uses all 18 processes: the best uses 2; start as many"):
        auto_pipelines(build(), 9, 1, 1, "1f1b", tensor_parallel_size=2)
    with pytest.raises(Infeasible, match=r"6 processes .*start a multiple of 4"):
        auto_pipeline_size(build(), 3, 8, 1, "1f1b", context_parallel_size=2, tensor_parallel_size=2)


def test_the_loss_in_chunks_makes_a_smaller_last_stage() -> None:
    model = FAMILIES["llama"].build(vocab_size=4096, hidden_size=8, max_position_embeddings=128, dtype=torch.float32)
    logits = 128 * 4096 * 4.0
    for tokens, needed in ((None, 4), (16, 1)):  # logits, their softmax, and the gradients of both
        with pytest.raises(Infeasible):
            auto_pipeline_size(model, 1, 8, 1, "1f1b", (needed - 0.5) * logits, tokens)
        assert auto_pipeline_size(model, 1, 8, 1, "1f1b", (needed + 2.5) * logits, tokens) == 1


def initialize_auto() -> tuple[float, int]:
    section = {"pipeline_parallel_size": "auto", "microbatch_size": 2}
    model = penstock.initialize(build(), {"model_parallelism": section})
    mine = IDS.chunk(model.data_parallel_size)[model.data_parallel_rank]
    return loss_of(model, mine), len(model.pipeline.layout.pipelines)


def test_initialize_chooses_the_number_of_stages(pool: Pool) -> None:
    for loss, pipelines in pool.run(2, initialize_auto):
        assert pipelines == 2 and loss == pytest.approx(unsplit_loss(), abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("automatic", 8), 'pipelines must be a list of PipelineTemplate or "auto"'),
        (("auto", 8), "needs the model"),
        (("auto", [8], "model"), "the number of microbatches over all pipelines"),
    ],
)
def test_mistakes_are_named(arguments: tuple, message: str) -> None:
    given = [build() if argument == "model" else argument for argument in arguments]
    with pytest.raises(TypeError, match=message):
        penstock.HeterogeneousParallelPlugin().set_pipelines(*given)


# ---------------------------------------------------------------- the commands


def test_plan_prints_pipelines_of_all_devices(tmp_path: Path) -> None:
    plot = tmp_path / "step.svg"
    result = run("plan", MODEL, "--devices", 5, "--memory", "4GB", "--global-batch", 64, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert "GPT2LMHeadModel on 5 devices: 16 microbatches a step" in result.output
    words = " ".join(result.output.split())
    assert "lm_head" in words and "estimated from operations and bytes" in words
    assert plot.read_text().startswith("<svg")


def test_plan_as_json_for_unlike_devices_and_a_measured_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    result = run("profile", MODEL, "--batch", 4, "--length", 8, "-o", path, "--device", "cpu")
    assert result.exit_code == 0 and "written to" in result.output, result.output
    result = run("plan", "gpt2", "--profile", path, "--devices", "a:2,b:1", "--speed", "a=1,b=0.5", "--json")
    assert result.exit_code == 0, result.output
    best, *_ = json.loads(result.output)
    assert best["measured"] and sum(pipeline["microbatches"] for pipeline in best["pipelines"]) == 16
    modules = penstock.PipelineTemplate.get_modules(build())
    for pipeline in best["pipelines"]:
        assert [unit for stage in pipeline["stages"] for unit in stage] == modules
    assert {kind for pipeline in best["pipelines"] for kind in pipeline["devices"]} <= {"a", "b"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "t4:2", "--memory", "100KB"], "alone needs"),
        (["--global-batch", "63"], "no whole number of microbatches of 4"),
        (["--schedule", "zb-x"], "unknown schedule 'zb-x': known are auto, gpipe"),
        (["--optimizer", "lion"], "must be one of adam, sgd"),
        (["--dtype", "int8"], "--dtype must be fp32, bf16, fp16"),
    ],
)
def test_mistakes_of_the_command_end_with_one_line(arguments: list[str], message: str) -> None:
    result = run("plan", MODEL, *arguments)
    assert result.exit_code == 1 and "error: " in result.output and message in " ".join(result.output.split())
