"""What one does with sequences that are shared out: adapters, generation, resuming, the Trainer, verify and fit."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from typer.testing import CliRunner

import penstock
from penstock.checking.compare import EXACT as IS_EXACT
from penstock.cli import app
from penstock.planning.cluster import Cluster, DeviceClass, Link
from penstock.planning.context_parallel import share_sequences
from penstock.planning.fit import Recipe, profiles_of, ways
from penstock.planning.plan import Job, costs_of
from penstock.planning.planner import make_plans
from penstock.planning.profile import Profile, UnitCost
from penstock.planning.profiling import profile_model
from penstock.planning.report import plan_data, section_of, to_paste
from penstock.trainer.pipeline_trainer import PipelineTrainer
from tests.support import generation_ranks
from tests.support.context_parallel_ranks import DECODERS, SAMPLES, inputs_of
from tests.support.families import batch
from tests.support.pool import Pool
from tests.support.preference_runs import prefer
from tests.support.quantised import ROUNDING, base, load
from tests.support.trainer_runs import differences, train_all
from tests.support.training import EXACT, gradients_of, kept_in_double, run_step, unsplit_step

TOLERANCE = 1e-8  # double precision, but TRL divides its counts in single
SMALL: dict[str, Any] = {"eval_steps": 2, "settings": {"num_hidden_layers": 2}}


def llama(**settings: int) -> Any:
    return DECODERS["llama"].build(use_cache=False, **settings)


def with_adapters() -> Any:
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(llama(), config).double()


def gradients_of_adapters() -> dict[str, torch.Tensor | None]:
    with kept_in_double():
        model = penstock.initialize(with_adapters(), pipeline_parallel_size=1, context_parallel_size=2)
        model.gradient_checkpointing_enable()
        run_step(model, inputs_of("padded"))
    return gradients_of(model)


def test_adapters_over_layers_that_are_recomputed_have_the_unsplit_gradients(pool: Pool) -> None:
    expected = unsplit_step(with_adapters(), (inputs_of("padded"), 1.0)).gradients
    for found in pool.run(2, gradients_of_adapters):
        for name, gradient in found.items():
            wanted = expected[name]
            assert (gradient is None) == (wanted is None)
            assert gradient is None or wanted is None or float((gradient - wanted).abs().max()) < EXACT


def step_over_four_bits(folder: Path) -> dict[str, torch.Tensor | None]:
    return gradients_of_step(
        penstock.initialize(load("llama", folder, "nf4"), pipeline_parallel_size=1, context_parallel_size=2)
    )


def gradients_of_step(model: Any) -> dict[str, torch.Tensor | None]:
    given = batch("causal", 4)
    model.train()  # in evaluation bitsandbytes rounds more on some CPUs
    if isinstance(model, penstock.PipelineModel):
        run_step(model, given)
    else:
        model(**given, use_cache=False).loss.backward()
    return gradients_of(model)


def test_adapters_over_a_base_of_4_bits_have_the_unsplit_gradients(pool: Pool) -> None:
    expected = gradients_of_step(load("llama", base("llama"), "nf4"))
    for found in pool.run(2, step_over_four_bits, base("llama")):
        trained = [name for name, gradient in found.items() if gradient is not None]
        assert trained and sum(gradient is not None for gradient in expected.values()) == len(trained)
        for name in trained:
            one, wanted = found[name], expected[name]
            assert one is not None and wanted is not None and float((one - wanted).abs().max()) < ROUNDING


def prefer_in_parts(folder: str) -> str:
    with pytest.raises(NotImplementedError) as refused:
        prefer(Path(folder), stages=1, parallelism={"context_parallel_size": 2})
    return str(refused.value)


def test_trainers_of_trl_with_losses_of_their_own_are_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(2, prefer_in_parts, str(tmp_path), init=False):
        assert "context_parallel_size with a PipelineDPOTrainer" in text
        assert "train with PipelineTrainer or PipelineSFTTrainer" in text


IN_PARTS = {"context_parallel_size": 2}
FINE_TUNED: dict[str, dict[str, Any]] = {
    "padded": {"packing": False, "parallelism": IN_PARTS, **SMALL},
    "packed": {"packing": True, "parallelism": {**IN_PARTS, "loss_chunk_tokens": 7}, **SMALL},
}


@pytest.mark.slow
def test_fine_tuning_in_parts_logs_what_trl_logs(pool: Pool, tmp_path: Path) -> None:
    """SFTTrainer's figures, in training and in evaluation, and its weights."""
    given = 1, 4, FINE_TUNED
    (plain,) = pool.run(1, train_all, tmp_path / "plain", 0, *given, init=False, timeout=120)
    for run in pool.run(2, train_all, tmp_path, 1, *given, init=False, timeout=120):
        for case in FINE_TUNED:
            found = differences((run[case], tmp_path / case), (plain[case], tmp_path / "plain" / case))
            assert {"entropy", "mean_token_accuracy", "num_tokens", "eval_entropy", "weights"} <= found.keys()
            # The Trainer adds up losses in single precision.
            assert not {n: v for n, v in found.items() if v > (1e-6 if n == "loss" else TOLERANCE)}, case


def train(folder: str | None, parts: int, stages: int, until: int) -> tuple[list[float], torch.Tensor]:
    """On a worker: go on from a checkpoint, train up to a step, save; and what the model generates then."""
    with kept_in_double():
        model = penstock.initialize(
            llama(), pipeline_parallel_size=stages, context_parallel_size=parts, num_microbatches=2
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        manager = penstock.CheckpointManager(folder, model=model, optimizer=optimizer, every=1)
        losses = []
        for step in range(manager.resume(), until):
            optimizer.zero_grad()
            run_step(model, inputs_of("packed"))
            losses.append(float(model.pipeline.last_step.global_loss))
            optimizer.step()
            manager.save(step + 1)
        return losses, model.generate(inputs_of("packed")["input_ids"][:2, :5], max_new_tokens=4, do_sample=False)


def test_a_run_goes_on_with_another_number_of_parts_and_generates_as_the_unsplit_model(
    pool: Pool, tmp_path: Path
) -> None:
    model, losses, folder = llama(), [], str(tmp_path)
    with kept_in_double():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(**inputs_of("packed")).loss
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
        tokens = model.eval().generate(inputs_of("packed")["input_ids"][:2, :5], max_new_tokens=4, do_sample=False)
    found = []
    for ranks, parts, stages, until in ((2, 2, 1, 2), (4, 2, 2, 3), (2, 1, 2, 4)):
        results = pool.run(ranks, train, folder, parts, stages, until)
        found += results[0][0]
        generated = results[0][1]
    assert found == pytest.approx(losses, rel=1e-8)
    assert torch.equal(generated, tokens)


CASES: list[dict[str, Any]] = [
    {"max_new_tokens": 6, "do_sample": False},
    {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 2},
]


def generate_in_parts(stages: int) -> list[torch.Tensor]:
    """On a worker: the tokens in both cases, from the random state of the unsplit model."""
    model = penstock.initialize(generation_ranks.build("llama"), pipeline_parallel_size=stages, context_parallel_size=2)
    return generation_ranks.run_cases(model.eval(), generation_ranks.prompt("llama"), CASES, seed=5)


@pytest.mark.parametrize("stages", [1, 2])
def test_generation_gives_the_unsplit_tokens_greedy_and_sampled(pool: Pool, stages: int) -> None:
    model, inputs = generation_ranks.build("llama"), generation_ranks.prompt("llama")
    expected = generation_ranks.run_cases(model, inputs, CASES, seed=5)
    for found in pool.run(2 * stages, generate_in_parts, stages):
        assert all(torch.equal(one, tokens) for one, tokens in zip(found, expected, strict=True))


def engine_of_a_dropped_model() -> bool:
    model: Any = penstock.initialize(llama(), pipeline_parallel_size=1, context_parallel_size=2)
    gradients_of_step(model)
    engine = weakref.ref(model.pipeline)
    del model
    gc.collect()
    return engine() is None


def test_a_model_that_is_dropped_takes_its_groups_with_it(pool: Pool) -> None:
    """Each group of gloo has threads, which go with the engine."""
    assert pool.run(2, engine_of_a_dropped_model) == [True, True]


def orders_of_an_unseeded_shuffle(folder: str) -> list[list[int]]:
    """On a worker: of pipelines that share their sequences; and as they go on from a checkpoint of two that do not."""

    def order() -> list[int]:
        return [int(number) for number in DataLoader(range(50), shuffle=True)]

    torch.manual_seed(torch.distributed.get_rank())
    apart, shared = (
        penstock.initialize(llama(), pipeline_parallel_size=1, context_parallel_size=parts) for parts in (1, 2)
    )
    found = [order()]
    torch.manual_seed(10 + torch.distributed.get_rank())
    penstock.save_checkpoint(folder, model=apart, step=1)
    penstock.load_checkpoint(folder, model=shared)
    found.append(order())
    penstock.load_checkpoint(folder, model=apart)
    return [*found, order()]


def test_an_unseeded_shuffle_has_one_order_on_all_that_share_sequences(pool: Pool, tmp_path: Path) -> None:
    """As they need the same batches. Pipelines that have batches of their own go on with numbers of their own."""
    first, second = pool.run(2, orders_of_an_unseeded_shuffle, str(tmp_path))
    assert first[:2] == second[:2] and first[0] != first[1]
    assert first[2] == first[1] != second[2]


def fit_trainer(folder: str, parallelism: dict[str, Any] | None) -> list[float]:
    """The logged losses, in training and in evaluation."""
    rows = [{name: value[row] for name, value in inputs_of("padded").items()} for row in range(SAMPLES)]
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, logging_steps=1,
        eval_strategy="steps", eval_steps=3, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True,
    )  # fmt: skip
    options: dict[str, Any] = {"args": arguments, "train_dataset": rows, "eval_dataset": rows}
    with kept_in_double():
        if parallelism is None:
            trainer: Any = Trainer(llama(), **options)
        else:
            trainer = PipelineTrainer(llama(), parallelism=parallelism, **options)
        trainer.train()
    return [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]


def test_the_trainer_logs_what_it_logs_without_parts(pool: Pool, tmp_path: Path) -> None:
    keys = {"pipeline_parallel_size": 1, "context_parallel_size": 2}
    expected = fit_trainer(str(tmp_path / "plain"), None)
    for found in pool.run(2, fit_trainer, str(tmp_path / "parts"), keys):
        assert len(expected) == 4 and found == pytest.approx(expected, abs=1e-6)


def test_the_command_verify_finds_a_model_in_parts_exact() -> None:
    options = ["--stages", "1", "--context-parallel", "2", "--steps", "2", "--json"]
    result = CliRunner().invoke(app, ["verify", f"{__name__}:llama", *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["rows"] and {row["result"] for row in found["rows"]} == {IS_EXACT}, result.output
    assert "each sequence in 2 parts" in found["about"]


def test_fit_shares_long_sequences_out_where_nothing_else_fits() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=8, vocab_size=512
            )
        )
    recipe = Recipe("float32", torch.float32)
    ((_, _, profile), *_) = profiles_of(model, [recipe], 1, 8192, 1e12)
    memory = 0.7 * min(way.shown.fullest[1].total for way in ways_of(profile, 1e15, parts=1))
    found = [way for way in ways_of(profile, memory) if way.plan is not None]
    assert found and all(way.context_parallel_size > 1 for way in found)
    section = section_of(found[0].plan)
    assert section is not None
    sizes = section["model_parallelism"]
    assert sizes["context_parallel_size"] * sizes["pipeline_parallel_size"] in (2, 4)


def test_fit_lets_parts_divide_the_state_of_a_sharded_optimizer() -> None:
    """Also those of a single pipeline."""
    ((_, _, profile), *_) = profiles_of(llama(), [Recipe("float32", torch.float32)], 1, 64, 1e12)
    state = sum(unit.optimizer for unit in profile.units)

    def of_four_parts(memory: float, sharded: bool) -> Any:
        whole, _ = ways_of(profile, memory, parts=4, sharded=sharded)
        return whole.plan

    whole, sharded = of_four_parts(1e15, sharded=False), of_four_parts(1e15, sharded=True)
    assert whole.memory[0].optimizer == state and len(sharded.pipelines) == 1
    assert state / 4 <= sharded.memory[0].optimizer < 1.1 * state / 4
    memory = whole.fullest[1].total - 0.7 * state
    assert of_four_parts(memory, sharded=False) is None and of_four_parts(memory, sharded=True) is not None


def ways_of(profile: Any, memory: float, parts: int | None = None, **recipe: Any) -> list[Any]:
    cluster = Cluster((DeviceClass("device", 4, memory=memory),), inside=Link(1e-5, 1e10))
    found = ways(iter([(Recipe("float32", torch.float32, **recipe), None, profile)]), cluster, 8)
    return [way for way in found if parts in (None, way.context_parallel_size)]


def test_plans_in_parts_say_how_they_run() -> None:
    """Pipelines that are alike by the configuration, others by the plugin; and each part has devices of its own."""
    found = profile_model(llama(num_hidden_layers=4), 1, 64, operations_per_second=1e12)
    cluster = Cluster((DeviceClass("fast", 4), DeviceClass("slow", 2, speed=0.3)))
    shared = share_sequences(Job(found, cluster, 7), 2)
    assert shared is not None
    sections, codes = [], []
    for plan in make_plans(shared):
        section = section_of(plan)
        if section is not None:
            sections.append(section["model_parallelism"]["context_parallel_size"])
            continue
        codes.append(plan_data(plan, None)["code"])
        order = " ".join(to_paste(plan).split()).partition("from rank 0 on: ")[2].partition(".")[0]
        counts = [int(run.partition(" x ")[0]) if " x " in run else 1 for run in order.split(", ")]
        assert sum(counts) == 2 * len(plan.devices)
    assert sections and set(sections) == {2}
    assert codes and all("    context_parallel_size=2," in code for code in codes)


def test_a_part_costs_its_share_and_what_it_receives() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=512))
    ((_, _, profile), *_) = profiles_of(model, [Recipe("float32", torch.float32)], 1, 1024, 1e12)
    job = share_sequences(Job(profile, Cluster((DeviceClass("device", 8),), inside=Link(0.0, 1e9)), 1), 4)
    assert job is not None and job.cluster.counts == (2,)
    whole, part = profile.units[1], job.profile.units[1]
    assert (part.weights, part.gradients, part.kept) == (whole.weights, whole.gradients, whole.kept / 4)
    received = 4 * 1024 * 64 * 4 * 3 / 16 / 1e9
    for speed in (1.0, 0.2):  # a slower device has the same messages
        costs = costs_of([[part]], [speed])
        assert costs.forward == pytest.approx((whole.forward / 4 / speed + received,))
        assert costs.backward == pytest.approx((whole.backward / 4 / speed + received,))
    again = costs_of([[part.checkpointed()]], [0.2])
    assert again.backward == pytest.approx(((whole.backward + whole.forward) / 4 / 0.2 + 2 * received,))
    assert share_sequences(Job(profile, Cluster((DeviceClass("device", 6),)), 1), 4) is None


def test_all_costs_of_a_unit_are_divided_but_those_of_its_weights() -> None:
    names = [one.name for one in fields(UnitCost) if "float" in str(one.type) and "tuple" not in str(one.type)]
    profile = Profile("a model", (UnitCost(name="unit", **dict.fromkeys(names, 8.0)),))  # type: ignore[arg-type]
    job = share_sequences(Job(profile, Cluster((DeviceClass("device", 4),)), 1), 4)
    assert job is not None
    (part,) = job.profile.units
    others = {name for name in names if getattr(part, name) != 2.0}
    assert others == {"weights", "gradients", "optimizer", "forward_messages", "backward_messages"}


def test_parts_sum_their_gradients_at_the_end_of_a_planned_step() -> None:
    """A ring of all devices, of which each has all gradients."""
    found = profile_model(llama(num_hidden_layers=4), 1, 64, operations_per_second=1e12)
    job = share_sequences(Job(found, Cluster((DeviceClass("device", 4),), inside=Link(0.0, 1e9)), 1), 4)
    assert job is not None
    (plan, *_) = make_plans(job)
    size = sum(unit.gradients for unit in found.units)
    (reduction,) = plan.simulation.reductions
    assert reduction.seconds == pytest.approx(2 * 3 / 4 * size / 1e9) and plan.bytes_on_links == 2 * 3 * size
