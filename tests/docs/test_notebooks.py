"""The notebooks of examples/ run from top to bottom, in one kernel, which forgets between them."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support import zygote
from tests.support.launch import ROOT


@pytest.mark.slow
def test_the_notebooks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = Path(zygote.executable())
    for name, value in zygote.environment().items() | {"PENSTOCK_STAND_IN": str(python)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("sys.executable", str(python))  # of which the kernel is made
    fit, split = (
        nbformat.read(ROOT / f"examples/notebooks/{name}.ipynb", as_version=4) for name in ("does_it_fit", "two_stages")
    )
    assert len(list((ROOT / "examples/notebooks").glob("*.ipynb"))) == 2
    for number, cell in enumerate(split.cells):
        cell.id = f"second-{number}"
    # accelerate launches nothing where bitsandbytes is imported, as it is in the zygote that the kernel is forked from.
    between = "%reset -f\nimport sys; sys.modules.pop('bitsandbytes', None)"
    cells = [*fit.cells, nbformat.v4.new_code_cell(between), *split.cells]
    both = nbformat.v4.new_notebook(cells=cells, metadata=split.metadata)
    NotebookClient(both, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))
    assert "stage 1: transformer.h." in printed and "It fits: " in printed
    assert (tmp_path / "step.svg").is_file()
    assert float(printed.rpartition("largest difference of the losses: ")[2].split()[0]) < 1e-5
    assert "GPT2LMHeadModel on 2 ranks: 1 pipeline" in printed and "<step: loss " in printed
