"""The check for real GPUs, where two ranks share the only one."""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.schedule import schedule_names
from tests.support.emulated_gpu import emulated_device
from tests.support.launch import ROOT, run_python

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("device", "check"),
    [
        ("emulated", "float16 autocast"),
        ("emulated", "a rank is killed, others wait"),
        ("cpu", "a base in 4 bits"),
    ],
)
def test_the_checks_pass_where_there_is_no_gpu(device: str, check: str) -> None:
    if device == "emulated":
        missing = emulated_device.missing_compiler()
        if missing is not None:
            pytest.skip(missing)
        emulated_device.build()  # once for both ranks
    arguments = ["--device", device, "--only", check]
    result = run_python(str(ROOT / "benchmarks/studies/gpu_check.py"), *arguments, timeout=150)
    rows = [line for line in result.stdout.splitlines() if line.startswith(f"| {check}")]
    assert ("The ranks share one GPU" in result.stdout) == (device == "emulated")
    assert len(rows) == 1 and "| passed |" in rows[0] and result.returncode == 0, result.stdout + result.stderr[-2000:]


SANITIZER = """#!/bin/sh
echo ran >> "{log}"
while [ "${{1#--}}" != "$1" ]; do shift 2; done
exec "$@"
"""
# What the result of each kind of row has in it.
FOUND = {
    "stage": r"tokens/s; .*MFU.*; overhead [+-][\d.]+%; the host is busy for [\d.]+ of a step$",
    "memory": r"rank 0: .*, predicted [\d.]+ of it; rank 1: .*, predicted [\d.]+ of it",
    "exact": r"gradients within \de-\d+",
    "kill ": r"rank 1 named after [\d.]+ s",
}


def test_every_row_for_one_card_passes_on_the_emulated_device(tmp_path: Path) -> None:
    """A figure of speed means nothing there; that fit is within 10 % and that no host reads are among what passes."""
    missing = emulated_device.missing_compiler()
    if missing is not None:
        pytest.skip(missing)
    emulated_device.build()
    sanitizer, log = tmp_path / "compute-sanitizer", tmp_path / "log"
    sanitizer.write_text(SANITIZER.format(log=log))
    sanitizer.chmod(0o755)
    script, output = ROOT / "benchmarks/studies/gpu_stage.py", tmp_path / "result"
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    result = run_python(script, "--device", "emulated", "--output", output, timeout=550, environment=environment)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    found = json.loads(output.with_suffix(".json").read_text())
    assert found["card"] == "emulated" and found["environment"]["versions"]["torch"] and found["environment"]["date"]
    table = [line.split(" | ") for line in output.with_suffix(".md").read_text().splitlines() if line.startswith("| ")]
    rows = {what.removeprefix("| "): (how, said.removesuffix(" |")) for what, how, _, said in table}
    packs = find_spec("bitsandbytes") is not None
    for way in ("eager, 64", "eager, 128", "LoRA, 64", "compiled, 64", *["nf4, 64"] * packs):
        assert any(what.startswith(f"stage, {way} tokens") for what in rows)
    assert sum(what.startswith("memory") for what in rows) == 6
    assert {f"{name}, 4 steps" for name in schedule_names()} < set(rows)
    assert sum(what.startswith("kill ") for what in rows) == 4 and rows["kills"][1].startswith("4 of 4 named")
    for what, (how, said) in rows.items():
        if "4 steps" in what or "racecheck" in what:
            kind = "exact"
        else:
            kind = next((kind for kind in FOUND if what.startswith(kind)), "")
        if "nf4" in what and not packs:
            assert (how, said) == ("left out", "bitsandbytes is not installed")
        elif kind:
            assert how == "passed" and re.search(FOUND[kind], said), (what, how, said)
    assert log.read_text().split() == ["ran", "ran"], "the sanitizer runs both ranks"


def test_what_a_machine_has_not_is_left_out_by_name(tmp_path: Path) -> None:
    script, options = ROOT / "benchmarks/studies/gpu_stage.py", ("--device", "cpu", "--sections", "sanitizer")
    result = run_python(script, *options, environment={"PATH": str(tmp_path)})
    assert "| 1f1b under racecheck | left out |  | there is no compute-sanitizer |" in result.stdout
    result = run_python(script, *options[:3], "kills", "--minutes", "0")
    assert "| kill 4 | left out |  | no time |" in result.stdout and result.returncode == 0
