"""A training script with the common habit: Ctrl-C, caught, and the model is saved. For test_interrupts.py.

Usage: interrupted_training.py FOLDER SECONDS STAGES SCHEDULE. It trains until it is interrupted, at most SECONDS, saves
to FOLDER/checkpoint, and writes FOLDER/done-RANK with what it saw. FOLDER/ready-RANK is there from its third step on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import penstock
from tests.support.families import FAMILIES, batch


def main() -> None:
    # As in a terminal: whoever started the tests may have had it ignored, as shells do in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    stages = int(sys.argv[3])
    model = FAMILIES["gpt2"].build(n_layer=4, n_embd=64, n_head=4)
    model = penstock.initialize(
        model,
        {"model_parallelism": {"pipeline_parallel_size": stages, "num_microbatches": 6, "schedule": sys.argv[4]}},
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = batch("causal", 12, 48)
    rank, steps = os.environ["RANK"], 0
    found: dict[str, object] = {}
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            optimizer.zero_grad()
            for output in model(**inputs):
                output.loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            steps += 1
            if steps == 3:
                (folder / f"ready-{rank}").touch()
        found["ended"] = "not interrupted"
    except KeyboardInterrupt:
        found["ended"] = "interrupted"
    start = time.monotonic()
    try:
        model.save_parallelized(folder / "checkpoint")
        found["saved"] = True
    except BaseException as error:
        found["saved"] = False
        found["error"] = f"{type(error).__name__}: {error}"
    found["seconds"] = time.monotonic() - start
    (folder / f"done-{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
