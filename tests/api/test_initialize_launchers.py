"""initialize() finds its place in whatever launched the processes, and in a process that nothing launched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from penstock.runtime.comm.bootstrap import find_place, first_host
from tests.support.families import FAMILIES, batch
from tests.support.launch import free_port, run_python
from tests.support.pool import Pool
from tests.support.training import EXACT, kept_in_double, parallelize, run_step, unsplit_step

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_", "OMPI_", "TORCHELASTIC_")


def variables(kind: str, rank: int, world_size: int, port: int) -> dict[str, str]:
    """What each kind of launcher sets for a process."""
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if kind == "deepspeed":
        return {**master, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    if kind == "slurm":
        return {
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": str(world_size),
            "SLURM_LOCALID": str(rank),
            "SLURM_JOB_ID": str(port - 29500 if 29500 <= port < 39500 else 4321),
            "SLURM_JOB_NODELIST": "localhost",
            **({} if 29500 <= port < 39500 else {"MASTER_PORT": str(port)}),
        }
    if kind == "openmpi":
        prefix = "OMPI_COMM_WORLD_"
        places = {prefix + "RANK": rank, prefix + "SIZE": world_size, prefix + "LOCAL_RANK": rank}
        return {**master, **{name: str(value) for name, value in places.items()}}
    return {}


def train_under(kind: str, world_size: int, port: int) -> tuple[float, int, int, bool]:
    """Under this launcher: the loss, rank, world size, and whether the ranks are one
    job."""
    rank = int(os.environ["RANK"])
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            del os.environ[name]
    os.environ.update(variables(kind, rank, world_size, port))
    assert not dist.is_initialized()
    with kept_in_double():
        model = parallelize(FAMILIES["gpt2"].build(), world_size)
        loss = sum(run_step(model, batch("causal", 4)))
    return loss, dist.get_rank(), dist.get_world_size(), model.data_parallel_size == 1


@pytest.mark.parametrize(("kind", "world_size"), [("slurm", 2), ("deepspeed", 2), ("openmpi", 2), ("none", 1)])
def test_initialize_finds_its_place(pool: Pool, kind: str, world_size: int) -> None:
    found = pool.run(world_size, train_under, kind, world_size, free_port(), init=False)
    expected = sum(unsplit_step(FAMILIES["gpt2"].build(), (batch("causal", 4), 1.0)).losses)
    for rank, (loss, its_rank, its_world, is_one_pipeline) in enumerate(found):
        assert (its_rank, its_world, is_one_pipeline) == (rank, world_size, True)
        assert loss == pytest.approx(expected, rel=EXACT)


SCRIPT = """
import atexit, sys, warnings
warnings.filterwarnings("ignore")
import torch
from transformers import GPT2Config, GPT2LMHeadModel
import penstock

# Registered earlier, so called later than what initialize() leaves for the end.
# One string, so that the two processes' words do not mix.
atexit.register(lambda: print(f"initialized at the end: {torch.distributed.is_initialized()}"))
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=16))
model = penstock.initialize(model, {"model_parallelism": {"pipeline_parallel_size": STAGES}})
ids = torch.arange(24).reshape(3, 8)
losses = []
for out in model(input_ids=ids, labels=ids):
    out.loss.backward()
    losses.append(float(out.loss))
rank = torch.distributed.get_rank()
open(f"{sys.argv[-1]}.{rank}", "w").write(f"{sum(losses):.6f} {len(list(model.parameters()))} {sys.argv[1:-1]}")
"""


def outcomes(folder: Path, world_size: int) -> list[list[str]]:
    return [(folder / f"report.{rank}").read_text().split(maxsplit=2) for rank in range(world_size)]


def test_the_older_launcher_with_its_argument_works(tmp_path: Path) -> None:
    """`python -m torch.distributed.launch` passes --local-rank to the script."""
    (tmp_path / "script.py").write_text(SCRIPT.replace("STAGES", "2"))
    launcher = ["-m", "torch.distributed.launch", "--nproc_per_node=2", f"--master_port={free_port()}"]
    result = run_python(*launcher, "script.py", tmp_path / "report", timeout=150, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("initialized at the end: False") == 2, "a script may end without closing anything"
    first, second = outcomes(tmp_path, 2)
    assert first[0] == second[0]
    assert "local-rank=0" in first[2] or "local_rank=0" in first[2]


def test_a_plain_process_is_a_pipeline_of_one_stage(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("STAGES", "1"))
    environment = {name: "" for name in os.environ if name.startswith(LAUNCHERS)}
    arguments = ("script.py", tmp_path / "report")
    result = run_python(*arguments, timeout=100, environment=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    assert 3 < float(outcomes(tmp_path, 1)[0][0]) < 6  # about the logarithm of 61


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("1", "2", None)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, ("3", "8", "1")),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8"},
            ("0", "2", "0"),
        ),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, ("1", "4", None)),
    ],
)
def test_the_nearest_launcher_decides(environment: dict[str, str], expected: Any) -> None:
    """torchrun inside a SLURM job is torchrun's; a job of one task is one process."""
    place = find_place(environment)
    found = place and (place["RANK"], place["WORLD_SIZE"], place.get("LOCAL_RANK"))
    assert found == expected


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("one", "2"), ("0", "")])
def test_a_place_outside_the_world_is_refused(rank: str, size: str) -> None:
    with pytest.raises(ValueError, match="launcher's environment says rank"):
        find_place({"RANK": rank, "WORLD_SIZE": size})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[03-06,9],login1", "gpu03"),
        ("login1,gpu[03-06]", "login1"),
        ("node7", "node7"),
        ("a-b[1,3]", "a-b1"),
        ("rack[0-1]_blade[00-03],login1", "rack0_blade00"),
        ("", "127.0.0.1"),
    ],
)
def test_the_first_host_of_a_slurm_list_is_the_master(nodes: str, host: str) -> None:
    assert first_host({"SLURM_JOB_NODELIST": nodes}) == host
