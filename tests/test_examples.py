"""The examples, run as a user runs them."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer

from launch import ROOT, run_command, run_python, torchrun

sys.path.insert(0, str(ROOT / "examples"))
import run_dpo
from common import VOCABULARY_SIZE
from corpus import END_OF_TEXT, read_texts, token_blocks, train_tokenizer

EXAMPLES = ROOT / "examples"


def test_the_standard_library_is_text_of_the_asked_length() -> None:
    texts = read_texts(None, 50_000)
    assert sum(map(len, texts)) == 50_000
    assert read_texts(None, 50_000) == texts


def test_texts_come_from_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "image.bin").write_bytes(b"\xff\xfe\x00\x81")
    assert read_texts(str(tmp_path), 1000) == ["first", "second"]
    assert read_texts(str(tmp_path), 7) == ["first", "se"]
    assert read_texts(str(tmp_path / "b.txt"), 1000) == ["second"]
    with pytest.raises(ValueError, match="no text in"):
        read_texts(str(tmp_path / "image.bin"), 0)


def test_equal_texts_give_equal_tokenizers_that_lose_nothing() -> None:
    texts = [*read_texts(None, 30_000), "naïve ☃ \t\r\n"]
    first, second = train_tokenizer(texts, 400), train_tokenizer(texts, 400)
    assert first.get_vocab() == second.get_vocab() and len(first) == 400
    assert all(first.decode(first(text)["input_ids"]) == text for text in texts)


def test_blocks_are_the_texts_in_order_with_their_ends() -> None:
    tokenizer = train_tokenizer(["ab ab ab", "abc"], 300)
    blocks = token_blocks(tokenizer, ["ab ab ab", "abc"], 2)
    assert "".join(tokenizer.batch_decode(blocks)).startswith(f"ab ab ab{END_OF_TEXT}abc"[: blocks.numel()])
    assert blocks.shape[1] == 2


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file with less text than the examples would read, from where they take it themselves."""
    file = tmp_path / "text.txt"
    file.write_text("".join(read_texts(None, 60_000)))
    return file


def demo(tmp_path: Path, num_processes: int, *options: object, timeout: float = 300) -> tuple[list[float], str]:
    """The loss curve of a run of demo.py, and what it printed."""
    arguments = [EXAMPLES / "demo.py", "--output", tmp_path, "--steps", 4, *options]
    if num_processes == 1:
        result = run_python(*map(str, arguments), timeout=timeout)
    else:
        result = torchrun(num_processes, *map(str, arguments), timeout=timeout)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads((tmp_path / "curve.json").read_text())["losses"], result.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_gives_the_same_curve_for_any_number_of_stages_and_replicas(tmp_path: Path, text: Path) -> None:
    folders = [tmp_path / name for name in ("one", "three", "two-twice")]
    whole, printed = demo(folders[0], 1, "--text", text, "--pipeline-parallel-size", 1)
    assert "the pipeline of 1 stage(s) generates the same tokens: True" in printed
    staged, printed = demo(folders[1], 3, "--text", text, "--pipeline-parallel-size", 3, "--schedule", "gpipe")
    assert "the pipeline of 3 stage(s) generates the same tokens: True" in printed
    replicated, _ = demo(folders[2], 4, "--text", text, "--pipeline-parallel-size", 2)
    assert whole[-1] < whole[0] - 0.2
    assert staged == pytest.approx(whole, abs=1e-5)
    assert replicated == pytest.approx(whole, abs=1e-5)

    merged = AutoModelForCausalLM.from_pretrained(folders[1] / "merged")
    reference = AutoModelForCausalLM.from_pretrained(folders[0] / "merged")
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter, reference.get_parameter(name), atol=1e-3, rtol=1e-2)

    result = run_python(EXAMPLES / "compare_curves.py", *folders[:2])
    assert result.returncode == 0, result.stderr
    assert "three: loss 6." in result.stdout and "largest difference from one: " in result.stdout
    assert (tmp_path / "loss.png").stat().st_size > 5000


@pytest.mark.slow
def test_the_trainers_example_resumes(tmp_path: Path, text: Path) -> None:
    arguments = [str(EXAMPLES / "run_trainer.py"), "--dataset", str(text), "--output", str(tmp_path), "--steps"]
    for steps, *more in (("10",), ("12", "--resume")):
        result = torchrun(2, *arguments, steps, *more, timeout=200)
        assert result.returncode == 0, result.stderr[-4000:]
    history = json.loads((tmp_path / "checkpoint-12/trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == [5, 10]
    AutoModelForCausalLM.from_pretrained(tmp_path / "final")


@pytest.mark.slow
def test_the_fine_tuning_example_resumes_and_leaves_an_adapter(tmp_path: Path, text: Path) -> None:
    arguments = [str(EXAMPLES / "run_sft_lora.py"), "--output", str(tmp_path), "--save-every", "5", "--packing"]
    arguments += ["--dataset", str(text)]
    for steps, *more in (("5",), ("6", "--resume")):
        result = torchrun(2, *arguments, "--steps", steps, *more, timeout=200)
        assert result.returncode == 0, result.stderr[-4000:]
    history = json.loads((tmp_path / "checkpoint-6/trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == [5]
    assert "trainable params: " in result.stdout and "'eval_loss'" in result.stdout
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert any(bool(value.any()) for name, value in adapted.named_parameters() if "lora_B" in name)


def quantised(folder: Path, text: Path, stages: int, *options: str, launch: str = "run_qlora.py") -> list[float]:
    """The losses that run_qlora.py prints, or what starts it on so many ranks."""
    arguments = ["--dataset", str(text), "--output", str(folder), "--save-every", "3", *options]
    if launch.endswith(".py"):
        result = torchrun(stages, EXAMPLES / launch, *arguments, "--stages", str(stages), timeout=200)
    else:
        ranks = {"RANKS": str(stages), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        result = run_command(["bash", str(EXAMPLES / launch), *arguments], timeout=200, environment=ranks)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "trainable params: " in result.stdout
    return [float(line.split()[-1]) for line in result.stdout.splitlines() if line.startswith("step ")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quantised_example_goes_on_with_more_stages_as_one_process_would(tmp_path: Path, text: Path) -> None:
    whole = quantised(tmp_path / "whole", text, 1, "--steps", "5")
    first = quantised(tmp_path / "split", text, 2, "--steps", "3", launch="launch/qlora.sh")
    rest = quantised(tmp_path / "split", text, 3, "--steps", "5", "--resume")
    assert [len(first), len(rest)] == [3, 2] and min(whole[1:]) < whole[0] - 0.01
    assert first + rest == pytest.approx(whole, abs=1e-4)
    packed = AutoModelForCausalLM.from_pretrained(
        tmp_path / "split/base", quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    )
    adapted = PeftModel.from_pretrained(packed, tmp_path / "split/adapter")
    assert any(bool(value.any()) for name, value in adapted.named_parameters() if "lora_B" in name)


def diffusion_curve(folder: Path, stages: int, *options: object) -> dict[str, list[float]]:
    arguments = [str(EXAMPLES / "run_diffusion_lora.py"), "--output", str(folder), "--stages", str(stages)]
    arguments += map(str, options)
    result = run_python(*arguments, timeout=280) if stages == 1 else torchrun(stages, *arguments, timeout=280)
    assert result.returncode == 0, result.stderr[-4000:]
    curve: dict[str, list[float]] = json.loads((folder / "curve.json").read_text())
    return curve


def drawn_by_diffusers(base: Path, adapter: Path | None) -> torch.Tensor:
    """An image of a plain pipeline of tiny parts, without text encoders."""
    kinds: dict[str, Any] = {"transformer": FluxTransformer2DModel, "vae": AutoencoderKL}
    parts = {name: kind.from_pretrained(base / name) for name, kind in kinds.items()}
    absent = dict.fromkeys(["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"])
    pipeline: Any = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), **parts, **absent)
    if adapter is not None:
        pipeline.load_lora_weights(str(adapter), weight_name="pytorch_lora_weights.safetensors")
    random = torch.Generator().manual_seed(0)
    embeds = {"prompt_embeds": torch.ones(1, 8, 32), "pooled_prompt_embeds": torch.ones(1, 32)}
    size = {"height": 16, "width": 16, "num_inference_steps": 2}
    return torch.from_numpy(pipeline(**embeds, **size, generator=random, output_type="np").images)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_diffusion_example_gives_the_same_curve_and_image_on_any_number_of_stages(tmp_path: Path) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    whole = diffusion_curve(one, 1, "--steps", 6)
    begun = diffusion_curve(several, 2, "--steps", 4, "--save-every", 4)
    assert begun["losses"] == pytest.approx(whole["losses"][:4], abs=1e-5)
    resumed = diffusion_curve(several, 3, "--steps", 6, "--resume")
    assert resumed["losses"] == pytest.approx(whole["losses"], abs=1e-5)
    assert resumed["validation"] == pytest.approx(whole["validation"], abs=1e-5)
    image = drawn_by_diffusers(one / "base", one / "adapter")
    torch.testing.assert_close(drawn_by_diffusers(one / "base", several / "adapter"), image, rtol=0, atol=1e-5)
    assert (image - drawn_by_diffusers(one / "base", None)).abs().max() > 1e-3


@pytest.mark.slow
def test_ray_train_starts_the_ranks_and_the_losses_are_those_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is no requirement of the tests: pip install 'ray[train]'")
    ends = []
    for stages in ("1", "2"):
        arguments = ["--workers", stages, "--stages", stages, "--steps", "5", "--output", str(tmp_path / stages)]
        result = run_python(EXAMPLES / "launch/ray_train.py", *arguments, timeout=280, fresh=True)
        assert result.returncode == 0, result.stderr[-4000:]
        ends.append(float(result.stdout.partition("step 5  loss ")[2].split()[0]))
        AutoModelForCausalLM.from_pretrained(tmp_path / stages / "model")
    assert ends[0] == pytest.approx(ends[1], abs=1e-5)


def dpo_of_trl(text: Path, folder: Path, lora: bool) -> tuple[list[float], Any]:
    """Losses of TRL's DPOTrainer in one process on the example's first batches, and the trained model."""
    AcceleratorState._reset_state(True)
    texts = read_texts(str(text), 100_000)
    tokenizer = train_tokenizer(texts, VOCABULARY_SIZE)
    model = run_dpo.small_model(tokenizer)
    options = DPOConfig(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=8, learning_rate=1e-2, beta=1.0,
        max_grad_norm=0.0, lr_scheduler_type="constant", train_sampling_strategy="sequential", logging_steps=1,
        adam_epsilon=1e-4, save_strategy="no", max_length=None, bf16=False, report_to="none", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = DPOTrainer(
        model=run_dpo.with_adapters(model) if lora else model,
        ref_model=None if lora else run_dpo.small_model(tokenizer),
        args=options,
        train_dataset=Dataset.from_list(run_dpo.preferences(texts)[:40]),
        processing_class=tokenizer,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.model


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
def test_the_preference_example_trains_as_trl_does(tmp_path: Path, text: Path, lora: bool) -> None:
    arguments = ["--dataset", str(text), "--steps", "4", "--output", str(tmp_path / "split"), *["--lora"] * lora]
    arguments += ["--learning-rate", "1e-2", "--beta", "1.0", "--adam-epsilon", "1e-4"]
    result = torchrun(2, str(EXAMPLES / "run_dpo.py"), *arguments, timeout=200)
    assert result.returncode == 0, result.stderr[-4000:]
    losses = json.loads((tmp_path / "split/losses.json").read_text())
    expected, model = dpo_of_trl(text, tmp_path, lora)
    assert losses == pytest.approx(expected, abs=1e-4) and expected[0] == pytest.approx(math.log(2), abs=1e-5)
    assert max(abs(loss - expected[0]) for loss in expected) > 0.05, "it learns something"
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    model.save_pretrained(tmp_path / "plain")
    theirs, found = (load_file(tmp_path / folder / file) for folder in ("plain", "split"))
    assert found.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-4, msg=lambda said, name=name: f"{name}: {said}")
