"""Jobs that are killed, signalled and started again end as the one that was left alone."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import penstock
from tests.support import managed_training
from tests.support.checkpoint_ranks import gpt2
from tests.support.hetero import samples
from tests.support.launch import ROOT, run_python
from tests.support.pool import Pool

pytestmark = pytest.mark.slow

STEPS = 24


def alone(folder: str) -> None:
    managed_training.main(Path(folder), STEPS, [], every=1000)


def curve(folder: Path, rank: int) -> dict[int, Any]:
    """What was logged of each step, by the start of the job that finished last."""
    lines = [json.loads(line) for line in (folder / f"log-{rank}").read_text().splitlines()]
    return {line.pop("step"): line for line in lines}


def test_a_job_that_is_killed_and_signalled_trains_on_every_sample_once(pool: Pool, tmp_path: Path) -> None:
    """Under torchrun, which starts it again each time; a kill at a random moment, and a signal to one rank."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    pool.run(2, alone, str(whole), timeout=120)
    disasters = ["kill:0", "usr1:1"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--monitor-interval=0.1"]
    script = ROOT / "tests" / "support" / "managed_training.py"
    ended = run_python(*launcher, "--max-restarts=2", script, parts, str(STEPS), *disasters, timeout=240)
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert "rank 1 got SIGUSR1" in ended.stderr
    for rank in range(2):
        expected, found = curve(whole, rank), curve(parts, rank)
        assert sorted(found) == list(range(1, STEPS + 1))
        assert found == expected, "losses, samples and random numbers of every step, to the last bit"
    # Batches of four of 30 samples, so epochs of eight steps.
    ids = [sample["input_ids"].tolist() for sample in samples("gpt2", 30)]
    steps = curve(parts, 0)
    seen = sorted(
        row[: len(one)] for step in range(9, 17) for row in steps[step]["samples"] for one in ids if fits(row, one)
    )
    assert seen == sorted(ids)
    assert len(list((parts / "run").iterdir())) == 2


def fits(row: list[int], sample: list[int]) -> bool:
    """Whether a padded row is this sample."""
    return row[: len(sample)] == sample and not any(row[len(sample) :])


def test_it_saves_when_it_is_time_and_resumes_where_it_was(tmp_path: Path) -> None:
    model = gpt2(1, n_layer=1)
    manager = penstock.CheckpointManager(tmp_path, model=model, every=3, keep_last=2)
    assert manager.resume() == 0
    saved = [step for step in range(1, 11) if manager.save(step, extra={"at": step})]
    assert saved == [3, 6, 9]
    assert sorted(os.listdir(tmp_path)) == ["step-00000006", "step-00000009"]
    again = penstock.CheckpointManager(tmp_path, model=model, every=3)
    assert again.resume() == 9 and again.last is not None and again.last.extra == {"at": 9}
    for step in (6, 9):
        (tmp_path / f"step-{step:08d}" / "pytorch_model_tp_0_pp_0.safetensors").unlink()
    with pytest.raises(penstock.CheckpointError, match=r"can be loaded: .*step-00000009.*step-00000006"):
        again.resume()  # rather than begin again


def test_it_takes_a_peft_model(tmp_path: Path) -> None:
    model: Any = get_peft_model(gpt2(1, n_layer=1), LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))
    manager = penstock.CheckpointManager(tmp_path, model=model, every=1)
    assert manager.resume() == 0 and manager.save(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data.zero_()
    assert manager.resume() == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_ends_with_a_status_that_launchers_restart(number: int, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    manager = penstock.CheckpointManager(
        tmp_path, model=gpt2(1, n_layer=1), every=100, asynchronous=True, on_signal=True
    )
    assert not manager.save(7)
    os.kill(os.getpid(), number)
    with pytest.raises(SystemExit) as ended:
        manager.save(8)
    assert ended.value.code == 75 and os.listdir(tmp_path) == ["step-00000008"]
    assert signal.getsignal(number) == before
