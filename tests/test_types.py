"""Type checkers take an ordinary script, and know what they are given."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.launch import ROOT

pytestmark = pytest.mark.slow

MORE = """
from transformers import GPT2Config, GPT2LMHeadModel


def parameters_of(model: GPT2LMHeadModel) -> int:
    return len(list(model.transformer.parameters()))


def train(model: penstock.PipelineModel) -> float:
    with model.no_sync():
        for out in model(input_ids=None):
            out.loss.backward()
    model.clip_grad_norm_(1.0)
    return model.pipeline.last_step.global_loss


own = penstock.initialize(GPT2LMHeadModel(GPT2Config()), pipeline_parallel_size=2)
straight = penstock.from_pretrained("gpt2", model_class=GPT2LMHeadModel, pipeline_parallel_size=2)
made = penstock.from_config(GPT2Config(), pipeline_parallel_size=2)
for each in (own, straight, made):
    print(train(each), parameters_of(each), each.transformer.wte, each.num_parameters(whole=True))
    each.save_parallelized("parts")
    each = each.from_parallelized("parts")
    each.generate(max_new_tokens=1)
model.pipeline.last_steps
"""


# What mypy has found out of torch and transformers, in half a minute, is the same until a version changes.
CACHE = f"{os.environ.get('XDG_CACHE_HOME', tempfile.gettempdir())}/penstock-mypy-{os.getuid()}"
MYPY = ("mypy", "--strict", "--config-file=", f"--cache-dir={CACHE}")


def transformers_with_few_families(folder: Path) -> None:
    """Transformers' own files, as links, in a folder that a script beside it imports them from. Only the list of
    families is short: pyright, which keeps nothing between runs, would read 2,000 files of the others each time."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    theirs, ours = Path(spec.origin).parent, folder / "transformers"
    (ours / "models").mkdir(parents=True)
    (ours / "models/__init__.py").write_text("from .auto import *\nfrom .gpt2 import *\n")
    for file in (*theirs.iterdir(), *(theirs / "models").iterdir()):
        link = ours / file.relative_to(theirs)
        if not link.exists():
            link.symlink_to(file)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("checker", [MYPY, ("pyright", "--pythonpath", sys.executable)], ids=lambda c: c[0])
def test_a_checker_takes_the_script_of_the_readme(checker: tuple[str, ...], tmp_path: Path) -> None:
    """The last line is a mistake, and the only one. Mypy takes transformers as it is installed."""
    readme = (ROOT / "README.md").read_text()
    script = readme.partition("```python\n")[2].partition("```")[0] + MORE
    (tmp_path / "script.py").write_text(script)
    if checker is not MYPY:
        transformers_with_few_families(tmp_path)
    command = [sys.executable, "-m", *checker, "script.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=580)
    faults = [line for line in result.stdout.splitlines() if ": error" in line or " - error" in line]
    assert len(faults) == 1 and "last_steps" in faults[0], result.stdout + result.stderr
    assert f":{len(script.splitlines())}:" in faults[0]
