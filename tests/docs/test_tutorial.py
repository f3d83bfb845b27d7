"""The published tutorial, run from its first line to its last on four ranks, with local folders as its hub."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

from tests.support.launch import ROOT, run_python
from tests.support.local_hub import local_hub

STAGES = 4


@pytest.mark.slow
def test_the_tutorial_runs_from_its_first_line_to_its_last(tmp_path: Path) -> None:
    model = local_hub(tmp_path, num_lines=44)  # 11 steps of each of its loops
    (tmp_path / "oslo-config.json").write_text(
        '// oslo-config.json\n\n{\n     "model_parallelism": {\n          "enable": true,\n'
        f'          "pipeline_parallel_size": {STAGES}\n      }}\n}}\n'
    )
    launcher = ["-m", "torch.distributed.launch", f"--nproc_per_node={STAGES}"]
    result = run_python(
        *launcher,
        ROOT / "tests" / "support" / "tutorial_script.py",
        cwd=tmp_path,
        environment={"HOME": str(tmp_path)},  # for the cache of datasets
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-6000:]

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "gpt2")
    tokens = tokenizer("I don't want a lot for Christmas. There is just one thing", return_tensors="pt")
    expected = tokenizer.decode(model.eval().generate(**tokens, num_beams=3)[0])
    assert result.stdout.count(expected) == STAGES

    saved = {path.name for path in (tmp_path / "parallel_ckpt").iterdir()}
    assert {f"pytorch_model_tp_0_pp_{stage}.bin" for stage in range(STAGES)} | {"config.json"} <= saved
    merged = {path.name for path in (tmp_path / "merged_ckpt").iterdir()}
    assert {"pytorch_model.bin", "config.json"} <= merged
    trained = GPT2LMHeadModel.from_pretrained(tmp_path / "merged_ckpt")
    before = dict(model.named_parameters())
    assert all(not torch.equal(parameter, before[name]) for name, parameter in trained.named_parameters())
