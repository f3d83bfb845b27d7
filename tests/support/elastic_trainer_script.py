"""A process of an elastic run of the Trainer, for tests, in double precision. As elastic_script.py, with which it
shares its orders.

    python elastic_trainer_script.py STORE FOLDER STEPS START WHAT...

Without a STORE the run is the undisturbed one of a single process: of the plain Trainer, or with PLUGIN_ALONE of a
plugin without `elastic=`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from penstock import Elastic, HeterogeneousParallelPlugin, PipelineTemplate
from penstock.runtime.failures import ring
from penstock.trainer.pipeline_trainer import PipelineTrainer
from tests.support.elastic_script import ACTIONS, GLOBAL_BATCH, MICROBATCH, Noting, Samples
from tests.support.families import FAMILIES
from tests.support.training import kept_in_double


class Rows(Samples):
    """Labels of unequal number, so that a mean over microbatches would not do."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        labels = row.clone()
        labels[: index % 5] = -100
        return {"input_ids": row, "labels": labels}


def main(store: str, folder: str, steps: int, start: int, *orders: str) -> None:
    faulthandler.enable()
    torch.manual_seed(0)
    alone = not store and "PLUGIN_ALONE" not in os.environ
    model: Any = FAMILIES[os.environ.get("FAMILY", "gpt2")].build(dropout=float(os.environ.get("DROPOUT", "0")))
    own = store or os.environ.get("RANK", "0") != "0"
    note = Noting(Path(folder) / (f"{os.getpid()}.jsonl" if own else "undisturbed.jsonl"))
    plugin: Any = None
    if store:
        ring.NEWS_SECONDS = 1.0  # who is lost while a ring forms never comes
        templates = [PipelineTemplate(type(model).__name__, stages) for stages in json.loads(os.environ["TEMPLATES"])]
        elastic = Elastic(store, start=start, templates=templates, copies=2)
        plugin = HeterogeneousParallelPlugin(
            elastic=elastic, global_batch_size=GLOBAL_BATCH, microbatch_size=MICROBATCH
        )
    elif not alone:
        plugin = HeterogeneousParallelPlugin(microbatch_size=MICROBATCH)
        stages = [int(one) for one in os.environ.get("STAGES", "1").split(",")]
        counts = {1: [GLOBAL_BATCH // MICROBATCH], 2: [3, GLOBAL_BATCH // MICROBATCH - 3]}[len(stages)]
        plugin.set_pipelines([PipelineTemplate.balanced(model, depth) for depth in stages], counts)
    done: set[str] = set()

    def here(place: str) -> None:
        run = None if plugin is None else plugin.run
        now = -1 if run is None else run.step
        for order in orders:
            action, _, where = order.partition("@")
            if where in (f"{now}/{place}", f"any/{place}") and order not in done:
                done.add(order)
                if action == "await":  # until somebody asks to join
                    while run is not None and not run.generations.membership.asked:
                        time.sleep(0.02)
                else:
                    os.kill(os.getpid(), ACTIONS[action])

    class Telling(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            here("begin")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop = control.should_epoch_stop or str(state.global_step) == os.environ.get("STOP")

        def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            here("between")

        def on_prediction_step(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            here("evaluation")

        def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            here("saved")

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            run = None if plugin is None else plugin.run
            first = run is None or state.is_world_process_zero
            if "loss" in logs:
                note(done=state.global_step - 1, scale=None, rate=logs["learning_rate"], first=first, **logs)
            elif "eval_loss" in logs:
                note(evaluated=state.global_step, first=first, **logs)
                here("evaluated")

    class Noticed(PipelineTrainer):
        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            here("saving")
            super()._save_optimizer_and_scheduler(output_dir)

    arguments = TrainingArguments(
        output_dir=str(Path(folder) / "run"),
        max_steps=steps,
        per_device_train_batch_size=GLOBAL_BATCH if alone else MICROBATCH,
        per_device_eval_batch_size=4,
        train_sampling_strategy=os.environ.get("SAMPLING", "sequential"),
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
        save_total_limit=2,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so that every evaluation but the first is a worse one
        label_smoothing_factor=float(os.environ.get("SMOOTHING", "0")),
        report_to="none",
        use_cpu=True,
        disable_tqdm=bool(os.environ.get("SILENT")),
        dataloader_pin_memory=False,
    )
    patience = EarlyStoppingCallback(100)
    with kept_in_double():
        given = {
            "train_dataset": Rows(),
            "eval_dataset": [Rows()[index] for index in range(16)],
            "compute_metrics": lambda found: {"mean": float(found.predictions.mean())},
            "callbacks": [Telling(), patience],
        }
        trainer: Any
        if alone:
            trainer = Trainer(model, arguments, **given)
        else:
            trainer = Noticed(model, arguments, parallelism=plugin, **given)
        for block in model.transformer.h if hasattr(model, "transformer") else model.model.layers:
            block.register_forward_hook(lambda *_: here("forward"))
        trainer.train(resume_from_checkpoint=True if os.environ.get("RESUME") else None)
        trainer.save_model(str(Path(folder) / "final"))
    changes = [] if not store else [vars(change) for change in trainer.pipelines.booster.changes]
    history = [
        {k: v for k, v in one.items() if not any(word in k for word in ("runtime", "per_second"))}
        for one in trainer.state.log_history
    ]
    note(changes=changes, history=history, worse=patience.early_stopping_patience_counter, at=time.time())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
