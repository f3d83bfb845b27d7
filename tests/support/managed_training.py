"""A training script with a CheckpointManager that is killed and signalled. Run by tests/checkpoint/test_manager.py.

Usage: managed_training.py FOLDER STEPS [DISASTER ...]. The first start of the job meets the first disaster, the start
after it the second, and so on: `kill:RANK` ends that rank by SIGKILL at some moment, `usr1:RANK` signals it. Each rank
adds a line to FOLDER/log-RANK for each step: step, loss, samples, a random number, and the loss scale.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import penstock
from tests.support.families import FAMILIES
from tests.support.hetero import pad, samples


def disaster(disasters: list[str], step: int, began: int) -> None:
    """What this start of the job meets once it has got somewhere: after a random time, wherever it then is."""
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if step != began + 3 or start >= len(disasters):
        return
    kind, rank = disasters[start].split(":")
    if rank == os.environ["RANK"]:
        number = signal.SIGKILL if kind == "kill" else signal.SIGUSR1
        threading.Timer(random.SystemRandom().uniform(0, 0.1), os.kill, (os.getpid(), number)).start()


def main(folder: Path, num_steps: int, disasters: list[str], every: int = 2) -> None:
    torch.manual_seed(1)
    random.seed(int(os.environ["RANK"]))
    model: Any = FAMILIES["gpt2"].build(dropout=0.2, dtype=torch.float32, n_layer=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    model = penstock.initialize(model, {"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 2}})
    loader = model.prepare_dataloader(samples("gpt2", 30), 4, shuffle=True, seed=3, collate_fn=pad, num_workers=1)
    manager = penstock.CheckpointManager(
        folder / "run",
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        dataloader=loader,
        scaler=scaler,
        every=every,
        keep_last=2,
        asynchronous=True,
        on_signal=True,
    )
    step = began = manager.resume()
    with manager, (folder / f"log-{os.environ['RANK']}").open("a") as log:
        while step < num_steps:
            for inputs in loader:
                disaster(disasters, step, began)
                optimizer.zero_grad()
                loss = 0.0
                for output in model(**inputs):
                    scaler.scale(output.loss).backward()
                    loss += output.loss.item()
                scaler.unscale_(optimizer)
                model.clip_grad_norm_(1.0)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                step += 1
                line = {"step": step, "loss": loss, "samples": inputs["input_ids"].tolist(), "number": random.random()}
                line["scale"] = scaler.get_scale()
                log.write(json.dumps(line) + "\n")
                log.flush()
                manager.save(step)
                if step == num_steps:
                    break


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
