"""A save that is killed at any moment leaves a whole checkpoint: the previous one, or already the new one.

With the variable PENSTOCK_FUZZ every kind of save is killed at every moment, without it some at every third.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.checkpoint import files
from penstock.checkpoint.save import save_run_state
from penstock.checkpoint.staging import prepare
from penstock.checkpoint.training_state import TrainingState
from tests.support.checkpoint_ranks import (
    assert_hold_together,
    assert_holds,
    assert_same_state,
    gpt2,
    in_fork,
    kill_self,
    load,
    loaded,
    on_ranks,
    raised,
    save,
    split_copies,
    trained,
)
from tests.support.families import FAMILIES

pytestmark = pytest.mark.slow

Save = Callable[[Path, Any], Any]

# Whatever changes what a folder holds. (What is not yet flushed survives a killed process, so fsync does not count.)
CHANGES = ("replace", "rename", "remove", "unlink", "rmdir", "mkdir", "link")
SOME = 1 if "PENSTOCK_FUZZ" in os.environ else 3


def die_before_change(number: int) -> None:
    """Kill this process before the `number`th time that it changes a folder."""
    left = number

    def counted(original):
        def call(*args, **kwargs):
            nonlocal left
            if left == 0:
                kill_self()
            left -= 1
            return original(*args, **kwargs)

        return call

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))


def equals(model: torch.nn.Module, reference: torch.nn.Module) -> bool:
    state = reference.state_dict()
    return all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def kill_everywhere(template: Path, save_new: Callable[[Path], Any], every: int) -> list[Path]:
    """Kill `save_new(folder)` in copies of `template`, before every `every`th change that it makes to a folder;
    the copies, of which the last is that of a save that was not killed."""
    folders: list[Path] = []
    status = -signal.SIGKILL
    while status:
        folder = template.parent / str(number := every * len(folders))
        shutil.copytree(template, folder)

        def attempt(folder: Path = folder, number: int = number) -> None:
            die_before_change(number)
            save_new(folder)

        status = in_fork(attempt)
        assert status in (0, -signal.SIGKILL)
        folders.append(folder)
    return folders


def listing(folder: Path) -> set[tuple[str, int]]:
    return {(str(path), path.stat().st_ino) for path in folder.rglob("*") if path.is_file()}


def read_parallel(folder: Path) -> torch.nn.Module:
    (model,) = split_copies(gpt2(9), 1)
    raised(load([model], folder))
    return model


def read_merged(folder: Path) -> torch.nn.Module:
    return FAMILIES["gpt2"].build(n_layer=2).__class__.from_pretrained(folder)


def by(num_stages: int, **options: Any) -> Save:
    return lambda folder, model: raised(save(split_copies(model, num_stages), folder, **options))


def save_whole_state(folder: Path, model: Any) -> None:
    models = split_copies(model, 2)

    def work(rank: int, comm: Any) -> None:
        save_run_state(models[rank], folder, TrainingState(step=3), world_comm=comm)

    raised(on_ranks(2, work))


BIN, SHARDS = by(2, merge_checkpoints=True), by(2, merge_checkpoints=True, max_shard_size="64KB")
SAFE = by(2, merge_checkpoints=True, safe_serialization=True)


@pytest.mark.parametrize(
    ("before", "after", "readers", "every"),
    [
        ([by(3)], by(1), [read_parallel], 1),
        ([by(2)], by(2), [read_parallel], SOME),
        ([BIN], BIN, [read_merged], SOME),
        ([SHARDS], SHARDS, [read_merged], SOME),
        ([BIN], SHARDS, [read_merged], SOME),
        ([SHARDS], BIN, [read_merged], SOME),
        ([SAFE], BIN, [read_merged], SOME),
        ([BIN, SAFE], SHARDS, [read_merged], 1),
        ([save_whole_state], save_whole_state, [read_merged, read_parallel], SOME),
    ],
    ids=[
        *("3 stages, then 1", "2 stages", "merged", "shards", "to shards", "from shards", "from safetensors"),
        *("from safetensors beside an older file", "the whole state"),
    ],
)
def test_a_kill_at_every_change_leaves_a_whole_checkpoint_for_every_reader(
    before: list[Save], after: Save, readers: list[Callable[[Path], Any]], every: int, tmp_path: Path
) -> None:
    old, new, third = gpt2(1), gpt2(2), gpt2(3)
    template = tmp_path / "template"
    for age, save_old in reversed(list(enumerate(reversed(before)))):
        save_old(template, gpt2(20 + age) if age else old)
    (template / "notes.txt").write_text("mine")
    folders = kill_everywhere(template, lambda folder: after(folder, new), every)
    found: list[list[str]] = [[] for _ in readers]
    for number, folder in enumerate(folders):
        models = [read(folder) for read in readers]
        for seen, model in zip(found, models, strict=True):
            assert equals(model, old) or equals(model, new), f"{folder}: neither checkpoint is whole"
            seen.append("old" if equals(model, old) else "new")
        left = listing(folder)
        prepare(str(folder))  # a save that tidies up behind the killed one, and then cannot write
        if listing(folder) != left:
            for read, model in zip(readers, models, strict=True):
                again = read(folder)
                assert equals(again, model) or equals(again, new), f"{folder}, tidied up after the kill: not whole"
        if number % 4 == 0 or folder is folders[-1]:
            # The next save is not disturbed by what the killed one left, and leaves nothing of it.
            after(folder, third)
            for read in readers:
                assert_holds(read(folder), third)
            assert not [name for name in os.listdir(folder) if name.startswith(".")]
        assert (folder / "notes.txt").read_text() == "mine"
    for seen in found:
        assert seen[0] == "old" and seen[-1] == "new" and seen == sorted(seen, reverse=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_kill_at_every_change_leaves_the_previous_step_or_this_one(asynchronous: bool, tmp_path: Path) -> None:
    old, new = trained(1), trained(2)
    for earlier in (1, 2):
        penstock.save_checkpoint(tmp_path / "before", model=old[0], optimizer=old[1], step=earlier)

    def save_new(folder: Path) -> None:
        model, optimizer = new
        options = {"step": 3, "keep_last": 1, "asynchronous": asynchronous}
        penstock.save_checkpoint(folder, model=model, optimizer=optimizer, **options)
        penstock.finish_saving(model)

    seen = []
    folders = kill_everywhere(tmp_path / "before", save_new, SOME if asynchronous else 1)
    for folder in folders:
        found, model, optimizer = loaded(folder)
        assert not found.damaged
        seen.append(found.step)
        assert_holds(model, (new if found.step == 3 else old)[0])
        assert_same_state(optimizer, (new if found.step == 3 else old)[1])
    assert seen == sorted(seen) and set(seen) == {2, 3}
    assert os.listdir(folders[-1]) == ["step-00000003"], "older ones are removed once the newer is whole"


def test_a_failed_save_after_a_killed_one_leaves_the_killed_ones_checkpoint(tmp_path, monkeypatch) -> None:
    """Killed after its index was put in place, while its shards still were in the staging folder."""
    SHARDS(tmp_path, gpt2(1))

    def attempt() -> None:
        original = os.replace

        def replace(source, target) -> None:
            original(source, target)
            if str(target).endswith(".index.json"):
                kill_self()

        os.replace = replace
        SHARDS(tmp_path, gpt2(2))

    assert in_fork(attempt) == -signal.SIGKILL
    assert_holds(read_merged(tmp_path), gpt2(2))

    def full(path, *args) -> None:
        if "00001" in path:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(penstock.CheckpointError):
        patch.setattr(files, "flush_file", full)
        SHARDS(tmp_path, gpt2(3))
    assert_holds(read_merged(tmp_path), gpt2(2))


@pytest.mark.parametrize("options", [{}, {"merge_checkpoints": True}])
def test_a_kill_in_the_middle_of_a_file_leaves_the_previous_checkpoint(options, tmp_path) -> None:
    by(2, **options)(tmp_path, gpt2(1))

    def half(content, path) -> None:
        torch.save(content, path)
        os.truncate(path, os.path.getsize(path) // 2)
        kill_self()

    assert in_fork(lambda: by(2, save_function=half, **options)(tmp_path, gpt2(2))) == -signal.SIGKILL
    assert_hold_together([(read_merged if options else read_parallel)(tmp_path)], gpt2(1))


def test_without_hard_links_the_same_checkpoint_is_written(tmp_path, monkeypatch) -> None:
    def link(*args) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    for seed in (1, 2):
        SHARDS(tmp_path, gpt2(seed))
        assert_holds(read_merged(tmp_path), gpt2(seed))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
