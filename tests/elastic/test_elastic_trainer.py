"""The Trainer in elastic runs: processes are lost, come and leave, and the run is that of the plain Trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainingArguments

from penstock import Elastic, HeterogeneousParallelPlugin
from penstock.trainer.pipeline_trainer import PipelineTrainer
from tests.support import elastic_trainer_script
from tests.support.elastic_runs import Run
from tests.support.families import FAMILIES
from tests.support.launch import ROOT
from tests.support.pool import Pool

pytestmark = pytest.mark.slow

STEPS = 10
# The environment of a launcher, of a world of one process.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


class TrainerRun(Run):
    script = ROOT / "tests" / "support" / "elastic_trainer_script.py"


def undisturbed(folder: Path, steps: int = STEPS, **environment: str) -> list[dict[str, Any]]:
    """What a single process notes, the plain Trainer's by default."""
    folder.mkdir()
    run = TrainerRun(folder, steps, 1, store="", **environment)
    member = run.start()
    run.wait()
    assert member.status == 0, member.printed()
    return [json.loads(line) for line in (folder / "undisturbed.jsonl").read_text().splitlines()]


def assert_same_history(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [set(one) for one in found] == [set(one) for one in expected]
    for ours, theirs in zip(found, expected, strict=True):
        # The Trainer adds losses up in single precision.
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-7)


def assert_same_weights(ours: Path, theirs: Path) -> None:
    found, expected = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert set(found) == set(expected)
    assert max(float((found[name] - expected[name]).abs().max()) for name in found) < 1e-9


def history_of(notes: list[dict[str, Any]]) -> list[dict[str, float]]:
    return next(note["history"] for note in notes if "history" in note)


def test_processes_are_lost_in_steps_and_evaluations_and_one_joins(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "plain")
    run = TrainerRun(tmp_path, STEPS, 5)
    run.start("kill@2/forward")  # rank 0
    run.start("kill@4/evaluation")
    run.start("kill@8/evaluated")  # when the others have evaluated as well, which they do once more
    stays = run.start("await@6/begin")
    run.start("leave@8/between")
    run.begin()
    joins = run.start()
    run.wait()
    assert [member.status for member in run.members] == [-9, -9, -9, 0, 0, 0], run.printed()
    for member in (stays, joins):
        assert_same_history(history_of(member.notes)[:-1], history_of(expected)[:-1])
        train_loss = [history_of(notes)[-1]["train_loss"] for notes in (member.notes, expected)]
        assert train_loss[0] == pytest.approx(train_loss[1], rel=1e-6)
        assert member.end["worse"] == expected[-1]["worse"] > 0
    assert_same_weights(tmp_path / "final", tmp_path / "plain" / "final")
    changes = stays.end["changes"]
    assert [bool(change["lost"]) for change in changes] == [True, True, False, True, False]
    # One process at a time logs as the first.
    logged = [note["done"] for member in run.members for note in member.notes if "done" in note and note["first"]]
    assert sorted(logged) == list(range(STEPS)), run.printed()


class Repeating:
    """An elastic run in which whatever is to be done is done again for the sake of a rank that did not see its end."""

    in_call = False
    engine = SimpleNamespace(together=lambda call: nullcontext({}))

    def run_without_gradients(self, work: Callable[[], Any]) -> Any:
        work()
        return work()


def test_what_is_done_again_for_others_leaves_nothing_behind(tmp_path: Path) -> None:
    plugin = HeterogeneousParallelPlugin(
        elastic=Elastic(tmp_path.joinpath("store").as_uri()), global_batch_size=8, microbatch_size=2
    )
    arguments = TrainingArguments(str(tmp_path), per_device_train_batch_size=2, report_to="none", use_cpu=True)
    patience = EarlyStoppingCallback(100)
    trainer = PipelineTrainer(FAMILIES["gpt2"].build(), arguments, parallelism=plugin, callbacks=[patience])
    plugin.run = Repeating()  # type: ignore[assignment]  # what the Trainer asks of one

    def evaluate() -> int:
        trainer.state.log_history.append({"eval_loss": 1.0})
        patience.early_stopping_patience_counter += 1
        trainer.control.should_save = len(trainer.state.log_history) == 1
        trainer.model.eval()
        return len(trainer.state.log_history)

    assert trainer.pipelines.repeated_after_loss(evaluate) == 1
    assert trainer.state.log_history == [{"eval_loss": 1.0}] and patience.early_stopping_patience_counter == 1
    assert trainer.control.should_save and not trainer.model.training


def test_a_run_whose_processes_are_killed_or_all_leave_is_resumed_by_another_number(tmp_path: Path) -> None:
    how = {"DROPOUT": "0.1", "SAMPLING": "random"}
    expected = history_of(undisturbed(tmp_path / "plain", 6, PLUGIN_ALONE="1", **how, **ALONE))
    run = TrainerRun(tmp_path, 6, 3, **how)
    run.start("kill@4/saving")
    run.start("kill@5/between")
    run.start("kill@5/between")
    run.wait()
    assert [member.status for member in run.members] == [-9, -9, -9], run.printed()
    leaves = TrainerRun(tmp_path, 6, 2, RESUME="1", **how)
    members = [leaves.start("leave@4/begin") for _ in range(2)]
    leaves.wait()
    for member in members:  # after a step that the Trainer would not have saved
        assert member.status == 75 and [note["done"] for note in member.notes if "done" in note] == [4]
        words = "the run ends unfinished at step 5 of 6: all its members were told to leave it; saved in "
        assert f"{words}{tmp_path / 'run' / 'checkpoint-5'}" in member.printed()
    again = TrainerRun(tmp_path, 6, 2, RESUME="1", **how)
    members = [again.start() for _ in range(2)]
    again.wait()
    assert [member.status for member in members] == [0, 0], again.printed()
    for member in members:
        assert member.notes[0]["done"] == 5
        assert_same_history(history_of(member.notes)[:-1], expected[:-1])
    assert_same_weights(tmp_path / "final", tmp_path / "plain" / "final")


def run_unlike(folder: str, **options: Any) -> None:
    AcceleratorState._reset_state(True)
    os.environ |= {"STAGES": "1,2", **options}
    elastic_trainer_script.main("", folder, 6, 1)


def test_unlike_pipelines_train_as_one_process(pool: Pool, tmp_path: Path) -> None:
    """Also with smoothed labels, and where a callback ends an epoch."""
    options = {"STOP": "2", "SMOOTHING": "0.1", "FAMILY": "llama"}
    expected = undisturbed(tmp_path / "plain", 6, **options)
    folder = tmp_path / "unlike"
    folder.mkdir()
    pool.run(3, run_unlike, str(folder), timeout=200, PLUGIN_ALONE="1", **options)
    notes = [json.loads(line) for line in (folder / "undisturbed.jsonl").read_text().splitlines()]
    assert_same_history(history_of(notes)[:-1], history_of(expected)[:-1])
    assert_same_weights(folder / "final", tmp_path / "plain" / "final")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps does not work with a plugin"),
        ({"per_device_train_batch_size": 8}, "give the plugin's microbatch_size, 2"),
        ({"bf16": True}, "precision='bf16'"),
        ({"eval_on_start": True, "eval_strategy": "steps"}, "a process that joins would evaluate alone"),
        ({"train_sampling_strategy": "group_by_length"}, "use 'random' or 'sequential'"),
        ({"dataloader_persistent_workers": True, "dataloader_num_workers": 1}, "dataloader_persistent_workers"),
    ],
)
def test_what_does_not_go_with_a_plugin_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    plugin = HeterogeneousParallelPlugin(
        elastic=Elastic(tmp_path.joinpath("store").as_uri()), global_batch_size=8, microbatch_size=2
    )
    options = {"per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True, **changes}
    model = FAMILIES["gpt2"].build()
    with pytest.raises(ValueError, match=named):
        PipelineTrainer(model, TrainingArguments(str(tmp_path), **options), parallelism=plugin)


def test_an_elastic_trainer_evaluates_after_training_began(tmp_path: Path) -> None:
    plugin = HeterogeneousParallelPlugin(
        elastic=Elastic(tmp_path.joinpath("store").as_uri()), global_batch_size=8, microbatch_size=2
    )
    arguments = TrainingArguments(str(tmp_path), per_device_train_batch_size=2, report_to="none", use_cpu=True)
    trainer = PipelineTrainer(FAMILIES["gpt2"].build(), arguments, eval_dataset=[{}], parallelism=plugin)
    with pytest.raises(RuntimeError, match=r"parallelised by train\(\)"):
        trainer.evaluate()
