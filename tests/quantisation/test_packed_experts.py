"""Mixtures of experts whose experts are in 4 bits, over stages: the run of the unsplit model."""

from __future__ import annotations

import copy
import ctypes
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers.distributed import DistributedConfig
from trl import SFTConfig, SFTTrainer

import penstock
from penstock.checking.compare import ACCUMULATED, EXACT
from penstock.checking.double import in_double
from penstock.modeling.instrumentation import tensors_of
from penstock.modeling.packed_layers import mark_packed
from penstock.modeling.weights.load import load_stage
from penstock.planning import qlora
from penstock.planning.cluster import Cluster, DeviceClass
from penstock.planning.fit import Recipe, profiles_of
from penstock.planning.plan import Job
from penstock.planning.planner import equal_pipelines
from penstock.planning.unit_cost import LiveBytes
from tests.support.families import batch
from tests.support.peaks import sampled_peak
from tests.support.pool import Pool
from tests.support.quantised import ROUNDING, differences, plain_step, quantisation, split_step, story
from tests.support.trainer_runs import PipelineSFTTrainer, defaults, over, sentences, tokenizer
from tests.support.training import live_bytes, parallelize

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
# Experts beside a shared one, with biases, stored the other way round, and with a first layer that has none.
FAMILIES: dict[str, Any] = {
    "mixtral": transformers.MixtralConfig(**SIZES, **LOSS, intermediate_size=128, num_local_experts=4),
    "qwen3": transformers.Qwen3MoeConfig(
        **SIZES, **LOSS, moe_intermediate_size=64, num_experts=6, head_dim=16, norm_topk_prob=True
    ),
    "qwen2": transformers.Qwen2MoeConfig(
        **SIZES, intermediate_size=64, moe_intermediate_size=32, num_experts=4, shared_expert_intermediate_size=64
    ),
    "gpt-oss": transformers.GptOssConfig(
        **SIZES, intermediate_size=64, num_local_experts=4, head_dim=16, sliding_window=4
    ),
    # Five experts of one and a half blocks each; and some of more numbers than are packed at once.
    "blocks over experts": transformers.Qwen3MoeConfig(
        **{**SIZES, "hidden_size": 48}, moe_intermediate_size=2, num_experts=5, head_dim=16
    ),
    "wide": transformers.MixtralConfig(**SIZES, intermediate_size=9216, num_local_experts=2),
    "deepseek": transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, intermediate_size=128, moe_intermediate_size=64, n_routed_experts=4,
        n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=64,
        qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32,
    ),
}  # fmt: skip


@functools.cache
def base(family: str) -> Path:
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp())
    transformers.AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(folder)
    return folder


def adapt(model: Any) -> Any:
    torch.manual_seed(1)
    layers = ["q_proj", "o_proj"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=layers, init_lora_weights=False, task_type="CAUSAL_LM"))


# On some CPUs bitsandbytes evaluates no layer with one output, which is the gate of a shared expert.
SKIPPED = ["lm_head", "shared_expert_gate"]


def config_of(kind: str) -> penstock.PackedExpertsConfig:
    return penstock.PackedExpertsConfig(
        bnb_4bit_quant_type="nf4" if kind == "double" else kind,
        bnb_4bit_use_double_quant=kind == "double",
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=SKIPPED,
    )


def packed_by_hand(family: str, kind: str) -> Any:
    """The unsplit model as transformers loads it, its experts then packed by bitsandbytes alone."""
    config = quantisation(kind)
    config.llm_int8_skip_modules = SKIPPED
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        base(family), dtype=torch.float32, quantization_config=config
    )
    for module in list(model.modules()):
        for name in ("gate_up_proj", "down_proj") if type(module).__name__.endswith("Experts") else ():
            replace_parameter_4bit(module, name, kind == "double", "nf4" if kind == "double" else kind)
    return model


@functools.cache
def unsplit(family: str, kind: str) -> tuple[dict[str, Any], Path]:
    folder = base(family) / f"adapters-{kind}"
    told = story(adapt(packed_by_hand(family, kind)), plain_step, folder)
    # PEFT counts a packed stack's bytes.
    unpacked = adapt(transformers.AutoModelForCausalLM.from_pretrained(base(family)))
    return {**told, "counted": unpacked.get_nb_trainable_parameters()}, folder


def split_stories(cases: list[tuple[str, Path, str]], stages: int, folder: Path, schedule: str) -> list[dict[str, Any]]:
    """On a worker: each rank packs the experts of its own stage; with three stages the whole model was packed."""
    told = []
    for family, source, kind in cases:
        options: dict[str, Any] = {"schedule": schedule, "microbatch_size": 1}
        if stages == 3:
            whole = transformers.AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.float32, quantization_config=config_of(kind)
            )
            model = parallelize(adapt(whole), stages, **options)
        else:
            options |= {"quantization_config": config_of(kind), "pipeline_parallel_size": stages}
            model = penstock.from_pretrained(str(source), adapt=adapt, dtype=torch.float32, **options)
        told.append(story(model, split_step, folder / family))
    return told


@pytest.mark.parametrize(
    ("families", "ranks", "stages", "schedule"),
    [
        ({"mixtral": "nf4", "gpt-oss": "double"}, 2, 2, "1f1b"),
        ({"qwen3": "fp4", "qwen2": "nf4"}, 3, 3, "zb-h1"),
        ({"deepseek": "double"}, 4, 2, "1f1b"),
    ],
)
def test_packed_experts_run_as_those_of_the_unsplit_model(
    pool: Pool, tmp_path: Path, families: dict[str, str], ranks: int, stages: int, schedule: str
) -> None:
    cases = [(family, base(family), kind) for family, kind in families.items()]
    stories = pool.run(ranks, split_stories, cases, stages, tmp_path, schedule, timeout=240)
    for (family, _, kind), *runs in zip(cases, *stories, strict=True):
        expected, adapters = unsplit(family, kind)
        found = differences(runs, expected)
        assert all(value <= (0 if column == "others" else ROUNDING) for column, value in found.items()), (family, found)
        plain, split = (load_file(where / "adapter_model.safetensors") for where in (adapters, tmp_path / family))
        assert plain.keys() == split.keys() and all(torch.equal(plain[name], split[name]) for name in plain), family


@pytest.mark.parametrize("kind", ["fp4", "double"])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_packed_as_by_hand_bit_by_bit(family: str, kind: str) -> None:
    """Packed bytes, scales, and the scales of scales: whether a checkpoint has the experts apart or as a stack."""
    expected = packed_by_hand(family, kind).state_dict()
    found: Any = transformers.AutoModelForCausalLM.from_pretrained(
        base(family), dtype=torch.float32, quantization_config=config_of(kind)
    )
    state = found.state_dict()
    assert state.keys() == expected.keys() and any("experts" in name and "absmax" in name for name in state)
    assert all(torch.equal(state[name], expected[name]) for name in state)


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        (
            "intermediate_size",
            256,
            r"gate_up_proj: matrices of \[256, 64\] in the checkpoint, \[4, 512, 64\] in the model",
        ),
        ("num_local_experts", 6, r"gate_up_proj: 4 matrices in the checkpoint, \[6, 256, 64\] in the model"),
        ("num_local_experts", 2, r"gate_up_proj: 4 matrices in the checkpoint, \[2, 256, 64\] in the model"),
    ],
)
def test_experts_of_another_shape_are_refused(setting: str, value: int, said: str) -> None:
    config = copy.deepcopy(FAMILIES["mixtral"])
    setattr(config, setting, value)
    with pytest.raises(ValueError, match=said):
        transformers.AutoModelForCausalLM.from_pretrained(
            base("mixtral"), config=config, dtype=torch.float32, quantization_config=config_of("nf4")
        )


def test_a_stack_of_another_shape_is_in_the_report_of_transformers(caplog: pytest.LogCaptureFixture) -> None:
    config = copy.deepcopy(FAMILIES["gpt-oss"])
    config.intermediate_size *= 2
    with pytest.raises(RuntimeError, match="during automatic conversion"):
        transformers.AutoModelForCausalLM.from_pretrained(
            base("gpt-oss"), config=config, dtype=torch.float32, quantization_config=config_of("nf4")
        )
    assert "gate_up_proj: matrices of [64, 128] in the checkpoint, [4, 64, 256] in the model" in caplog.text


def test_verify_compares_packed_experts_and_says_what_accumulates() -> None:
    """A router's loss is no mean over tokens, so it is that of an accumulation; there is none in gpt-oss."""
    results = {}
    for family in ("mixtral", "gpt-oss"):
        base(family)  # before there are processes
        make = functools.partial(packed_by_hand, family, "nf4")
        found = penstock.verify(lambda make=make: adapt(make()), config={"pipeline_parallel_size": 2}, steps=1)
        assert found.exact, found.render()
        results[family] = {row.what: row.result for row in found.rows}
    assert (results["mixtral"]["loss"], results["gpt-oss"]["loss"]) == (ACCUMULATED, EXACT), results


def test_a_packed_model_is_compared_without_rounding_in_evaluation() -> None:
    """As in training, which has single precision. On some CPUs bitsandbytes has bfloat16 in evaluation alone."""
    model, inputs = in_double(adapt(packed_by_hand("mixtral", "nf4")).train(), batch("causal", 4))
    with torch.no_grad():
        trained, evaluated = model(**inputs).logits, model.eval()(**inputs).logits
    assert torch.equal(trained, evaluated)


# -- what a rank holds -------------------------------------------------------------------------------------------------


def run_on(source: Path, folder: Path, stages: int, resume: bool) -> tuple[list[float], list[str], int]:
    """Three steps with a save after the first, or the last two from there; what a save of the base is told; and how
    many bytes of packed weights and their scales this rank has."""
    options = {"pipeline_parallel_size": stages, "dtype": torch.float32, "microbatch_size": 1}
    model = penstock.from_pretrained(str(source), adapt=adapt, quantization_config=config_of("double"), **options)
    held = sum(one.nbytes for parts in tensors_of(model).values() for one in parts if one.dtype == torch.uint8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses, said = [], []
    if resume:
        for parameter in model.parameters():
            parameter.data.zero_() if parameter.requires_grad else None
        penstock.load_checkpoint(folder, model=model, optimizer=optimizer)
    for step in range(1 if resume else 0, 3):
        losses.append(split_step(model.train()))
        optimizer.step()
        optimizer.zero_grad()
        if not step:
            penstock.save_checkpoint(folder, model=model, optimizer=optimizer)
    for save in (model.save_parallelized, model.merge_and_unload().save_pretrained):
        with pytest.raises(penstock.CheckpointError) as caught:
            save(folder / "base")
        said.append(str(caught.value))
    return losses, said, held


def test_a_run_goes_on_with_more_stages_from_its_adapters_alone(pool: Pool, tmp_path: Path) -> None:
    first = pool.run(2, run_on, base("qwen3"), tmp_path, 2, False)
    for again, said, _ in pool.run(3, run_on, base("qwen3"), tmp_path, 3, True):
        assert again == pytest.approx(first[0][0][1:], rel=ROUNDING)
        assert all("the packed weights of a quantised Qwen3MoeForCausalLM: this kind is not" in one for one in said)
    names = [name for file in tmp_path.rglob("*.safetensors") for name in load_file(file) if "//" not in name]
    assert names and all("lora_" in name for name in names)
    whole = sum(
        one.nbytes
        for parts in tensors_of(mark_packed(packed_by_hand("qwen3", "double"))).values()
        for one in parts
        if one.dtype == torch.uint8
    )
    assert sum(held for _, _, held in first) == whole
    assert all(0.25 * whole < held < 0.75 * whole for _, _, held in first)


def loaded(source: Path, dtype: torch.dtype, enough: int) -> tuple[int, int]:
    """What a stage keeps, and by how much memory grows at most while it is loaded. Where that is more than `enough`
    beside what it keeps, it is loaded up to twice again."""
    ctypes.CDLL(None).mallopt(-3, 1 << 15)  # tensors are mapped, and given back when they are freed
    config = transformers.AutoConfig.from_pretrained(source)
    stages = [["model.embed_tokens", "model.layers.0", "model.layers.1"], ["model.norm", "lm_head"]]
    model_class = getattr(transformers, config.architectures[0])
    load = functools.partial(
        load_stage, model_class, str(source), stages, [0], dtype=dtype, quantization_config=config_of("nf4")
    )
    model, _ = load()
    kept = sum(one.nbytes for parts in tensors_of(mark_packed(model)).values() for one in parts if not one.is_meta)
    del model
    peaks = list[int]()
    # What else a process does meanwhile, or has to give back, is in some of them.
    while len(peaks) < 3 and not (peaks and min(peaks) < kept + enough):
        with sampled_peak() as peak:
            made = load()
        del made  # not before memory was looked at for the last time
        peaks.append(peak[0])
    return kept, min(peaks)


# One parameter of four in a layer is a stack of 32 MB; the checkpoint has float32.
TWO_LAYERS = {**SIZES, "num_hidden_layers": 2}
LARGE = {
    "many narrow experts": transformers.Qwen3MoeConfig(
        **TWO_LAYERS, moe_intermediate_size=1024, num_experts=64, head_dim=16
    ),
    "few wide experts": transformers.MixtralConfig(
        **{**TWO_LAYERS, "hidden_size": 512}, intermediate_size=2048, num_local_experts=4
    ),
    "stacked in the checkpoint": transformers.GptOssConfig(
        **TWO_LAYERS, intermediate_size=1024, num_local_experts=64, head_dim=16, sliding_window=4
    ),
}


@pytest.mark.parametrize("family", LARGE)
def test_a_stage_is_packed_while_it_is_loaded_within_a_stack_of_what_it_keeps(
    pool: Pool, tmp_path: Path, family: str
) -> None:
    """Beside what it keeps there is no more at any moment than the largest parameter of the stage would take, which is
    the gate and up projections of all experts of a layer; and a quarter of it for what else a process does."""
    config: Any = LARGE[family]
    model = transformers.AutoModelForCausalLM.from_config(config)
    largest = max(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        stack = largest * dtype.itemsize
        pool.close()  # so that a new process is measured, which has nothing of other tests to give back or to keep
        ((kept, peak),) = pool.run(1, loaded, tmp_path, dtype, int(1.25 * stack))
        # Small tensors may reuse what the load before has given back.
        assert 0.9 * kept < peak < kept + 1.25 * stack < 3 * stack, (dtype, peak / stack, kept / stack)


# -- LoRA on experts, and other ways to keep them ----------------------------------------------------------------------


def adapt_experts(model: Any) -> Any:
    torch.manual_seed(1)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=experts, init_lora_weights=False)
    return get_peft_model(model, config)


def with_adapted_experts(source: Path, folder: Path, schedule: str) -> tuple[dict[str, Any], str]:
    options = {"pipeline_parallel_size": 2, "dtype": torch.float32, "microbatch_size": 1, "schedule": schedule}
    with pytest.raises(NotImplementedError) as caught:
        penstock.from_pretrained(str(source), adapt=adapt_experts, quantization_config=config_of("nf4"), **options)
    model = penstock.from_pretrained(
        str(source), adapt=adapt_experts, quantization_config=quantisation("nf4"), **options
    )
    return story(model, split_step, folder), str(caught.value)


def test_lora_on_experts_is_exact_on_unpacked_ones_and_refused_on_packed_ones(pool: Pool, tmp_path: Path) -> None:
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(
        base("gpt-oss"), dtype=torch.float32, quantization_config=quantisation("nf4")
    )
    expected = story(adapt_experts(plain), plain_step, tmp_path / "plain")
    told = pool.run(2, with_adapted_experts, base("gpt-oss"), tmp_path / "split", "zb-h1", timeout=240)
    found = differences([one for one, _ in told], expected)
    assert all(value <= (0 if column == "others" else ROUNDING) for column, value in found.items()), found
    states = [load_file(tmp_path / where / "adapter_model.safetensors") for where in ("plain", "split")]
    assert states[0].keys() == states[1].keys() and any("experts" in name for name in states[0])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    for _, said in told:
        assert "packed experts (mlp.experts.down_proj, mlp.experts.gate_up_proj), where PEFT puts none" in said


def in_mxfp4(folder: Path) -> Path:
    """A checkpoint as gpt-oss is published: experts in blocks of 32 numbers of 4 bits, with a scale each."""
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES["gpt-oss"])
    state = model.state_dict()
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inner, outer = state.pop(name).shape
        state[f"{name}_blocks"] = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.randint(118, 122, (experts, outer, inner // 32), dtype=torch.uint8)
    folder.mkdir()
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict()
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["lm_head"],
    }
    config["architectures"] = ["GptOssForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def of_mxfp4(source: Path) -> tuple[float, str]:
    options = {"pipeline_parallel_size": 2, "dtype": torch.float32, "microbatch_size": 1}
    model = penstock.from_pretrained(str(source), adapt=adapt, **options)
    with pytest.raises(ValueError) as caught:
        penstock.from_pretrained(str(source), adapt=adapt, quantization_config=config_of("nf4"), **options)
    return split_step(model.train()), str(caught.value)


def test_a_checkpoint_in_mxfp4_is_loaded_as_transformers_does(pool: Pool, tmp_path: Path) -> None:
    source = in_mxfp4(tmp_path / "mxfp4")
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert plain.model.layers[0].mlp.experts.gate_up_proj.is_floating_point(), "unpacked, on a machine without kernels"
    expected = plain_step(adapt(plain).train())
    for loss, said in pool.run(2, of_mxfp4, source):
        assert loss == pytest.approx(expected, rel=ROUNDING)
        assert "quantized with Mxfp4Config but you are passing a PackedExpertsConfig" in said


# -- what `penstock fit` predicts --------------------------------------------------------------------------------------

BATCH, LENGTH, MICROBATCHES, RANK = 2, 64, 4, 8
LARGER: dict[str, Any] = {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 4}
MEASURED = {
    "few wide experts": transformers.MixtralConfig(**{**SIZES, **LARGER}, intermediate_size=512, num_local_experts=8),
    "many narrow experts": transformers.Qwen3MoeConfig(
        **{**SIZES, **LARGER, "hidden_size": 128}, moe_intermediate_size=192, num_experts=32, head_dim=32
    ),
}  # fmt: skip


def predicted(config: Any, checkpointing: bool) -> tuple[list[tuple[str, ...]], list[float]]:
    """Of two ranks the units and the bytes, from the configuration alone."""
    with torch.device("meta"):
        subject = transformers.AutoModelForCausalLM.from_config(config)

    def change(model: Any) -> None:
        qlora.adapt(model, RANK)
        qlora.pack(model, "nf4")

    recipe = Recipe("nf4, LoRA 8", torch.bfloat16, packed=True, change=change)
    _, _, profile = next(profiles_of(subject, [recipe], BATCH, LENGTH, 1e12))
    cluster = Cluster((DeviceClass("cpu", 2),))
    plan = equal_pipelines(Job(profile, cluster, MICROBATCHES, checkpointing=checkpointing), depth=2)
    assert plan is not None
    return plan.pipelines[0].stage_names, [memory.total for memory in plan.memory]


def measured(source: Path, split_point: str, checkpointing: bool) -> int:
    """Bytes of tensors that this rank has at most in a step that is not the first."""
    before = live_bytes()

    def adapted(model: Any) -> Any:
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return get_peft_model(model, LoraConfig(r=RANK, target_modules=qlora.names_to_adapt(model)))

    model = penstock.from_pretrained(
        str(source), adapt=adapted, dtype=torch.bfloat16, quantization_config=config_of("nf4"),
        pipeline_parallel_size=2, split_points=[split_point], microbatch_size=BATCH, schedule="1f1b",
    )  # fmt: skip
    optimizer = torch.optim.AdamW([one for one in model.train().parameters() if one.requires_grad])
    ids = torch.randint(0, 512, (BATCH * MICROBATCHES, LENGTH), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        held = live_bytes() - before
        with LiveBytes() as live:
            for out in model(input_ids=ids, labels=ids):
                out.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return held + live.peak


@pytest.mark.parametrize("shape", MEASURED)
def test_fit_predicts_what_packed_experts_take(pool: Pool, tmp_path: Path, shape: str) -> None:
    config = MEASURED[shape]
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    for checkpointing in (False, True):
        stages, expected = predicted(config, checkpointing)
        found = pool.run(2, measured, tmp_path, stages[1][0], checkpointing)
        assert found == pytest.approx(expected, rel=0.1), (
            checkpointing,
            [a / b for a, b in zip(found, expected, strict=True)],
        )


def test_expert_parallelism_is_refused_with_what_to_do_instead() -> None:
    asked = DistributedConfig(tp_size=2, ep_size=2)
    with pytest.raises(ValueError, match=r"distributed_config cannot .* let stages hold the experts, or tensor_par"):
        load_stage(transformers.MixtralForCausalLM, str(base("mixtral")), [], [], distributed_config=asked)


def test_packed_experts_in_8_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="experts are packed in 4 bits only"):
        penstock.PackedExpertsConfig(load_in_4bit=False, load_in_8bit=True)


def fine_tune(source: Path, folder: Path, stages: int) -> list[float]:
    """Three steps of TRL's trainer, which puts the adapters on; what it logs."""
    given: dict[str, Any] = {**defaults(folder, 3, 1), "bf16": False, "eval_strategy": "no", "save_strategy": "no"}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, quantization_config=config_of("nf4")
    )
    torch.manual_seed(1)
    trainer: Any = (PipelineSFTTrainer if stages else SFTTrainer)(
        model,
        SFTConfig(max_length=16, **{**given, "optim": "sgd", "learning_rate": 0.5}),
        train_dataset=Dataset.from_list([{"text": text} for text in sentences(24, 1)["text"]]),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
        **over(stages),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_fine_tuning_packed_experts_by_trl_is_that_of_one_process(pool: Pool, tmp_path: Path) -> None:
    expected = fine_tune(base("gpt-oss"), tmp_path / "plain", 0)
    assert len(expected) == 3 and max(expected) - min(expected) > 0.001
    for losses in pool.run(2, fine_tune, base("gpt-oss"), tmp_path / "split", 2, init=False, timeout=240):
        assert losses == pytest.approx(expected, abs=1e-4)
