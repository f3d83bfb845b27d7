"""The examples, on ranks of the pool as torchrun would start them, by real launchers, and their launch scripts, dry."""

import contextlib
import io
import json
import math
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from torch.distributed.run import get_args_parser
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from common import default_pipelines, images
from corpus import END_OF_TEXT, read_texts, token_blocks, train_tokenizer
from tests.support.launch import ROOT, free_port, run_command, run_python, torchrun
from tests.support.pool import Pool

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
Example = Callable[..., str]


def run_script(name: str, arguments: list[str]) -> str:
    """On a worker: run the script to its end; what it prints."""
    AcceleratorState._reset_state(True)  # the last script's world
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [f"{name}.py", *arguments]
    verbosity = transformers.logging.get_verbosity()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        except SystemExit as end:  # typer's
            assert not end.code
        finally:
            transformers.logging.set_verbosity(verbosity)
            transformers.logging.enable_progress_bar()
    return printed.getvalue()


@pytest.fixture
def example(pool: Pool) -> Example:
    """Runs a script on some ranks; what the first one prints."""

    def run(ranks: int, name: str, *arguments: object) -> str:
        printed: list[str] = pool.run(ranks, run_script, name, [*map(str, arguments)], init=False, timeout=200)
        return printed[0]

    return run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file with less text than the examples would read, from where they take it themselves."""
    file = tmp_path / "text.txt"
    file.write_text("".join(read_texts(None, 60_000)))
    return file


# ---------------------------------------------------------------- text and images


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


def test_images_come_from_folders_by_class(tmp_path: Path) -> None:
    from PIL import Image

    for label, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
        (tmp_path / label).mkdir()
        Image.new("RGB", (10, 6), colour).save(tmp_path / label / "one.png")
    found = images(str(tmp_path), 8)
    assert (len(found), found.num_labels, [found[i]["labels"] for i in range(2)]) == (2, 2, [0, 1])
    assert found[1]["pixel_values"].shape == (3, 8, 8)
    assert found[1]["pixel_values"][:, 0, 0].tolist() == [1.0, -1.0, -1.0]


# ---------------------------------------------------------------- training


def test_the_demo_gives_the_same_curve_for_any_number_of_stages_and_replicas(
    example: Example, tmp_path: Path, text: Path
) -> None:
    folders, losses = [tmp_path / "one", tmp_path / "two-twice"], []
    for folder, ranks, stages, schedule in zip(folders, (1, 4), (1, 2), ("auto", "gpipe"), strict=True):
        options = ["--text", text, "--output", folder, "--steps", 4, "--schedule", schedule]
        printed = example(ranks, "demo", "--pipeline-parallel-size", stages, *options)
        assert f"the pipeline of {stages} rank(s) generates the same tokens: True" in printed
        losses.append(json.loads((folder / "curve.json").read_text())["losses"])
    assert losses[0][-1] < losses[0][0] - 0.2 and losses[1] == pytest.approx(losses[0], abs=1e-5)

    reference, merged = (AutoModelForCausalLM.from_pretrained(folder / "merged") for folder in folders)
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter, reference.get_parameter(name), atol=1e-3, rtol=1e-2)

    printed = example(1, "compare_curves", *folders)
    assert "two-twice: loss 6." in printed and "largest difference from one: " in printed
    assert (tmp_path / "loss.png").stat().st_size > 5000


@pytest.mark.parametrize("script", ["run_trainer", "run_sft_lora"])
def test_the_trainers_examples_resume(example: Example, tmp_path: Path, text: Path, script: str) -> None:
    arguments = ["--output", tmp_path, "--dataset", text]
    arguments += ["--save-every", 10, "--packing"] if script == "run_sft_lora" else []
    for steps, *more in ((10,), (12, "--resume")):
        printed = example(2, script, *arguments, "--steps", steps, *more)
    history = json.loads((tmp_path / "checkpoint-12/trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == [5, 10]
    if script == "run_trainer":
        AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    else:
        assert "trainable params: " in printed and "'eval_loss'" in printed
        assert_adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")


def assert_adapted(base: Any, adapter: Path) -> None:
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(base, adapter)
    assert any(bool(value.any()) for name, value in adapted.named_parameters() if "lora_B" in name)


def test_the_quantised_example_goes_on_with_more_stages_as_one_process_would(
    example: Example, tmp_path: Path, text: Path
) -> None:
    whole, split, losses = tmp_path / "whole", tmp_path / "split", []
    arguments = ["--dataset", text, "--save-every", 3, "--steps", 5]
    for stages, folder, *more in ((1, whole), (2, split, "--resume")):
        printed = example(stages, "run_qlora", *arguments, "--stages", stages, "--output", folder, *more)
        assert "trainable params: " in printed
        losses.append([float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step ")])
        if folder == whole:
            shutil.copytree(whole, split)
    assert [len(part) for part in losses] == [5, 2] and min(losses[0][1:]) < losses[0][0] - 0.01
    assert losses[1] == pytest.approx(losses[0][3:], abs=1e-4)
    four_bits = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    packed = AutoModelForCausalLM.from_pretrained(split / "base", quantization_config=four_bits)
    assert_adapted(packed, split / "adapter")


def distilled(folder: Path, blocks: torch.Tensor, steps: int, batch: int) -> list[float]:
    """The losses of the distillation example's models in a plain loop."""
    teacher, student = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("teacher", "untrained"))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        ids = blocks[[row % len(blocks) for row in range(step * batch, (step + 1) * batch)]]
        with torch.no_grad():
            wanted = torch.log_softmax(teacher.eval()(input_ids=ids).logits / 2, -1)
        outputs = student.train()(input_ids=ids, labels=ids)
        apart = wanted.exp() * (wanted - torch.log_softmax(outputs.logits / 2, -1))
        loss = 0.5 * 4 * apart.sum(-1).mean() + 0.5 * outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def test_the_distillation_example_trains_as_a_plain_loop_with_a_teacher_or_its_logits(
    example: Example, tmp_path: Path, text: Path
) -> None:
    arguments = ["--dataset", text, "--steps", 3, "--output", tmp_path, "--length", 16]
    printed = []
    for stages, *more in ((2,), (1, "--logits", tmp_path / "logits"), (2, "--logits", tmp_path / "logits")):
        if stages == 2 and more:
            shutil.move(tmp_path / "teacher/model.safetensors", tmp_path / "teacher.safetensors")  # of no use now
            more += ["--teacher", tmp_path / "teacher", "--student", tmp_path / "untrained"]
        printed.append(example(stages, "run_distillation", *arguments, "--stages", stages, *more))
    shutil.move(tmp_path / "teacher.safetensors", tmp_path / "teacher/model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "teacher")
    expected = distilled(tmp_path, token_blocks(tokenizer, read_texts(str(text), 200_000), 16), 3, 8)
    assert expected[2] < expected[0]
    for lines in printed:
        losses = [float(line.split()[-1]) for line in lines.splitlines() if line.startswith("step ")]
        assert losses == pytest.approx(expected, abs=1e-4)
    AutoModelForCausalLM.from_pretrained(tmp_path / "student")


def drawn_by_diffusers(base: Path, adapter: Path | None) -> torch.Tensor:
    """An image of a plain pipeline of tiny parts, without text encoders."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

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


def test_the_diffusion_example_gives_the_same_curve_and_image_on_any_number_of_stages(
    example: Example, tmp_path: Path
) -> None:
    """The run of one process, and its last steps again on three stages, from its checkpoint."""
    one, several, curves = tmp_path / "one", tmp_path / "several", []
    for stages, folder, *more in ((1, one), (3, several, "--resume")):
        options = ["--steps", 6, "--save-every", 4, "--stages", stages, "--output", folder]
        example(stages, "run_diffusion_lora", *options, *more)
        curves.append(json.loads((folder / "curve.json").read_text()))
        if folder == one:
            shutil.copytree(one, several, ignore=shutil.ignore_patterns("adapter", "curve.json"))
    whole, resumed = curves
    assert resumed["losses"][:4] == whole["losses"][:4] and len(whole["losses"]) == 6
    for name in ("losses", "validation"):
        assert resumed[name] == pytest.approx(whole[name], abs=1e-5)
    image = drawn_by_diffusers(one / "base", one / "adapter")
    torch.testing.assert_close(drawn_by_diffusers(one / "base", several / "adapter"), image, rtol=0, atol=1e-5)
    assert (image - drawn_by_diffusers(one / "base", None)).abs().max() > 1e-3


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


# ---------------------------------------------------------------- pipelines that differ


def losses_of(folder: Path) -> list[float]:
    losses = json.loads((folder / "losses.json").read_text())
    assert all(math.isfinite(loss) for loss in losses)
    return losses


@pytest.mark.parametrize(
    ("name", "auto_class"),
    [
        ("bert", AutoModelForSequenceClassification),
        ("llama", AutoModelForCausalLM),
        ("opt", AutoModelForCausalLM),
        ("vit", AutoModelForImageClassification),
    ],
)
def test_every_example_ends_with_a_checkpoint_for_plain_transformers(
    example: Example, tmp_path: Path, text: Path, name: str, auto_class: type
) -> None:
    source = ["--dataset", text] if auto_class is AutoModelForCausalLM else []
    options = ["--pipelines", "1x1,2x2", "--steps", 2, "--output", tmp_path, "--plot", f"{tmp_path}/plot.svg"]
    example(3, f"run_{name}", *options, *source)
    assert len(losses_of(tmp_path / name)) == 2 and (tmp_path / "plot.svg").exists()
    reloaded = auto_class.from_pretrained(tmp_path / name)
    assert all(torch.isfinite(parameter).all() for parameter in reloaded.parameters())


def test_an_example_goes_on_from_a_checkpoint_of_its_own(example: Example, tmp_path: Path, text: Path) -> None:
    """`--model` and `--dataset`, and bf16."""
    common = ["--pipelines", "1x2", "--steps", 1, "--dataset", text]
    example(1, "run_gpt2", *common, "--output", tmp_path / "first")
    again = ["--model", tmp_path / "first/gpt2", "--precision", "bf16", "--output", tmp_path / "second"]
    example(1, "run_gpt2", *common, *again)
    assert losses_of(tmp_path / "second/gpt2")[0] < losses_of(tmp_path / "first/gpt2")[0]


def test_an_example_resumes_on_other_pipelines(example: Example, tmp_path: Path, text: Path) -> None:
    common = ["--steps", 4, "--dataset", text, "--output", tmp_path]
    example(2, "run_gpt2", "--pipelines", "1x2,1x2", "--save-every", 2, *common)
    whole = losses_of(tmp_path / "gpt2")
    shutil.rmtree(tmp_path / "gpt2/checkpoints/step-00000004")
    example(1, "run_gpt2", "--pipelines", "1x4", "--resume", *common)
    resumed = losses_of(tmp_path / "gpt2")
    assert resumed[:2] == whole[:2] and resumed[2:] == pytest.approx(whole[2:], rel=1e-4)


def test_both_launch_lines_of_the_documentation_train_alike(tmp_path: Path, text: Path) -> None:
    """One machine with two processes, and two `--nnodes 2` launches with one each; they end as interpreters do."""
    whole = {"WHOLE_END": "1"}
    options = [EXAMPLES / "run_gpt2.py", "--dataset", text, "--steps", "3", "--output"]
    result = torchrun(2, *options, tmp_path / "one", timeout=170, environment=whole)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "1 pipeline(s) on 2 rank(s)" in result.stdout
    assert "reloaded with plain transformers: GPT2LMHeadModel" in result.stdout
    assert "the weights of the first stage are the same: True" in result.stdout

    port = str(free_port())

    def launch(node: str) -> subprocess.CompletedProcess[str]:
        launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--node_rank", node]
        place = ["--master_addr", "127.0.0.1", "--master_port", port]
        return run_python(*launcher, *place, *options, tmp_path / "two", timeout=170, environment=whole)

    with ThreadPoolExecutor() as threads:
        first, second = threads.map(launch, "01")
    for outcome in (first, second):
        assert outcome.returncode == 0, outcome.stderr[-4000:]
    assert "1 pipeline(s) on 2 rank(s)" in first.stdout and not second.stdout
    assert losses_of(tmp_path / "two/gpt2") == losses_of(tmp_path / "one/gpt2")


def test_default_pipelines_use_every_rank() -> None:
    for world_size in range(1, 40):
        pipelines = default_pipelines(world_size)
        assert sum(stages for stages, _ in pipelines) == world_size and all(count >= 1 for _, count in pipelines)
    assert default_pipelines(4) == [(1, 2), (3, 6)]


def test_examples_are_short_and_alike() -> None:
    for name in ("gpt2", "bert", "llama", "opt", "vit"):
        text = (EXAMPLES / f"run_{name}.py").read_text()
        assert len(text.splitlines()) < 60
        for line in ("plugin = make_plugin(model, options)", "booster.boost(", "train(booster,", "finish(booster,"):
            assert line in text


# ---------------------------------------------------------------- launch scripts


def dry_run(tmp_path: Path, script: str, *arguments: str, **variables: str) -> list[str]:
    """What a launch script would call torchrun with, as srun would start it on each node."""
    record = tmp_path / "arguments"
    stubs = {
        "srun": 'exec "$@"',
        "torchrun": f"printf '%s\\n' \"$@\" > {record}",
        "scontrol": 'test "$*" = "show hostnames node[3-4]" && printf "node3\\nnode4\\n"',
    }
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name, body in stubs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    path = EXAMPLES / "launch" / script
    subprocess.run(["bash", "-n", path], check=True)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", **variables}
    result = run_command(["bash", str(path), *arguments], environment=environment, timeout=30)
    assert result.returncode == 0, result.stderr
    return record.read_text().splitlines()


SLURM = {
    "SLURM_JOB_ID": "31234",
    "SLURM_JOB_NODELIST": "node[3-4]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_GPUS_ON_NODE": "4",
}


@pytest.mark.parametrize(
    ("script", "variables", "expected"),
    [
        ("slurm_one_node.sh", SLURM, {"standalone": True, "nproc_per_node": "4"}),
        (
            "slurm_many_nodes.sh",
            {**SLURM, "SLURM_NODEID": "1"},
            {"nnodes": "2", "nproc_per_node": "4", "node_rank": 1, "master_addr": "node3", "master_port": 21234},
        ),
        (
            "slurm_many_nodes.sh",
            {**SLURM, "PROCESSES_PER_NODE": "8", "SLURM_NODEID": "0"},
            {"nproc_per_node": "8", "rdzv_backend": "static"},
        ),
        (
            "many_nodes.sh",
            {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.7"},
            {"nnodes": "2", "node_rank": 1, "master_addr": "10.0.0.7", "master_port": 29500},
        ),
    ],
)
def test_launch_scripts_start_torchrun_with_arguments_it_takes(
    tmp_path: Path, script: str, variables: dict[str, str], expected: dict[str, object]
) -> None:
    arguments = dry_run(tmp_path, script, "run_gpt2.py", "--pipelines", "3x6,5x10", EXAMPLES=str(EXAMPLES), **variables)
    parsed = get_args_parser().parse_args(arguments)
    assert {name: getattr(parsed, name) for name in expected} == expected
    assert Path(parsed.training_script).resolve() == EXAMPLES / "run_gpt2.py"
    assert parsed.training_script_args == ["--pipelines", "3x6,5x10"]


def test_the_script_for_quantised_models_spreads_one_pipeline_over_its_ranks(tmp_path: Path) -> None:
    arguments = dry_run(tmp_path, "qlora.sh", "--model", "some/model", "--rank", "16", RANKS="3")
    parsed = get_args_parser().parse_args(arguments)
    assert parsed.standalone and parsed.nproc_per_node == "3"
    assert Path(parsed.training_script).resolve() == EXAMPLES / "run_qlora.py"
    assert parsed.training_script_args == ["--stages", "3", "--model", "some/model", "--rank", "16"]


def test_launch_scripts_name_no_host_and_no_user() -> None:
    for path in (EXAMPLES / "launch").glob("*.sh"):
        text = path.read_text()
        assert "/home/" not in text and "@" not in text.replace('"$@"', "").replace("[@]", "")
        missing = run_command(["bash", str(path)], timeout=30)
        assert missing.returncode != 0 and "usage: " in missing.stderr
