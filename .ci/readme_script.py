"""Write the README's script to FOLDER/script.py, beside a small local model of the name it uses."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from tests.support.local_hub import local_hub  # noqa: E402  # a helper of the tests

folder = Path(sys.argv[1])
folder.mkdir(parents=True)
local_hub(folder)
section = (ROOT / "README.md").read_text().partition("## In your script")[2]
block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
assert block is not None, "the README has no script"
(folder / "script.py").write_text(block[1])
