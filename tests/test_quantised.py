"""A quantised base with adapters, over stages: the run of the unsplit model, in memory for a stage's own weights."""

from __future__ import annotations

import contextlib
import functools
import gc
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
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import penstock
from families import batch
from penstock.checkpoint import CheckpointError
from penstock.integrations.packed_layers import mark_packed
from penstock.integrations.transformers import PipelineTrainer
from penstock.modeling.adapters import base_of
from penstock.modeling.graph.costs import unit_costs
from penstock.modeling.graph.units import list_units
from penstock.modeling.weights.load import load_stage
from penstock.modeling.weights.whole import tensors_of
from penstock.planning.memory import Held
from penstock.planning.profiling import profile_model
from pool import Pool
from quantised import BITSANDBYTES, KINDS, UNSAVED, adapt, load, quantisation, write_base
from stage_driver import cut as split_units
from trainer_runs import PipelineSFTTrainer, defaults, over, samples, sentences, tokenizer
from training import assert_same_gradients, cut, gradients_of, parallelize, rows, run_step, weigh

# Of single precision, which the libraries compute in (bitsandbytes' 8 bits, in evaluation on a CPU, in float16).
ROUNDING = 5e-6


@functools.cache
def base(family: str, kind: str | None = None) -> Path:
    return write_base(family, Path(tempfile.mkdtemp()), kind)


def evaluated(model: Any) -> tuple[float, torch.Tensor]:
    """A loss, and tokens chosen greedily. What kernels of 8 bits give for a row depends on the rows beside it."""
    model.eval()
    split = isinstance(model, penstock.PipelineModel)
    pieces = [(batch("causal", 4), 1.0)] if split else weigh("causal", cut(batch("causal", 4), [1] * 4))
    with torch.no_grad():
        loss = sum(float(model(**piece).loss) * share for piece, share in pieces)
        tokens = model.generate(batch("causal", 2)["input_ids"][:, :4], max_new_tokens=4, do_sample=False)
    return loss, tokens


def story(model: Any, step: Any, folder: Path) -> dict[str, Any]:
    """The same script for both: a step, an evaluation, the adapters saved and then merged into the base."""
    model.train()
    loss, gradients = step(model), gradients_of(model)
    gradients = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    told = {"loss": loss, "gradients": gradients, "evaluated": evaluated(model)}
    told["counted"] = model.get_nb_trainable_parameters()
    model.save_pretrained(folder)
    return {**told, "merged": evaluated(model.merge_and_unload())}


def plain_step(model: Any) -> float:
    """Over the microbatches that the split model has, so that kernels see the same rows."""
    losses = []
    for piece, share in weigh("causal", cut(batch("causal", 4), [1] * 4)):
        (loss := model(**piece).loss * share).backward()
        losses.append(float(loss))
    return sum(losses)


def split_step(model: Any) -> float:
    run_step(model, rows(batch("causal", 4), model.data_parallel_rank, model.data_parallel_size))
    return float(model.pipeline.last_step.global_loss)


def split_story(
    family: str, folder: Path, kind: str | None, stages: int, schedule: str, saved: Path, whole: bool = True
) -> dict[str, Any]:
    options = {"schedule": schedule, "micro_batch_size": 1}
    if whole:
        return story(parallelize(load(family, folder, kind), stages, **options), split_step, saved)
    options |= {} if kind is None else {"quantization_config": quantisation(kind)}
    model = penstock.from_pretrained(
        str(folder), adapt=adapt, dtype=torch.float32, pipeline_parallel_size=stages, **options
    )
    return story(model, split_step, saved)


def assert_same_story(runs: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for run in runs:
        assert run["loss"] == pytest.approx(expected["loss"], rel=ROUNDING)
        assert_same_gradients(run["gradients"], expected["gradients"], ROUNDING)
        assert run["counted"] == expected["counted"]
        for what in ("evaluated", "merged"):
            assert run[what][0] == pytest.approx(expected[what][0], rel=ROUNDING)
            assert torch.equal(run[what][1], expected[what][1])
    assert set().union(*(run["gradients"] for run in runs)) == set(expected["gradients"])
    assert expected["evaluated"][0] != pytest.approx(expected["merged"][0], rel=1e-7), "merging rounds"


@pytest.mark.parametrize(
    ("family", "kind", "ranks", "stages", "schedule"),
    [
        ("llama", "nf4", 2, 2, "zb-v"),
        ("gpt2", "double", 3, 3, "zb-h1"),
        ("mixtral", "int8", 2, 2, "1f1b"),
        ("llama", "quanto4", 4, 2, "zb-h1"),
    ],
)
def test_a_quantised_base_with_adapters_runs_as_the_unsplit_one(
    pool: Pool, tmp_path: Path, family: str, kind: str, ranks: int, stages: int, schedule: str
) -> None:
    folder = base(family)
    expected = story(load(family, folder, kind), plain_step, tmp_path / "plain")
    runs = pool.run(ranks, split_story, family, folder, kind, stages, schedule, tmp_path / "split", timeout=120)
    assert_same_story(runs, expected)
    plain, split = (load_file(tmp_path / where / "adapter_model.safetensors") for where in ("plain", "split"))
    assert plain.keys() == split.keys() and all(torch.equal(plain[name], split[name]) for name in plain)
    again = PeftModel.from_pretrained(load(family, folder, kind, adapters=False), tmp_path / "split")
    assert evaluated(again)[0] == pytest.approx(expected["evaluated"][0], rel=ROUNDING)


@pytest.mark.parametrize(
    ("family", "saved", "kind", "ranks", "stages", "schedule"),
    [
        ("gpt2", None, "nf4", 3, 3, "zb-h1"),
        ("mixtral", "double", None, 2, 2, "1f1b"),
        ("mixtral", "torchao8", None, 3, 3, "zb-v"),
        ("llama", "int8", None, 4, 2, "zb-v"),
        ("llama", None, "quanto8", 2, 2, "1f1b"),
    ],
)
def test_stages_that_are_loaded_alone_run_as_the_unsplit_model(
    pool: Pool, tmp_path: Path, family: str, saved: str | None, kind: str, ranks: int, stages: int, schedule: str
) -> None:
    folder = base(family, saved)
    expected = story(load(family, folder, kind), plain_step, tmp_path / "plain")
    arguments = family, folder, kind, stages, schedule, tmp_path / "split", False
    assert_same_story(pool.run(ranks, split_story, *arguments, timeout=120), expected)


# Two stages and three, two replicas, and each schedule on both numbers of stages.
LAYOUTS = [(2, 2, "1f1b"), (3, 3, "zb-h1"), (2, 2, "zb-v"), (4, 2, "zb-h1"), (3, 3, "1f1b"), (3, 3, "zb-v")]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_packing_runs_as_the_unsplit_model(pool: Pool, tmp_path: Path, kind: str) -> None:
    """Of each family, made whole, loaded in stages, and loaded as it was saved; layouts in turn."""
    layouts = itertools.cycle(LAYOUTS[KINDS.index(kind) % len(LAYOUTS) :] + LAYOUTS)
    # bitsandbytes packs the layers of GPT-2, which are none of `nn.Linear`.
    for family in ("llama", "mixtral", "gpt2")[: None if kind in BITSANDBYTES else 2]:
        for way in ("whole", "in stages", "saved")[: 2 if kind in UNSAVED else None]:
            given = None if way == "saved" else kind
            folder = base(family, kind if way == "saved" else None)
            if way != "in stages":
                expected = story(load(family, folder, given), plain_step, tmp_path / "plain")
            ranks, stages, schedule = next(layouts)
            arguments = family, folder, given, stages, schedule, tmp_path / "split", way == "whole"
            assert_same_story(pool.run(ranks, split_story, *arguments, timeout=120), expected)


# -- how stages are balanced -------------------------------------------------------------------------------------------

# Wide enough that products are most of the work.
WIDE = {"llama": {"hidden_size": 256, "intermediate_size": 512}, "gpt2": {"n_embd": 256}, "mixtral": {}}


@functools.cache
def wide_base(family: str) -> Path:
    return write_base(family, Path(tempfile.mkdtemp()), vocab_size=1024, **WIDE[family])


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "nf4"), ("llama", "int8"), ("llama", "quanto8"), ("llama", "quanto4"), ("gpt2", "double"),
     ("gpt2", "int8"), ("mixtral", "fp4")],
)  # fmt: skip
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


def train_auto(family: str, folder: Path, kind: str, with_plugin: bool) -> tuple[float, int]:
    """A step on the planner's pipelines; with the plugin they are given less memory than the whole model takes."""
    model, data = load(family, folder, kind), batch("causal", 4)
    if with_plugin:
        plugin = penstock.HeterogeneousParallelPlugin(microbatch_size=1)
        whole = Held.together(profile_model(base_of(mark_packed(model))).units)
        plugin.set_pipelines("auto", 4, model, memory=0.9 * whole.with_live(1))
        model, *_ = plugin.configure(model)
    else:
        options = {"pipeline_parallel_size": "auto", "micro_batch_size": 1}
        model = penstock.initialize(model, {"model_parallelism": options})
        data = rows(data, model.data_parallel_rank, model.data_parallel_size)
    run_step(model, data)
    return model.pipeline.last_step.global_loss, len(model.pipeline.layout.pipelines)


@pytest.mark.parametrize("with_plugin", [False, True])
@pytest.mark.parametrize(("family", "kind"), [("llama", "nf4"), ("gpt2", "int8"), ("llama", "quanto8")])
def test_the_planner_chooses_stages_of_a_quantised_model(pool: Pool, family: str, kind: str, with_plugin: bool) -> None:
    expected = plain_step(load(family, base(family), kind))
    for loss, pipelines in pool.run(2, train_auto, family, base(family), kind, with_plugin):
        assert loss == pytest.approx(expected, rel=ROUNDING) and pipelines == (1 if with_plugin else 2)


# -- what a rank holds -------------------------------------------------------------------------------------------------


def live_bytes() -> int:
    """Of all tensors of this process."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and not one.is_meta]
    sizes = {}
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a library's kind without storage of its own
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    sizes.pop(0, None)
    return sum(sizes.values())


def held_of_loaded(folder: Path, kind: str) -> int:
    before = live_bytes()
    options = {"dtype": torch.float32, "pipeline_parallel_size": 2}
    model = penstock.from_pretrained(str(folder), quantization_config=quantisation(kind), **options)
    assert model.training is False
    return live_bytes() - before


def held(folder: Path, kind: str) -> tuple[int, int]:
    before = live_bytes()
    model = load("llama", folder, kind, adapters=False).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())  # which was given all parameters
    whole = live_bytes() - before
    parallelize(model, 2)
    assert optimizer.param_groups
    return whole, live_bytes() - before


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_hold_what_the_unsplit_model_holds_and_no_more(pool: Pool, tmp_path: Path, kind: str) -> None:
    folder = write_base("llama", tmp_path, hidden_size=256, intermediate_size=768)
    (whole, first), (_, last) = pool.run(2, held, folder, kind)
    assert whole > 1_500_000 and min(first, last) > 0.4 * whole
    assert first + last < 1.02 * whole
    loaded = pool.run(2, held_of_loaded, folder, kind)
    assert loaded == pytest.approx([first, last], rel=0.01)


def replica(folder: Path, other: Path, kind: str) -> float:
    """Each rank is a pipeline, and the second was given another model."""
    model = load("llama", other if torch.distributed.get_rank() else folder, kind)
    parallelize(model, 1, micro_batch_size=1)
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


def save_whole(family: str, source: Path, kind: str, folder: Path) -> str | None:
    model = parallelize(load(family, source, kind, adapters=False).requires_grad_(False), 2)
    try:
        model.save_pretrained(folder, safe_serialization=True)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("family", "kind"), [("gpt2", "double"), ("mixtral", "int8")])
def test_a_quantised_base_is_saved_as_transformers_saves_it(pool: Pool, tmp_path: Path, family: str, kind: str) -> None:
    assert pool.run(2, save_whole, family, base(family), kind, tmp_path) == [None, None]
    plain = load_file(base(family, kind) / "model.safetensors")
    split = load_file(tmp_path / "model.safetensors")
    assert plain.keys() == split.keys() and all(torch.equal(plain[name], split[name]) for name in plain)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(
        (base(family, kind) / "config.json").read_text()
    )


@pytest.mark.parametrize("kind", ["quanto8", "torchao8"])
def test_packed_weights_that_are_not_saved_are_refused_by_name(pool: Pool, tmp_path: Path, kind: str) -> None:
    for said in pool.run(2, save_whole, "llama", base("llama"), kind, tmp_path):
        assert said is not None and "cannot save the packed weights of a quantised LlamaForCausalLM" in said


def run_on(source: Path, kind: str, folder: Path, stages: int, resume: bool) -> tuple[list[float], list[str]]:
    """Three steps with a save after the first, or the last two from there."""
    options = {"pipeline_parallel_size": stages, "dtype": torch.float32, "quantization_config": quantisation(kind)}
    model = penstock.from_pretrained(str(source), adapt=adapt, **options)
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
        model = parallelize(model, 2, micro_batch_size=1, **options)
    optimizer = AdamW8bit([one for one in model.parameters() if one.requires_grad], lr=0.05, eps=1e-4)
    losses = []
    for _ in range(3):
        losses.append(plain_step(model) if options is None else split_step(model))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("ranks", "options"), [(2, {"loss_chunk_tokens": 4}), (4, {"sharded_optimizer": True, "schedule": "zb-h1"})]
)
def test_a_packed_head_in_chunks_and_a_sharded_optimizer(pool: Pool, ranks: int, options: dict[str, Any]) -> None:
    expected = with_packed_head(base("llama"), None)
    assert expected[2] < expected[0] - 0.1
    for losses in pool.run(ranks, with_packed_head, base("llama"), options):
        assert losses == pytest.approx(expected, rel=ROUNDING)


# -- the Trainer -------------------------------------------------------------------------------------------------------

# Of TRL's SFTTrainer, which makes adapters of a quantised base bfloat16; of the plain Trainer, with 8-bit optimizers.
TRAINERS: dict[str, dict[str, Any]] = {
    "completions": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "packed": {"packing": True, "gradient_checkpointing": False},
    "bf16, reentrant": {
        "bf16": True, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}
    },
    "plain, adamw_8bit": {"optim": "adamw_8bit", "warmup_steps": 0},
    "plain, paged_adamw_8bit": {"optim": "paged_adamw_8bit", "gradient_checkpointing": True},
}  # fmt: skip


def fine_tune(source: Path, folder: Path, stages: int, case: str, resume: bool = False) -> list[float]:
    """Three steps of a Trainer; what it logs."""
    parts = [sentences(24, seed)["text"] for seed in (1, 2)]
    rows_of = [{"prompt": prompt, "completion": f" {completion}"} for prompt, completion in zip(*parts, strict=True)]
    rows_of = [{"text": text} for text in parts[0]] if case == "packed" else rows_of
    given: dict[str, Any] = {**defaults(folder, 3, 1), "bf16": False, "eval_strategy": "no", "max_grad_norm": 1.0}
    given |= {"save_strategy": "steps", "save_steps": 2, "optim": "sgd", **TRAINERS[case]}
    given["learning_rate"] = 0.5 if given["optim"] == "sgd" else 0.05
    torch.manual_seed(1)
    # 8-bit optimizers keep the state of a weight of at least 4096 numbers in 8 bits.
    size = {"r": 64, "lora_alpha": 512} if case.startswith("plain") else {"r": 2}
    adapters = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, **size)
    model, parallelism = load("llama", source, "nf4", adapters=False), over(stages)
    if case.startswith("plain"):
        model = get_peft_model(prepare_model_for_kbit_training(model, "paged" not in case), adapters)
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


@pytest.mark.parametrize("case", list(TRAINERS))
def test_fine_tuning_by_a_trainer_is_that_of_one_process(pool: Pool, tmp_path: Path, case: str) -> None:
    """And goes on from its checkpoint of adapters, on more stages."""
    source = base("llama")
    plain = fine_tune(source, tmp_path / "plain", 0, case)
    assert len(plain) == 3 and max(plain) - min(plain) > 0.01
    for logged in pool.run(2, fine_tune, source, tmp_path / "split", 2, case, init=False, timeout=120):
        assert logged == pytest.approx(plain, abs=1e-3 if "bf16" in case else 1e-4)
    if case in ("completions", "plain, adamw_8bit"):
        for again in pool.run(3, fine_tune, source, tmp_path / "split", 3, case, True, init=False, timeout=120):
            assert again == pytest.approx(logged, abs=ROUNDING)


# -- what is refused ---------------------------------------------------------------------------------------------------


def refusals(folder: Path) -> list[str]:
    kinds = ("nf4", "nf4", "nf4", "quanto8")
    models: list[Any] = [load("llama", folder, kind, adapters=False) for kind in kinds]
    models[0].hf_quantizer.quantization_config.quant_method = "awq"
    models[2].model.embed_tokens = Embedding4bit(97, 64)
    models[3].model.layers[1].mlp.up_proj.weight.requires_grad = True
    said = []
    for number, model in enumerate(models):
        with pytest.raises(NotImplementedError) as caught:
            parallelize(model, 1, tensor_parallel_size=2 if number == 1 else 1)
        said.append(str(caught.value))
    return said


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
    ]
    for said in pool.run(2, refusals, base("llama")):
        assert all(part in text for part, text in zip(expected, said, strict=True)), said
