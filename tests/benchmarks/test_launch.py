"""The benchmark as a user launches it: the document's lines, two agents, SLURM without SLURM, and `penstock bench`."""

import csv
import json
import os
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kinds.options import World, read_options
from torch.distributed.run import get_args_parser

from tests.support.launch import ROOT, free_port, run_command

pytestmark = pytest.mark.slow

FOLDER = ROOT / "benchmarks/suite"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
QUICK = ["--iterations=2", "--n_layer=2", "--n_embd=32", "--vocab_size=64", "--block_size=16", "--batch_size=8"]


def port() -> int:
    """The document's port, or another where somebody has it."""
    with socket.socket() as probe:
        try:
            probe.bind(("localhost", 5678))
        except OSError:
            return free_port()
    return 5678


def launch(line: str, *arguments: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    """A line of the document, typed in the folder benchmarks/suite/."""
    words = shlex.split(line.replace("localhost:5678", f"localhost:{port()}"))
    assert words.pop(0) == "torchrun"
    return run_command([*TORCHRUN, *words, *arguments], timeout=timeout, cwd=FOLDER)


def test_the_documents_line_for_ddp_works_unchanged() -> None:
    line = 'torchrun --nnodes=1 --nproc_per_node=2 --rdzv_id=100 --rdzv_endpoint="localhost:5678" trainer.py'
    result = launch(line)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "ddp: GPTTiny" in result.stdout and "tokens/s" in result.stdout


def test_the_documents_line_for_pdp_works_and_a_trace_and_the_figures_are_written(tmp_path: Path) -> None:
    result = launch(
        'torchrun --nnodes=1 --nproc_per_node=1 --rdzv_id=100 --rdzv_endpoint="localhost:5678" trainer.py '
        "--ndevice_per_proc=2 --mode=pdp",
        *QUICK,
        f"--output={tmp_path / 'deep' / 'results.json'}",
        f"--profile={tmp_path / 'trace'}",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    content = json.loads((tmp_path / "deep" / "results.json").read_text())
    assert content["figures"]["devices"] == 2 and content["options"]["mode"] == "pdp"
    assert 0 < content["figures"]["pipeline_efficiency"] <= 1 and len(content["step_seconds"]) == 2
    events = json.loads((tmp_path / "trace" / "pdp_rank0.json").read_text())["traceEvents"]
    threads = {event["tid"] for event in events if event.get("name") == "aten::addmm"}
    assert len(threads) == 2  # both devices' products


def test_two_agents_on_loopback_train_one_pipeline(tmp_path: Path) -> None:
    rendezvous = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    command = [*TORCHRUN, *rendezvous, "--node_rank={}", "trainer.py", "--mode=pp", "--pipelines=2x8", *QUICK]
    output = tmp_path / "results.json"
    commands = [[word.format(rank) for word in command] for rank in range(2)]
    commands[0].append(f"--output={output}")
    with ThreadPoolExecutor() as threads:
        first, second = threads.map(partial(run_command, timeout=150, cwd=FOLDER), commands)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr[-2000:] + second.stderr[-2000:]
    content = json.loads(output.read_text())
    assert content["world"]["size"] == 2 and content["world"]["local_size"] == 1
    assert content["options"]["pipelines"] == [[2, 8]]


def test_a_users_mistake_is_one_line_and_status_2() -> None:
    result = run_command([sys.executable, "trainer.py", "--model=GPT1T"], cwd=FOLDER)
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "GPT1T with --mode ddp" in lines[0] and "TB on a device" in lines[0]
    assert "Traceback" not in result.stderr


def test_bench_prints_one_table_and_writes_everything(tmp_path: Path) -> None:
    modes = [word for mode in ("pdp", "pp=1x4,1x4") for word in ("--mode", mode)]
    command = [sys.executable, "-m", "penstock", "bench", "--devices", "2", "-o", str(tmp_path), *modes, *QUICK]
    result = run_command(command, timeout=280)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "the same losses in all modes" in result.stdout
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert list(runs) == ["pdp", "pp=1x4,1x4"]
    assert all(f"│ {name} " in result.stdout for name in runs)
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [row["name"] for row in rows] == list(runs) and all(row["config.n_embd"] == "32" for row in rows)
    assert (tmp_path / "results.png").exists() and (tmp_path / "results.svg").exists()


# ---------------------------------------------------------------- SLURM

NODES = ["gpu-03", "gpu-04", "gpu-09", "login-free-7"]
STUBS = {
    # One task on each node, as srun starts them.
    "srun": """
        while [[ "$1" == -* ]]; do
            if [[ "$1" == --* ]]; then shift; else shift 2; fi
        done
        for node in 0 1 2 3; do
            SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 "$@" || exit $?
        done""",
    "scontrol": '[[ "$1 $2" == "show hostnames" && "$3" == "gpu-[03-04,09],login-free-7" ]] || exit 1\n'
    + "\n".join(f"echo {node}" for node in NODES),
    "torchrun": 'printf "%s\\n" "$#" "$@" >> "$CALLS"',
}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on four nodes, with stubs for SLURM's commands and torchrun."""
    for name, body in STUBS.items():
        stub = tmp_path / name
        stub.write_text(f"#!/usr/bin/env bash\n{body}\n")
        stub.chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "123456",
        "SLURM_NNODES": "4",
        "SLURM_JOB_NODELIST": "gpu-[03-04,09],login-free-7",
        "SLURM_GPUS_PER_NODE": "h100:8",
        "SLURM_SUBMIT_DIR": str(FOLDER),
    }


def calls(slurm: dict[str, str]) -> list[Any]:
    """The command lines that torchrun was given, parsed by torchrun's own parser."""
    lines = Path(slurm["CALLS"]).read_text().splitlines()
    found = []
    while lines:
        count = int(lines.pop(0))
        found.append(get_args_parser().parse_args(lines[:count]))
        del lines[:count]
    return found


RESERVE = "srun -p train -t 5:00:00 --gpus-per-node=8 --cpus-per-task=96 --nodes=4 --pty"


@pytest.mark.parametrize(
    ("script", "mode", "processes", "devices_per_process"),
    [("ddp", "ddp", 8, 1), ("pipeline", "pdp", 4, 2), ("fsdp", "fsdp", 8, 1), ("pp", "pp", 8, 1)],
)
def test_scripts_for_four_nodes_build_the_torchrun_line(
    slurm: dict[str, str], script: str, mode: str, processes: int, devices_per_process: int
) -> None:
    line = f"{RESERVE} {FOLDER}/launch_4_node_{script}.sh --model=GPTXL --output results.json"
    result = run_command(["bash", "-c", line], environment=slurm)
    assert result.returncode == 0, result.stderr
    found = calls(slurm)
    assert [call.node_rank for call in found] == [0, 1, 2, 3]
    assert all({**vars(call), "node_rank": 0} == vars(found[0]) for call in found)
    call = found[0]
    assert (call.nnodes, call.nproc_per_node, call.rdzv_backend) == ("4", str(processes), "static")
    assert (call.master_addr, call.master_port) == ("gpu-03", 29500 + 123456 % 10000)
    assert call.training_script == str(FOLDER / "trainer.py")
    world = World(4 * processes, processes, 0, 0, "cuda", 8)
    options = read_options(call.training_script_args, world)
    assert (options.mode, options.model, options.output) == (mode, "GPTXL", "results.json")
    if mode == "pp":
        assert [ranks for ranks, _ in options.pipelines] == [8] * 4  # one for each node
    assert options.num_devices(world) == 32 and options.ndevice_per_proc == devices_per_process


def test_a_batch_job_starts_the_same(slurm: dict[str, str]) -> None:
    batch = FOLDER / "launch" / "benchmark.sbatch"
    result = run_command(["bash", str(batch), "fsdp", "--model=GPT13B"], environment=slurm)
    assert result.returncode == 0, result.stderr
    assert [call.training_script_args for call in calls(slurm)] == [["--mode=fsdp", "--model=GPT13B"]] * 4
    wrong = run_command(["bash", str(batch), "fdsp"], environment=slurm)
    assert wrong.returncode == 2 and "launch_4_node_fdsp.sh" in wrong.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_JOB_ID": ""}, "no SLURM job"),
        ({"NDEVICE_PER_PROC": "3"}, "8 GPUs on a node cannot be shared out over processes with 3 each"),
    ],
)
def test_scripts_refuse_what_cannot_work(slurm: dict[str, str], changes: dict[str, str], message: str) -> None:
    result = run_command([str(FOLDER / "launch_4_node_pipeline.sh")], environment=slurm | changes)
    assert result.returncode == 2 and message in result.stderr and not Path(slurm["CALLS"]).exists()


def test_scripts_name_no_user_zone_or_host() -> None:
    texts = {path.name: path.read_text() for path in [*FOLDER.glob("*.sh"), *FOLDER.glob("launch/*")]}
    assert len(texts) == 6
    for name, text in texts.items():
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0, name
        for fixed in ("/home/", "gcloud", "us-central", "shen", "gpu-0", "#SBATCH --partition", "#SBATCH -p"):
            assert fixed not in text, (name, fixed)
