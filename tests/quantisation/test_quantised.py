"""A quantised base with adapters, over stages: the run of the unsplit model, in memory for a stage's own weights."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Embedding4bit, Linear4bit
from bitsandbytes.optim import AdamW8bit
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import penstock
from penstock.checkpoint.tensors import bytes_of
from penstock.checkpoint.untrusted import CheckpointError
from penstock.elastic.generations import leave_world
from penstock.modeling.graph.costs import unit_costs
from penstock.modeling.graph.units import list_units
from penstock.modeling.instrumentation import tensors_of
from penstock.modeling.libraries import base_of
from penstock.modeling.packed_layers import mark_packed, tensors_inside
from penstock.modeling.weights.load import load_stage
from penstock.planning import qlora
from penstock.planning.memory import HeldBytes
from penstock.planning.profiling import profile_model
from penstock.trainer.pipeline_trainer import PipelineTrainer
from tests.support.families import batch
from tests.support.pool import Pool
from tests.support.quantised import (
    KINDS,
    ROUNDING,
    adapt,
    base,
    compared,
    covering,
    evaluated,
    load,
    plain_step,
    quantisation,
    shallow_base,
    split_step,
    unsplit,
    write_base,
)
from tests.support.stage_driver import cut as split_units
from tests.support.trainer_runs import PipelineSFTTrainer, defaults, over, samples, sentences, tokenizer
from tests.support.training import live_bytes, parallelize, rows, run_step

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_base_with_adapters_runs_as_the_unsplit_one(pool: Pool, tmp_path: Path, kind: str) -> None:
    """Of all kinds together, each pair. benchmarks/studies/quantized.py runs the whole product."""
    for family, way, ranks, stages, schedule in covering(kind):
        (found,) = compared(pool, family, kind, way, ranks, stages, [schedule], tmp_path / family)
        case = family, way, ranks, stages, schedule, found
        assert all(value <= (0 if column == "others" else ROUNDING) for column, value in found.items()), case
        expected, adapters = unsplit(family, kind, way == "saved")
        plain, split = (load_file(where / "adapter_model.safetensors") for where in (adapters, tmp_path / family))
        assert plain.keys() == split.keys() and all(torch.equal(plain[name], split[name]) for name in plain), case
    assert expected["evaluated"][0] != pytest.approx(expected["merged"][0], rel=1e-7), "merging rounds"


def test_saved_adapters_belong_to_a_plain_quantised_base(pool: Pool, tmp_path: Path) -> None:
    compared(pool, "gpt2", "double", "whole", 2, 2, ["1f1b"], tmp_path)
    again = PeftModel.from_pretrained(load("gpt2", shallow_base("gpt2"), "double", adapters=False), tmp_path)
    expected, _ = unsplit("gpt2", "double", saved=False)
    assert evaluated(again)[0] == pytest.approx(expected["evaluated"][0], rel=ROUNDING)


# -- how stages are balanced -------------------------------------------------------------------------------------------

# Wide enough that products are most of the work.
WIDE = {"llama": {"hidden_size": 256, "intermediate_size": 512}, "gpt2": {"n_embd": 256}, "mixtral": {}}


@functools.cache
def wide_base(family: str) -> Path:
    return write_base(family, Path(tempfile.mkdtemp()), vocab_size=1024, **WIDE[family])


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "nf4"), ("llama", "quanto8"), ("gpt2", "double"), ("gpt2", "int8"), ("mixtral", "fp4")],
)
def test_stages_are_balanced_as_those_of_the_model_that_was_packed(family: str, kind: str) -> None:
    """The head, which is not packed, counts as much beside the blocks as without quantisation."""
    plain, packed = (load(family, wide_base(family), one) for one in (None, kind))
    for stages in (2, 3):
        expected = penstock.PipelineTemplate.balanced(plain, stages).modules_per_stage
        assert penstock.PipelineTemplate.balanced(packed, stages).modules_per_stage == expected
    units = list_units(plain)
    costs, of_plain = (unit_costs(base_of(model), units) for model in (packed, plain))
    assert costs == pytest.approx(of_plain, rel=0.1), "unpacking writes each weight once more"
    assert 0.05 < costs[-1] / costs[-3] < 1


@pytest.mark.parametrize(
    ("kind", "bits", "each_row"), [("nf4", 4.5, 0), ("fp4", 4.5, 0), ("int8", 8, 4), ("quanto8", 8, 4)]
)
def test_a_packed_layer_weighs_its_packed_bytes(kind: str, bits: float, each_row: int) -> None:
    """4 bits and, of 64 numbers, one of 32 bits; 8 bits and, of each row, one of 32."""
    packed = mark_packed(load("llama", wide_base("llama"), kind, adapters=False)).requires_grad_(False)
    plain = load("llama", wide_base("llama"), None, adapters=False)
    shapes = [parameter.shape for parameter in plain.model.layers[0].mlp.parameters()]
    found = sum(one.nbytes for one in itertools.chain(*tensors_of(packed.model.layers[0].mlp).values()))
    assert found == pytest.approx(sum(shape.numel() * bits / 8 + each_row * shape[0] for shape in shapes), rel=0.001)
    block = next(unit for unit in profile_model(packed).units if unit.name == "model.layers.0")
    assert found < block.weights < 2 * found and (block.gradients, block.optimizer) == (0, 0)


def train_auto(family: str, folder: Path, kind: str) -> list[tuple[float, int]]:
    """A step on the planner's pipelines, without the plugin and with it; the plugin is given less memory than the whole
    model takes."""
    told = []
    for with_plugin in (False, True):
        model, data = load(family, folder, kind), batch("causal", 4)
        if with_plugin:
            plugin = penstock.HeterogeneousParallelPlugin(microbatch_size=1)
            whole = HeldBytes.summed(profile_model(base_of(mark_packed(model))).units)
            plugin.set_pipelines("auto", 4, model, memory=0.9 * whole.with_live(1))
            model, *_ = plugin.configure(model)
        else:
            options = {"pipeline_parallel_size": "auto", "microbatch_size": 1}
            model = penstock.initialize(model, {"model_parallelism": options})
            data = rows(data, model.data_parallel_rank, model.data_parallel_size)
        run_step(model, data)
        told.append((model.pipeline.last_step.global_loss, len(model.pipeline.layout.pipelines)))
    return told


@pytest.mark.parametrize(("family", "kind"), [("llama", "nf4"), ("gpt2", "int8"), ("llama", "quanto8")])
def test_the_planner_chooses_stages_of_a_quantised_model(pool: Pool, family: str, kind: str) -> None:
    expected = pytest.approx(plain_step(load(family, base(family), kind)), rel=ROUNDING)
    for told in pool.run(2, train_auto, family, base(family), kind):
        assert told == [(expected, 2), (expected, 1)]


# -- what a rank holds -------------------------------------------------------------------------------------------------


def held(folder: Path, kind: str) -> tuple[int, int, int]:
    """The bytes of the unsplit model, of this rank's stage of it, and of the stage as `from_pretrained` makes it."""
    before = live_bytes()
    model = load("llama", folder, kind, adapters=False).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())  # which was given all parameters
    whole = live_bytes() - before
    parallelize(model, 2)
    assert optimizer.param_groups
    split = live_bytes()
    options = {"dtype": torch.float32, "pipeline_parallel_size": 2}
    loaded = penstock.from_pretrained(str(folder), quantization_config=quantisation(kind), **options)
    assert loaded.training is False
    return whole, split - before, live_bytes() - split


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("fp4", "quanto8")])
def test_the_ranks_hold_what_the_unsplit_model_holds_and_no_more(pool: Pool, kind: str) -> None:
    (whole, first, first_loaded), (_, last, last_loaded) = pool.run(2, held, wide_base("llama"), kind)
    assert whole > 1_500_000 and min(first, last) > 0.4 * whole
    assert first + last < 1.02 * whole
    assert (first_loaded, last_loaded) == pytest.approx((first, last), rel=0.01)


def held_in_training(folder: Path, kind: str) -> tuple[list[str], int]:
    """The units of this rank's stage, and what it holds after a step: weights, gradients, and Adam's state."""
    before = live_bytes()
    model = load("llama", folder, kind, adapters=False)
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    model = parallelize(model, 2, microbatch_size=1)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    run_step(model, batch("causal", 4))
    optimizer.step()
    pipeline = model.pipeline
    return list(pipeline.split.stages[pipeline.split.local_stages[0]]), live_bytes() - before


@pytest.mark.parametrize(("kind", "said"), [("nf4", "nf4"), ("double", "nf4-double"), ("int8", "int8")])
def test_the_planner_counts_what_a_stage_of_a_quantised_model_holds(pool: Pool, kind: str, said: str) -> None:
    """`penstock plan --quantization nf4 --lora-rank 16`, of the configuration alone."""
    outline = base_of(load("llama", wide_base("llama"), None, adapters=False)).to("meta")
    qlora.adapt(outline, 16)
    qlora.pack(outline, said)
    planned = {unit.name: unit for unit in profile_model(outline).units}
    for units, found in pool.run(2, held_in_training, wide_base("llama"), kind):
        together = HeldBytes.summed(planned[name] for name in units)
        assert found == pytest.approx(together.weights + together.gradients + together.optimizer, rel=0.01)


def replica(folder: Path, other: Path, kind: str) -> float:
    """Each rank is a pipeline, and the second was given another model."""
    model = load("llama", other if torch.distributed.get_rank() else folder, kind)
    parallelize(model, 1, microbatch_size=1)
    return evaluated(model)[0]


@pytest.mark.parametrize("kind", ["double", "quanto8"])
def test_replicas_start_with_the_weights_of_the_first(pool: Pool, tmp_path: Path, kind: str) -> None:
    folder, other = base("llama"), write_base("llama", tmp_path, scale=0.5)
    losses = pool.run(2, replica, folder, other, kind)
    expected, different = (evaluated(load("llama", one, kind))[0] for one in (folder, other))
    assert expected != pytest.approx(different, rel=1e-3)
    assert losses == pytest.approx([expected] * 2, rel=ROUNDING)


@pytest.mark.parametrize("saved", [False, True])
def test_a_stage_reads_and_packs_its_own_tensors_only(saved: bool, tmp_path: Path) -> None:
    """All files with others may be damaged."""
    whole = load("llama", base("llama"), "double", adapters=False)
    (whole if saved else load("llama", base("llama"), None, adapters=False)).save_pretrained(
        tmp_path, max_shard_size="8KB"
    )
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    stages = split_units(list_units(whole), 3)
    own = {file for name, file in places.items() if name.startswith(tuple(f"{unit}." for unit in stages[1]))}
    assert 1 < len(own) < len(set(places.values()))
    for file in set(places.values()) - own:
        (tmp_path / file).write_bytes(b"damaged")
    config = {} if saved else {"quantization_config": quantisation("double")}
    model, info = load_stage(type(whole), str(tmp_path), stages, [1], dtype=torch.float32, **config)
    assert (info.missing_keys, info.unexpected_keys) == ((), ())
    expected = whole.state_dict()
    found = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    assert any(name.endswith("weight.absmax") for name in found)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


# -- saving ------------------------------------------------------------------------------------------------------------


def save_whole(family: str, source: Path, kind: str | None, folder: Path, **options: Any) -> tuple[str, Any]:
    """A base without adapters is saved and evaluated: what is refused of the one, and the other."""
    model, said = load(family, source, kind, adapters=False).requires_grad_(False), ""
    model = parallelize(model, 2, microbatch_size=1)
    try:
        model.save_pretrained(folder, **options)
    except CheckpointError as error:
        said = str(error)
    return said, evaluated(model)


@pytest.mark.parametrize(
    ("family", "kind"), [("gpt2", "double"), ("mixtral", "int8"), ("llama", "torchao8"), ("llama", "torchao-float8")]
)
def test_a_quantised_base_is_saved_as_transformers_saves_it(pool: Pool, tmp_path: Path, family: str, kind: str) -> None:
    """And so is one that was loaded from there, in several files."""
    folders = [base(family, kind), tmp_path / "one", tmp_path / "several"]
    found = pool.run(2, save_whole, family, base(family), kind, folders[1])
    found += pool.run(2, save_whole, family, folders[1], None, folders[2], max_shard_size="20KB")
    assert len(list(folders[2].glob("*.safetensors"))) > 3
    models = [load(family, folder, None, adapters=False) for folder in folders]
    states = [dict(itertools.chain(model.named_parameters(), model.named_buffers())) for model in models]
    told = [evaluated(model) for model in models]
    for said, (loss, tokens) in found:
        assert not said and loss == pytest.approx(told[0][0], rel=ROUNDING) and torch.equal(tokens, told[0][1])
    for number, (folder, state) in enumerate(zip(folders, states, strict=True)):
        assert state.keys() == states[0].keys()
        for name, one in state.items():
            mine, theirs = ([bytes_of(inner) for inner in tensors_inside(each)] for each in (one, states[0][name]))
            assert mine == theirs, name
        assert told[number][0] == pytest.approx(told[0][0], rel=1e-7)
        assert json.loads((folder / "config.json").read_text()) == json.loads((folders[0] / "config.json").read_text())
    unpacked = load(family, base(family), None, adapters=False)
    assert told[0][0] != pytest.approx(evaluated(unpacked)[0], rel=1e-6)
    index = json.loads((folders[2] / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == models[0].num_parameters()


@pytest.mark.parametrize(("kind", "options"), [("quanto8", {}), ("torchao8", {"safe_serialization": False})])
def test_packed_weights_that_are_not_saved_are_refused_by_name(
    pool: Pool, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    for said, _ in pool.run(2, save_whole, "llama", base("llama"), kind, tmp_path, **options):
        assert "cannot save the packed weights of a quantised LlamaForCausalLM" in said
        assert (": this kind is not saved" if kind == "quanto8" else " so: use save_pretrained") in said


def run_on(source: Path, kind: str, folder: Path, stages: int, resume: bool) -> tuple[list[float], list[str]]:
    """Three steps with a save after the first, or the last two from there."""
    options = {"pipeline_parallel_size": stages, "dtype": torch.float32, "quantization_config": quantisation(kind)}
    model = penstock.from_pretrained(str(source), adapt=adapt, **options)
    assert penstock.initialize(model, pipeline_parallel_size=stages) is model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model.train()
    losses = []
    if resume:
        for parameter in model.parameters():
            parameter.data.zero_() if parameter.requires_grad else None
        penstock.load_checkpoint(folder, model=model, optimizer=optimizer)
    for step in range(1 if resume else 0, 3):
        losses.append(split_step(model))
        optimizer.step()
        optimizer.zero_grad()
        if not step:
            penstock.save_checkpoint(folder, model=model, optimizer=optimizer)
    return losses, [name for file in folder.rglob("*.safetensors") for name in load_file(file)]


@pytest.mark.parametrize(("kind", "layers"), [("nf4", 4), ("torchao8", 1)])
def test_a_run_goes_on_with_another_number_of_stages_from_its_adapters_alone(
    pool: Pool, tmp_path: Path, kind: str, layers: int
) -> None:
    """Also where a stage has nothing that is packed."""
    source = write_base("llama", tmp_path / "base", num_hidden_layers=layers)
    (losses, names), *_ = pool.run(2, run_on, source, kind, tmp_path / "run", 2, False)
    weights = {name for name in names if "//" not in name}  # what has is of the optimizer
    assert weights and all("lora_" in name for name in weights)
    for again, _ in pool.run(3, run_on, source, kind, tmp_path / "run", 3, True):
        assert again == pytest.approx(losses[1:], rel=ROUNDING)


def with_packed_head(folder: Path, options: dict[str, Any] | None) -> list[float]:
    """Three steps with bitsandbytes' 8-bit Adam; unsplit without options."""
    config = quantisation("nf4")
    config.llm_int8_skip_modules = ["none"]
    model = adapt(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)).train()
    assert isinstance(base_of(model).lm_head, Linear4bit)
    if options is not None:
        model = parallelize(model, 2, microbatch_size=1, **options)
    optimizer = AdamW8bit([one for one in model.parameters() if one.requires_grad], lr=0.05, eps=1e-4)
    losses = []
    for _ in range(3):
        losses.append(plain_step(model) if options is None else split_step(model))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_packed_head_in_chunks_and_a_sharded_optimizer(pool: Pool) -> None:
    expected = with_packed_head(base("llama"), None)
    assert expected[2] < expected[0] - 0.1
    options = {"loss_chunk_tokens": 4, "sharded_optimizer": True, "schedule": "zb-h1"}
    for losses in pool.run(4, with_packed_head, base("llama"), options):
        assert losses == pytest.approx(expected, rel=ROUNDING)


# -- the Trainer -------------------------------------------------------------------------------------------------------

# Of TRL's SFTTrainer, which makes adapters of a quantised base bfloat16; of the plain Trainer, with an 8-bit optimizer.
TRAINERS: dict[str, dict[str, Any]] = {
    "completions": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "packed": {"packing": True, "gradient_checkpointing": False},
    "bf16, reentrant": {
        "bf16": True, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}
    },
    "plain": {"optim": "paged_adamw_8bit", "warmup_steps": 0, "gradient_checkpointing": True},
}  # fmt: skip
RESUMED = ["completions", "plain"]


def fine_tune_all(source: Path, folder: Path, stages: int, cases: list[str], resume: bool) -> dict[str, list[float]]:
    return {case: fine_tune(source, folder / case, stages, case, resume) for case in cases}


def fine_tune(source: Path, folder: Path, stages: int, case: str, resume: bool) -> list[float]:
    """Three steps of a Trainer; what it logs."""
    parts = [sentences(24, seed)["text"] for seed in (1, 2)]
    rows_of = [{"prompt": prompt, "completion": f" {completion}"} for prompt, completion in zip(*parts, strict=True)]
    rows_of = [{"text": text} for text in parts[0]] if case == "packed" else rows_of
    given: dict[str, Any] = {**defaults(folder, 3, 1), "bf16": False, "eval_strategy": "no", "max_grad_norm": 1.0}
    given |= {"save_strategy": "steps", "save_steps": 2, "optim": "sgd", **TRAINERS[case]}
    given["learning_rate"] = 0.5 if given["optim"] == "sgd" else 0.05
    torch.manual_seed(1)
    # 8-bit optimizers keep the state of a weight of at least 4096 numbers in 8 bits.
    size = {"r": 64, "lora_alpha": 512} if case == "plain" else {"r": 2}
    adapters = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, **size)
    model, parallelism = load("llama", source, "nf4", adapters=False), over(stages)
    if case == "plain":
        model = get_peft_model(prepare_model_for_kbit_training(model), adapters)
        data, arguments = samples("causal", 24, 1), TrainingArguments(**given)
        trainer: Any = (PipelineTrainer if stages else Trainer)(model, arguments, train_dataset=data, **parallelism)
    else:
        trainer = (PipelineSFTTrainer if stages else SFTTrainer)(
            model,
            SFTConfig(max_length=16, **given),
            train_dataset=Dataset.from_list(rows_of),
            processing_class=tokenizer(),
            peft_config=adapters,
            **parallelism,
        )
    trainer.train(resume_from_checkpoint=resume)
    states = [state for state in trainer.optimizer.state.values() if "8bit" in given["optim"]]
    assert all(state["state1"].dtype == torch.uint8 for state in states)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_fine_tuning_by_a_trainer_is_that_of_one_process(pool: Pool, tmp_path: Path) -> None:
    """And goes on from its checkpoint of adapters, on more stages."""
    given = base("llama"), tmp_path / "split"
    plain = fine_tune_all(base("llama"), tmp_path / "plain", 0, list(TRAINERS), False)
    assert all(len(losses) == 3 and max(losses) - min(losses) > 0.01 for losses in plain.values()), plain
    for logged in pool.run(2, fine_tune_all, *given, 2, list(TRAINERS), False, init=False, timeout=240):
        for case, losses in logged.items():
            assert losses == pytest.approx(plain[case], abs=1e-3 if "bf16" in case else 1e-4), case
    for again in pool.run(3, fine_tune_all, *given, 3, RESUMED, True, init=False, timeout=120):
        for case, losses in again.items():
            assert losses == pytest.approx(logged[case], abs=ROUNDING), case


# -- what is refused ---------------------------------------------------------------------------------------------------


def refusals(folder: Path) -> list[str]:
    kinds = ("nf4", "nf4", "nf4", "quanto8")
    models: list[Any] = [load("llama", folder, kind, adapters=False) for kind in kinds]
    models[0].hf_quantizer.quantization_config.quant_method = "awq"
    models[2].model.embed_tokens = Embedding4bit(97, 64)
    models[3].model.layers[1].mlp.up_proj.weight.requires_grad = True
    # A known method that has packed no layer.
    plain, quantizer = load("llama", folder, None, adapters=False), models[3].hf_quantizer
    plain.hf_quantizer = quantizer
    models.append(plain)
    said = []
    for number, model in enumerate(models):
        with pytest.raises(NotImplementedError) as caught:
            parallelize(model, 1, tensor_parallel_size=2 if number == 1 else 1)
        said.append(str(caught.value))
    none_packed = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["model", "lm_head"])
    with pytest.raises(NotImplementedError) as caught:
        penstock.from_pretrained(str(folder), quantization_config=none_packed, pipeline_parallel_size=2)
    return [*said, str(caught.value)]


def test_what_loading_cannot_know_is_refused_by_name() -> None:
    """Before any communication: there is none here."""
    with pytest.raises(TypeError, match="such as BitsAndBytesConfig, got 'nf4'"):
        penstock.from_pretrained(str(base("llama")), quantization_config="nf4", pipeline_parallel_size=2)
    for folder, config in ((base("llama"), {"quantization_config": quantisation("nf4")}), (base("llama", "int8"), {})):
        with pytest.raises(penstock.ConfigurationError, match='"auto" counts the weights as they are before'):
            penstock.from_pretrained(str(folder), pipeline_parallel_size="auto", **config)


def test_what_is_not_known_is_refused_by_name(pool: Pool) -> None:
    expected = [
        "is quantised by awq, whose layers are not known here",
        "tensor_parallel_size cannot shard the packed weights",
        "model.embed_tokens, a Embedding4bit, has packed weights, but is no linear layer",
        "model.layers.1.mlp.up_proj has packed weights that require gradients",
        "is quantised by quanto, but none of its layers has packed weights of a kind that is known here",
        "is quantised by bitsandbytes, but none of its layers has packed weights of a kind that is known here",
    ]
    for said in pool.run(2, refusals, base("llama")):
        assert all(part in text for part, text in zip(expected, said, strict=True)), said


def begin_elastic(folder: Path, store: str) -> tuple[list[str], float]:
    """A process of a run of two: what it is told of quantised models, and the loss of a plain one after that."""
    plugin = penstock.HeterogeneousParallelPlugin(
        elastic=penstock.Elastic(store, start=2, copies=1, leave_on_sigterm=False),
        global_batch_size=4,
        microbatch_size=1,
    )
    inside = load("llama", folder, "torchao8", adapters=False)
    inside.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    by_hand = load("llama", folder, "nf4", adapters=False)
    del by_hand.hf_quantizer  # layers of bitsandbytes that transformers knows nothing of
    refused = []
    booster = penstock.Booster(plugin=plugin)
    for model in (load("llama", folder, "nf4"), inside, by_hand):
        with pytest.raises(NotImplementedError) as caught:
            booster.boost(model, torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1))
        refused.append(str(caught.value))
    model = load("llama", folder, None, adapters=False)
    loader = plugin.prepare_dataloader([{name: rows[n] for name, rows in batch("causal", 4).items()} for n in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader, None)
    loss = booster.execute_pipeline(iter(loader), model, None, optimizer, return_loss=True)["loss"]
    plugin.run.close()
    leave_world()
    return refused, float(loss)


def test_elastic_runs_refuse_quantised_models_on_every_rank_and_wait_for_nobody(pool: Pool, tmp_path: Path) -> None:
    expected = plain_step(load("llama", base("llama"), None, adapters=False))
    store = tmp_path.joinpath("store").as_uri()
    for refused, loss in pool.run(2, begin_elastic, base("llama"), store, init=False):
        instead = "Load it without a quantization_config, or leave elastic= out"
        assert (
            refused == [f"with elastic= a model cannot be quantised: packed weights stay on their stage. {instead}"] * 3
        )
        assert loss == pytest.approx(expected, rel=ROUNDING)
