"""A process of an elastic run, for tests: trains in double precision, notes what it saw, and ends itself where it is
told to.

    python elastic_script.py STORE FOLDER STEPS START WHAT...

Each WHAT is `action@step/place`: this process does it when it comes there first (kill, stop, leave, sleep,
late, kill-store, stop-store, or await others), whatever the step with `any` for it. Without a STORE ("") the run is the
undisturbed one, of a single process.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import penstock.elastic.generations as generations
import penstock.elastic.meeting as meeting
import penstock.runtime.failures.ring as ring
import penstock.runtime.formation as formation
import penstock.sharded_optimizer.updates as updates
from penstock import Booster, CheckpointManager, Elastic, HeterogeneousParallelPlugin, PipelineTemplate
from tests.support.audit import unpickling
from tests.support.families import FAMILIES, VOCABULARY
from tests.support.training import kept_in_double

NUM_SAMPLES, GLOBAL_BATCH, MICROBATCH = 48, 8, 2
# What a process does to itself, and where.
ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}


class Samples:
    """Sequences that tell which they are, by their first two tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.rows = torch.randint(3, VOCABULARY, (NUM_SAMPLES, 8), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "labels": self.rows[index], "index": index}


class Noting:
    """Writes what this process saw, line by line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def __call__(self, **what: Any) -> None:
        self._file.write(json.dumps(what) + "\n")


def main(store: str, folder: str, steps: int, start: int, *orders: str) -> None:
    faulthandler.enable()
    torch.manual_seed(0)
    family, settings = os.environ.get("FAMILY", "gpt2"), json.loads(os.environ.get("MODEL", "{}"))
    model: Any = FAMILIES[family].build(dropout=0.1, **settings)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(filter(None, os.environ.get("FROZEN", "").split(",")))))
    whole = list(model.parameters())
    note = Noting(Path(folder) / (f"{os.getpid()}.jsonl" if store else "undisturbed.jsonl"))
    options: dict[str, Any] = {"microbatch_size": MICROBATCH, "max_norm": 0.5}
    options |= json.loads(os.environ.get("PLUGIN", "{}"))
    templates = [PipelineTemplate(type(model).__name__, stages) for stages in json.loads(os.environ["TEMPLATES"])]
    if store:
        hang, copies = float(os.environ.get("HANG", "60")), int(os.environ.get("COPIES", "2"))
        elastic = Elastic(store, start=start, hang_timeout=hang, templates=templates, copies=copies)
        plugin = HeterogeneousParallelPlugin(elastic=elastic, global_batch_size=GLOBAL_BATCH, **options)
    else:
        plugin = HeterogeneousParallelPlugin(**options)
        plugin.set_pipelines(templates, [GLOBAL_BATCH // MICROBATCH])
    ring.NEWS_SECONDS = 1.0  # who is lost while a ring forms never comes
    for owner, name in ((generations, "FORMING"), (meeting, "ANSWER")):
        if name in os.environ:  # seconds
            setattr(owner, name, datetime.timedelta(seconds=float(os.environ[name])))
    booster = Booster(plugin=plugin)
    done: set[str] = set()

    def here(place: str) -> None:
        now = booster.step if plugin.run is not None else -1
        for order in orders:
            action, _, where = order.partition("@")
            if where in (f"{now}/{place}", f"any/{place}") and order not in done:
                done.add(order)
                if action == "late":  # until a file tells it to come
                    while not (Path(folder) / "come").exists():
                        time.sleep(0.02)
                elif action == "await":  # until somebody asks to join
                    while plugin.run is not None and not plugin.run.generations.membership.asked:
                        time.sleep(0.02)
                elif action == "sleep":
                    time.sleep(5.5)
                elif action in ("kill-store", "stop-store"):
                    os.kill(int(os.environ["STORE_PROCESS"]), ACTIONS[action.partition("-")[0]])
                else:
                    os.kill(os.getpid(), ACTIONS[action])

    def generation() -> int:
        return 0 if plugin.run is None else plugin.run.generations.now.number

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        here("data")
        run = plugin.run
        note(
            step=0 if run is None else run.step,
            generation=generation(),
            pipeline=plugin.pipeline_index,
            samples=[sample["index"] for sample in samples],
        )
        return {name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}

    class Own:
        """An object of the user's, whose state is read by the rank that writes a checkpoint."""

        def state_dict(self) -> dict[str, int]:
            if plugin.run is not None:
                here(f"saving in {plugin.run.generations.now.number}")
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            here("loading")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: here("update"))
    optimizer.register_step_post_hook(lambda *_: here("updated"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
    loader = plugin.prepare_dataloader(Samples(), shuffle=True, collate_fn=collate)
    with kept_in_double(), unpickling(lambda what: note(unpickled=what)):
        here("coming")
        model, wrapped, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
        for block in model.transformer.h if hasattr(model, "transformer") else model.model.layers:
            block.register_forward_hook(lambda *_: here("forward"))
            block.register_forward_hook(lambda *_: here(f"forward in {generation()}"))
        if plugin.run is not None:
            form = plugin.run.on_layout
            plugin.run.on_layout = lambda new: (here("forming"), here(f"forming {new.number}"), form(new))[-1]
            share = formation.share_random_state  # it follows the move

            def moved(*given: Any) -> Any:
                here("moved")
                here(f"moved in {plugin.run.generations.now.number}")
                return share(*given)

            formation.share_random_state = moved
            messages = updates._messages

            def sending(trained: Any) -> Any:
                for index, message in enumerate(messages(trained)):
                    here("sending" if index else "before sending")
                    yield message

            updates._messages = sending
        step, known = booster.step if store else 0, 0
        note(begins=step, member=0 if not store else plugin.run.generations.member)
        manager = None
        if store and (folder_of := os.environ.get("CHECKPOINTS")):
            objects = {"optimizer": wrapped, "lr_scheduler": scheduler, "dataloader": loader, "own": Own()}
            manager = CheckpointManager(folder_of, model=model, every=3, keep_last=2, **objects)
            step = manager.resume()
        batches = iter(loader)
        while step < steps:
            here("loop")
            wrapped.zero_grad()
            restored = plugin.run.num_restored if store else 0
            try:
                loss = booster.execute_pipeline(batches, model, None, wrapped)["loss"]
            except StopIteration:
                batches = iter(loader)
                continue
            here("between")
            wrapped.step()
            scheduler.step()
            step = booster.step - 1 if manager is not None else step
            if not store or plugin.run.num_restored == restored:  # else the loss in hand is that of a step that is lost
                scale = wrapped.loss_scale and wrapped.loss_scale.scale
                note(done=step, loss=loss.item(), rate=optimizer.param_groups[0]["lr"], scale=scale)
            for change in [] if not store else booster.changes[known:]:
                note(change=vars(change))
            known = len(booster.changes) if store else 0
            step += 1
            if manager is not None:
                manager.save(booster.step)
                step = booster.step
            if store:
                assert booster.step == step, (booster.step, step)
    ids = {id(parameter) for parameter in whole}
    assert all(id(parameter) in ids for parameter in model.parameters())
    sums = {name: float(value.detach().sum()) for name, value in model.named_parameters()}
    changes = [] if not store else [vars(change) for change in booster.changes]
    names = {parameter: name for name, parameter in model.named_parameters()}
    states = [names[parameter] for parameter in optimizer.state]
    note(parameters=sums, changes=changes, states=states, at=time.time())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
