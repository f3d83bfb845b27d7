"""The check for real GPUs, where two ranks share the only one."""

from __future__ import annotations

import pytest

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


def test_a_stage_on_the_emulated_device_is_measured_and_its_host_reads_nothing() -> None:
    """A figure of speed means nothing there."""
    missing = emulated_device.missing_compiler()
    if missing is not None:
        pytest.skip(missing)
    emulated_device.build()
    arguments = ["--device", "emulated", "--sections", "stage", "--only", "stage, eager, 64"]
    result = run_python(str(ROOT / "benchmarks/studies/gpu_stage.py"), *arguments, timeout=250)
    rows = [line for line in result.stdout.splitlines() if line.startswith("| stage, eager")]
    assert rows and all("| passed |" in row and "overhead" in row for row in rows), (
        result.stdout + result.stderr[-2000:]
    )
    assert "reads" not in result.stdout and result.returncode == 0
