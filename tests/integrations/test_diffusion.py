"""Models of diffusers over stages: trained, loaded and saved as the unsplit model in diffusers."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoModel, FluxTransformer2DModel, QuantoConfig, TorchAoConfig
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torchao.quantization import Int8WeightOnlyConfig
from typer.testing import CliRunner

import penstock
from penstock.checkpoint.contents import merge_checkpoint
from penstock.checkpoint.untrusted import CheckpointError
from penstock.cli import app
from penstock.integrations import diffusers as integration
from penstock.modeling.instrumentation import record_of
from penstock.planning.memory import memory_of_ranks
from penstock.planning.profile import held_by_stages
from penstock.planning.profiling import profile_model
from penstock.planning.unit_cost import LiveBytes
from penstock.schedule import build
from tests.support.pool import Pool
from tests.support.training import EXACT, Step, assert_steps_equal, gradients_of, run_step

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    **{"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16},
    **{"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]},
}


def flux(dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return FluxTransformer2DModel(**SIZES).to(dtype)


def batch(size: int = 4, side: int = 4, tokens: int = 8, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """As Flux is given them: position ids have no dimension of samples. The first of them is no main input."""
    random = torch.Generator().manual_seed(size)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    places = torch.stack(torch.meshgrid(*map(torch.arange, (1, side, side)), indexing="ij"), -1)
    return {
        "img_ids": places.reshape(-1, 3).to(dtype),
        "txt_ids": torch.zeros(tokens, 3, dtype=dtype),
        "hidden_states": draw(size, side * side, 4),
        "timestep": torch.rand(size, generator=random, dtype=torch.float64).to(dtype),
        "pooled_projections": draw(size, 32),
        "encoder_hidden_states": draw(size, tokens, 32),
        "target": draw(size, side * side, 4),
    }


def matching(outputs: Any, inputs: Any) -> torch.Tensor:
    return functional.mse_loss(outputs[0], inputs["target"])


def without_target(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in inputs.items() if name != "target"}


def whole_step(model: Any, inputs: dict[str, torch.Tensor]) -> Step:
    loss = matching(model(**without_target(inputs)), inputs)
    loss.backward()
    return Step([loss.item()], gradients_of(model))


def train_flux(schedule: str, **options: Any) -> tuple[Step, list[torch.Tensor]]:
    example = without_target(batch(2, 3, 5))
    section = {"pipeline_parallel_size": 2, "schedule": schedule, **options}
    model = penstock.initialize(flux(), section, matching, example_inputs=example)
    step = Step(run_step(model, batch()), gradients_of(model))
    with torch.no_grad():  # as many tokens as samples, too
        outputs = [model(**without_target(batch(*sizes)), criterion=None).sample for sizes in ((5, 3, 4), (4, 2, 4))]
    return step, outputs


@pytest.mark.parametrize(
    ("schedule", "options"), [("1f1b", {}), ("zb-h1", {"batch_dim": {"img_ids": None, "txt_ids": None}})]
)
def test_position_ids_without_samples_are_found_or_said(pool: Pool, schedule: str, options: dict[str, Any]) -> None:
    model = flux()
    with torch.no_grad():
        expected = [model(**without_target(batch(*sizes))).sample for sizes in ((5, 3, 4), (4, 2, 4))]
    found = pool.run(2, train_flux, schedule, **options)
    assert_steps_equal([step for step, _ in found], whole_step(model, batch()))
    for _, outputs in found:
        for output, one in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, one, rtol=EXACT, atol=EXACT)


class WithRows(nn.Module):
    """Uses `rows_ids`, of which there are twice as many as samples, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.rows = how, nn.Linear(3, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, hidden: torch.Tensor, rows_ids: torch.Tensor) -> torch.Tensor:
        size, made = len(hidden), self.rows(rows_ids)
        if self.how == "two of each sample":
            made = made.view(size, -1, 8).mean(1)
        elif self.how == "the first ones":
            made = made[:size]
        elif self.how == "two of each sample, as tokens":
            made = torch.cat([hidden[:, None], made.view(size, -1, 8)], 1).amax(1)
        elif self.how == "all":
            made = made.mean(0).expand(size, -1)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden + made))
        return hidden


def to_zero(output: torch.Tensor, inputs: Any) -> torch.Tensor:
    return functional.mse_loss(output, torch.zeros_like(output))


def train_with_rows(how: str) -> tuple[list[float], str]:
    random = torch.Generator().manual_seed(0)
    inputs = {"hidden": torch.randn(2, 8, generator=random), "rows_ids": torch.randn(4, 3, generator=random)}
    model = penstock.initialize(WithRows(how), pipeline_parallel_size=2, criterion=to_zero, example_inputs=inputs)
    try:
        return run_step(model, inputs), ""
    except ValueError as error:
        return [], str(error)


@pytest.mark.parametrize("how", ["two of each sample", "the first ones", "two of each sample, as tokens", "all"])
def test_what_belongs_to_samples_in_another_number_is_refused(pool: Pool, how: str) -> None:
    for losses, refused in pool.run(2, train_with_rows, how):
        if how == "all":
            random = torch.Generator().manual_seed(0)
            whole = WithRows(how)(torch.randn(2, 8, generator=random), torch.randn(4, 3, generator=random))
            assert not refused and sum(losses) == pytest.approx(to_zero(whole, {}).item(), rel=1e-6)
        else:
            assert "The batch disagrees about its size: rows_ids has 4 samples" in refused
            assert "write batch_dim=" in refused


def peak_of_flux(split: str) -> float:
    """Bytes that a step with checkpointing takes at most, besides weights and their gradients."""
    model = flux(torch.float32)
    model.enable_gradient_checkpointing()
    inputs = batch(side=16, tokens=32, dtype=torch.float32)
    example = without_target(batch(1, 16, 32, torch.float32))
    section = {"pipeline_parallel_size": 2, "schedule": "1f1b", "split_points": [split], "microbatch_size": 1}
    model = penstock.initialize(model, section, matching, example_inputs=example)
    live = LiveBytes()
    for counting in (nullcontext(), live):
        with counting:
            run_step(model, inputs)
    return float(live.peak)


def test_memory_is_planned_from_the_inputs(pool: Pool) -> None:
    model = flux(torch.float32)
    record_of(model).example_inputs = without_target(batch(1, 16, 32, torch.float32))
    units = [unit.checkpointed() for unit in profile_model(model, optimizer_states=0).units]
    split = [unit.name for unit in units].index("single_transformer_blocks.0")
    estimates = memory_of_ranks(build("1f1b", 2, 4), held_by_stages([units[:split], units[split:]]))
    for peak, estimate in zip(pool.run(2, peak_of_flux, units[split].name), estimates, strict=True):
        assert 0.9 <= estimate.activations / peak <= 1.1


def inputs_of_64() -> dict[str, torch.Tensor]:
    return without_target(batch(1, 4, 8, torch.float32))


def test_what_fits_is_said_of_a_folder_of_diffusers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel", **SIZES}))
    given = [str(tmp_path), "--inputs", "tests.integrations.test_diffusion:inputs_of_64", "--devices", "2"]
    found = CliRunner().invoke(app, ["fit", *given, "--memory", "1GB", "--lora-rank", "2", "--all"])
    assert found.output.startswith("It fits: ") and "samples/s" in found.output, found.output
    rows = [line for line in found.output.splitlines() if line.startswith("nf4, LoRA 2")]
    assert len(rows) == 2 and all(" yes " in row for row in rows)  # no loss in chunks
    found = CliRunner().invoke(app, ["plan", *given, "--microbatch-size", "1", "--lora-rank", "2"])
    assert "FluxTransformer2DModel on 2 devices: 64 microbatches a step of 1" in found.output, found.output
    assert "in a command as --inputs SCRIPT.py:NAME" in CliRunner().invoke(app, ["plan", str(tmp_path)]).output
    wrong = CliRunner().invoke(app, ["plan", *given, "--microbatch-size", "3"])
    assert wrong.exit_code == 1 and "none of them has 3 samples" in wrong.output


# quanto's layers cannot be units of their own.
OUTSIDE = ("x_embedder", "context_embedder", "time_text_embed", "proj_out", "norm_out")


# -- folders -----------------------------------------------------------------------------------------------------------


def with_adapters(model: Any, seed: int = 3) -> Any:
    model.requires_grad_(False)
    torch.manual_seed(seed)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v", "proj_mlp"], init_lora_weights=False))
    return model


def load(folder: str, stages: int, **options: Any) -> Any:
    example = without_target(batch(2, 3, 5, torch.float32))
    return penstock.from_pretrained(
        folder, criterion=matching, example_inputs=example, pipeline_parallel_size=stages, **options
    )


def train_from(folder: str, stages: int, target: str) -> tuple[Step, set[str], set[str], list[str]]:
    """Adapters on sharded files of a variant; what was read, what is held, and what is refused."""
    names, opening = set[str](), integration.safe_open

    class Noting:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = opening(*args, **kwargs)

        def __enter__(self) -> Any:
            self.file.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self.file.__exit__(*args)

        def keys(self) -> Any:
            return self.file.keys()

        def get_tensor(self, name: str) -> torch.Tensor:
            names.add(name)
            return self.file.get_tensor(name)

    integration.safe_open = Noting  # type: ignore[misc,assignment]
    try:
        model = load(
            folder, stages, subfolder="transformer", variant="fp16", model_class=AutoModel, adapt=with_adapters
        )
    finally:
        integration.safe_open = opening  # type: ignore[misc]
    step = Step(run_step(model, batch(dtype=torch.float32)), gradients_of(model))
    held = {name.replace("base_layer.", "") for name in model.state_dict() if "lora_" not in name}
    model.save_lora_adapter(f"{target}/plain")
    model.save_lora_adapter(f"{target}/prefixed", prefix="transformer", upcast_before_saving=True)
    assert f"load_lora_adapter('{target}/prefixed', prefix='transformer')" in model.pipeline.board.advice()
    refused = []
    calls = ("save_pretrained", "load_ordinary", "add_adapter", "load_lora_adapter", "fuse_lora", "unload_lora")
    for method in calls:
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            getattr(model, method)(target)
        refused.append(str(caught.value))
    return step, names, held, refused


def test_each_rank_reads_its_stage_and_adapters_are_saved_whole(pool: Pool, tmp_path: Path) -> None:
    flux(torch.float32).save_pretrained(tmp_path / "transformer", variant="fp16", max_shard_size="60KB")
    assert len(list((tmp_path / "transformer").glob("*-of-*.safetensors"))) > 2
    whole = with_adapters(flux(torch.float32))
    expected = whole_step(whole, batch(dtype=torch.float32))
    found = pool.run(3, train_from, str(tmp_path), 3, str(tmp_path))
    assert_steps_equal([step for step, *_ in found], expected, tolerance=1e-5)
    assert all(read == held for _, read, held, _ in found)
    assert set().union(*(held for _, _, held, _ in found)) == flux().state_dict().keys()
    for *_, refused in found:
        assert "has adapters: save_lora_adapter(folder)" in refused[0]
        assert all("call it before penstock.initialize(), or in what" in text for text in refused[1:])

    whole.save_lora_adapter(tmp_path / "reference")
    plain, reference = (
        load_file(tmp_path / name / "pytorch_lora_weights.safetensors") for name in ("plain", "reference")
    )
    assert plain.keys() == reference.keys() and all(torch.equal(plain[name], reference[name]) for name in plain)
    inputs = without_target(batch(dtype=torch.float32))
    for name, prefix in (("plain", None), ("prefixed", "transformer")):
        again = flux(torch.float32)
        again.load_lora_adapter(tmp_path / name, prefix=prefix, use_safetensors=True)
        assert torch.equal(again(**inputs).sample, whole(**inputs).sample)


def wrapped(model: Any) -> Any:
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["to_q", "proj_mlp"], init_lora_weights=False))


def train_wrapped(folder: str, target: str) -> Step:
    model = load(folder, 2, model_class=FluxTransformer2DModel, adapt=wrapped)
    step = Step(run_step(model, batch(dtype=torch.float32)), gradients_of(model))
    model.save_pretrained(target)
    assert f"model.load_ordinary('{target}')" in model.pipeline.board.advice()
    return step


def test_a_peft_model_of_a_diffusion_model_is_loaded_in_stages(pool: Pool, tmp_path: Path) -> None:
    flux(torch.float32).save_pretrained(tmp_path / "base")
    whole, inputs = wrapped(flux(torch.float32)), batch(dtype=torch.float32)
    expected = whole_step(whole, inputs)
    found = pool.run(2, train_wrapped, str(tmp_path / "base"), str(tmp_path / "adapter"))
    assert_steps_equal(found, expected, tolerance=1e-5)
    again = PeftModel.from_pretrained(flux(torch.float32), tmp_path / "adapter")
    assert torch.equal(again(**without_target(inputs)).sample, whole(**without_target(inputs)).sample)


def save_all(folder: str) -> list[bool]:
    """The whole model in each form, and what comes back after it was changed."""
    model = load(f"{folder}/base", 2, model_class=FluxTransformer2DModel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(f"{folder}/sharded", max_shard_size="60KB")
    model.save_pretrained(f"{folder}/bin", safe_serialization=False, variant="fp16")
    model.save_parallelized(f"{folder}/ranks")
    penstock.save_checkpoint(f"{folder}/states", model=model, optimizer=optimizer, step=3)
    came_back = []
    for way in ("sharded", "ranks", "states"):
        run_step(model, batch(dtype=torch.float32))
        optimizer.step()
        changed = (
            not torch.equal(model.proj_out.weight, before["proj_out.weight"]) if "proj_out.weight" in before else True
        )
        if way == "states":
            changed = (
                changed and penstock.load_checkpoint(f"{folder}/states", model=model, optimizer=optimizer).step == 3
            )
        else:
            (model.load_ordinary if way == "sharded" else model.from_parallelized)(f"{folder}/{way}")
        came_back.append(changed and all(torch.equal(value, before[n]) for n, value in model.state_dict().items()))
    return came_back


def test_every_folder_is_one_that_diffusers_loads(pool: Pool, tmp_path: Path) -> None:
    base = flux(torch.float32)
    base.save_pretrained(tmp_path / "base")
    assert pool.run(2, save_all, str(tmp_path)) == [[True] * 3] * 2
    merge_checkpoint(tmp_path / "states", tmp_path / "merged")
    merge_checkpoint(tmp_path / "ranks", tmp_path / "merged-sharded", max_shard_size="60KB")
    assert sorted(os.listdir(tmp_path / "merged")) == ["config.json", "diffusion_pytorch_model.safetensors"]
    for folder, options in (
        ("sharded", {}),
        ("bin", {"variant": "fp16", "use_safetensors": False}),
        ("states/step-00000003", {}),
        ("merged", {}),
        ("merged-sharded", {}),
    ):
        loaded = AutoModel.from_pretrained(str(tmp_path / folder), **options)
        assert type(loaded) is FluxTransformer2DModel
        assert all(torch.equal(value, base.state_dict()[name]) for name, value in loaded.state_dict().items()), folder


def quantisation(library: str) -> dict[str, Any]:
    config = QuantoConfig("int8", list(OUTSIDE)) if library == "quanto" else TorchAoConfig(Int8WeightOnlyConfig())
    return {"quantization_config": config, "torch_dtype": torch.float32}


def train_quantised(folder: str, target: str, library: str) -> tuple[Step, str]:
    model = load(folder, 2, model_class=FluxTransformer2DModel, adapt=with_adapters, **quantisation(library))
    step = Step(run_step(model, batch(dtype=torch.float32)), gradients_of(model))
    model.save_lora_adapter(target)
    with pytest.raises(CheckpointError) as caught:
        model.save_parallelized(f"{target}/whole")
    return step, str(caught.value)


@pytest.mark.parametrize("library", ["quanto", "torchao"])
def test_a_quantised_base_is_loaded_in_stages(pool: Pool, tmp_path: Path, library: str) -> None:
    flux(torch.float32).save_pretrained(tmp_path / "base")
    whole = with_adapters(FluxTransformer2DModel.from_pretrained(tmp_path / "base", **quantisation(library)))
    expected = whole_step(whole, batch(dtype=torch.float32))
    found = pool.run(2, train_quantised, str(tmp_path / "base"), str(tmp_path / "adapter"), library)
    assert_steps_equal([step for step, _ in found], expected, tolerance=1e-5)
    assert all("adapters are saved by save_lora_adapter" in refused for _, refused in found)
    saved = load_file(tmp_path / "adapter" / "pytorch_lora_weights.safetensors")
    assert len(saved) == sum("lora_" in name for name in whole.state_dict())


def load_damaged(folder: str) -> list[str]:
    said = []
    for options in (
        {"subfolder": "lacking", "model_class": FluxTransformer2DModel},
        {"subfolder": "whole", "model_class": FluxTransformer2DModel, "adapt": lambda model: None},
        {"subfolder": "whole", "model_class": FluxTransformer2DModel, "use_flashpack": True},
        {"subfolder": "whole", "model_class": FluxTransformer2DModel, "device_map": "balanced"},
        {"subfolder": "pipeline", "model_class": AutoModel},
    ):
        with pytest.raises(Exception) as caught:  # the words are looked at below
            load(folder, 2, **options)
        said.append(str(caught.value))
    return said


def test_what_cannot_be_loaded_in_stages_is_refused(pool: Pool, tmp_path: Path) -> None:
    model = flux(torch.float32)
    model.save_pretrained(tmp_path / "whole")
    model.proj_out = nn.Identity()
    model.save_pretrained(tmp_path / "lacking")
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "config.json").write_text('{"_class_name": "FluxPipeline"}')
    for said in pool.run(2, load_damaged, str(tmp_path)):
        assert "lacks weights of FluxTransformer2DModel: proj_out.bias, proj_out.weight" in said[0]
        assert "adapt must return the model that it was given" in said[1]
        assert "use_flashpack cannot be combined" in said[2] and "device_map must name one device" in said[3]
        assert "FluxPipeline, which is no model of diffusers" in said[4]
