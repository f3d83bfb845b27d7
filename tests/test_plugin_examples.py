"""The run_<model>.py examples, as a user starts them, and the launch scripts, dry."""

import json
import math
import runpy
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSequenceClassification

from launch import ROOT, free_port, run_command, run_python, torchrun
from pool import Pool

sys.path.insert(0, str(ROOT / "examples"))
from common import default_pipelines, images

EXAMPLES = ROOT / "examples"
SCRIPTS = ("gpt2", "bert", "llama", "opt", "vit")


def losses_of(folder: Path) -> list[float]:
    losses = json.loads((folder / "losses.json").read_text())
    assert all(math.isfinite(loss) for loss in losses)
    return losses


def example(name: str, arguments: list[str]) -> None:
    """On a worker: the script, in the environment that torchrun would give it."""
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [f"run_{name}.py", *arguments]
    runpy.run_path(str(EXAMPLES / f"run_{name}.py"), run_name="__main__")


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
    pool: Pool, tmp_path: Path, name: str, auto_class: type
) -> None:
    arguments = ["--pipelines", "1x1,2x2", "--steps", "2", "--output", str(tmp_path), "--plot", f"{tmp_path}/plot.svg"]
    pool.run(3, example, name, arguments, init=False, timeout=120)
    assert len(losses_of(tmp_path / name)) == 2 and (tmp_path / "plot.svg").exists()
    reloaded = auto_class.from_pretrained(tmp_path / name)
    assert all(torch.isfinite(parameter).all() for parameter in reloaded.parameters())


def test_an_example_goes_on_from_a_checkpoint_of_its_own(pool: Pool, tmp_path: Path) -> None:
    """`--model` and `--dataset`, and bf16."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    common = ["--pipelines", "1x2", "--steps", "1", "--dataset", str(text)]
    pool.run(1, example, "gpt2", [*common, "--output", str(tmp_path / "first")], init=False, timeout=120)
    again = [*common, "--model", str(tmp_path / "first" / "gpt2"), "--precision", "bf16"]
    pool.run(1, example, "gpt2", [*again, "--output", str(tmp_path / "second")], init=False, timeout=120)
    assert losses_of(tmp_path / "second" / "gpt2")[0] < losses_of(tmp_path / "first" / "gpt2")[0]


def test_an_example_resumes_on_other_pipelines(pool: Pool, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} brown foxes jump over {number * 7} lazy dogs\n" for number in range(400)))
    common = ["--steps", "4", "--dataset", str(text), "--output", str(tmp_path)]
    pool.run(2, example, "gpt2", ["--pipelines", "1x2,1x2", "--save-every", "2", *common], init=False, timeout=120)
    whole = losses_of(tmp_path / "gpt2")
    shutil.rmtree(tmp_path / "gpt2" / "checkpoints" / "step-00000004")
    pool.run(1, example, "gpt2", ["--pipelines", "1x4", "--resume", *common], init=False, timeout=120)
    resumed = losses_of(tmp_path / "gpt2")
    assert resumed[:2] == whole[:2] and resumed[2:] == pytest.approx(whole[2:], rel=1e-4)


@pytest.mark.slow
def test_both_launch_lines_of_the_documentation_train_alike(tmp_path: Path) -> None:
    """One machine with four processes, and two `--nnodes 2` launches with two each; pipelines chosen by world size."""
    options = ["--steps", "3", "--output"]
    result = torchrun(4, EXAMPLES / "run_gpt2.py", *options, tmp_path / "one", timeout=170)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "2 pipeline(s) on 4 rank(s)" in result.stdout
    assert "reloaded with plain transformers: GPT2LMHeadModel" in result.stdout
    assert "the weights of the first stage are the same: True" in result.stdout

    port, outcomes = str(free_port()), {}

    def launch(node: int) -> None:
        outcomes[node] = run_python(
            *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node_rank", str(node)),
            *("--master_addr", "127.0.0.1", "--master_port", port, EXAMPLES / "run_gpt2.py"),
            *(*options, tmp_path / "two"),
            timeout=170,
        )

    nodes = [threading.Thread(target=launch, args=(node,)) for node in (0, 1)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join()
    for node, outcome in outcomes.items():
        assert outcome.returncode == 0, f"node {node}: {outcome.stderr[-4000:]}"
    assert "2 pipeline(s) on 4 rank(s)" in outcomes[0].stdout and not outcomes[1].stdout
    assert losses_of(tmp_path / "two" / "gpt2") == losses_of(tmp_path / "one" / "gpt2")


def test_default_pipelines_use_every_rank() -> None:
    for world_size in range(1, 40):
        pipelines = default_pipelines(world_size)
        assert sum(stages for stages, _ in pipelines) == world_size and all(count >= 1 for _, count in pipelines)
    assert default_pipelines(4) == [(1, 2), (3, 6)]


def test_images_come_from_folders_by_class(tmp_path: Path) -> None:
    from PIL import Image

    for label, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
        (tmp_path / label).mkdir()
        Image.new("RGB", (10, 6), colour).save(tmp_path / label / "one.png")
    found = images(str(tmp_path), 8)
    assert (len(found), found.num_labels, [found[i]["labels"] for i in range(2)]) == (2, 2, [0, 1])
    assert found[1]["pixel_values"].shape == (3, 8, 8)
    assert found[1]["pixel_values"][:, 0, 0].tolist() == [1.0, -1.0, -1.0]


def test_examples_are_short_and_alike() -> None:
    for name in SCRIPTS:
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
    assert Path(parsed.training_script) == EXAMPLES / "run_gpt2.py"
    assert parsed.training_script_args == ["--pipelines", "3x6,5x10"]


def test_launch_scripts_name_no_host_and_no_user() -> None:
    for path in (EXAMPLES / "launch").glob("*.sh"):
        text = path.read_text()
        assert "/home/" not in text and "@" not in text.replace('"$@"', "").replace("[@]", "")
        missing = run_command(["bash", str(path)], timeout=30)
        assert missing.returncode != 0 and "usage: " in missing.stderr
