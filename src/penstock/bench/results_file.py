"""Writing result files. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(content: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a result file, whole or not at all; its folder is made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, target)
