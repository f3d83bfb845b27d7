"""The notebooks of examples/ run from top to bottom, in a kernel."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from launch import ROOT

FOLDER = ROOT / "examples/notebooks"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.ipynb")))
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(FOLDER / name, as_version=4)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    if name == "two_stages.ipynb":
        assert float(printed.rpartition("largest difference of the losses: ")[2].split()[0]) < 1e-5
        assert "GPT2LMHeadModel on 2 ranks: 1 pipeline" in printed and "<step: loss " in printed
    else:
        assert "stage 1: transformer.h." in printed and "It fits: " in printed
        assert (tmp_path / "step.svg").is_file()
