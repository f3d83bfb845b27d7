"""A save that is killed at any moment leaves a whole checkpoint: the previous one, or already the new one."""

import os
import shutil
import signal

import pytest
import torch

from checkpoint_ranks import (
    assert_hold_together,
    assert_holds,
    in_fork,
    kill_self,
    load,
    raised,
    save,
    scramble,
    split_copies,
)
from families import FAMILIES
from penstock.checkpoint import files
from penstock.checkpoint.staging import prepare

# Whatever changes what a folder holds. (What is not yet flushed survives a killed process, so fsync does not count.)
CHANGES = ("replace", "rename", "remove", "unlink", "rmdir", "mkdir", "link")


def build(seed: int) -> torch.nn.Module:
    return scramble(FAMILIES["gpt2"].build(dtype=torch.float32, n_layer=2), seed)


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


def kill_everywhere(tmp_path, save_old, save_new, read) -> None:
    """Kill `save_new(folder)` over a folder with `save_old`'s checkpoint at every change it makes; read what is left.

    `read(folder)` returns the model found there, which must be one of the two.
    """
    old, new, third = build(1), build(2), build(3)
    template = tmp_path / "template"
    save_old(template, old)
    (template / "notes.txt").write_text("mine")
    found = []
    for number in range(200):
        folder = tmp_path / str(number)
        shutil.copytree(template, folder)

        def attempt(folder=folder, number=number) -> None:
            die_before_change(number)
            save_new(folder, new)

        status = in_fork(attempt)
        assert status in (0, -signal.SIGKILL)
        model = read(folder)
        assert equals(model, old) or equals(model, new), f"killed before change {number}: neither checkpoint is whole"
        found.append("old" if equals(model, old) else "new")
        prepare(str(folder))  # a save that tidies up behind the killed one, and then cannot write
        again = read(folder)
        assert equals(again, model) or equals(again, new), f"tidied up after a kill before change {number}: not whole"
        assert (folder / "notes.txt").read_text() == "mine"
        if number % 3 == 0 or status == 0:
            # The next save is not disturbed by what the killed one left, and leaves nothing of it.
            save_new(folder, third)
            assert_holds(read(folder), third)
            assert not [name for name in os.listdir(folder) if name.startswith(".")]
        shutil.rmtree(folder)
        if status == 0:
            break
    assert status == 0
    assert found[0] == "old" and found[-1] == "new" and found == sorted(found, reverse=True)


def read_parallel(folder) -> torch.nn.Module:
    (model,) = split_copies(build(9), 1)
    raised(load([model], folder))
    return model


def read_merged(folder) -> torch.nn.Module:
    return FAMILIES["gpt2"].build(n_layer=2).__class__.from_pretrained(folder)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 1)])
def test_a_parallel_checkpoint_survives_a_kill_at_every_step(before: int, after: int, tmp_path) -> None:
    kill_everywhere(
        tmp_path,
        lambda folder, model: raised(save(split_copies(model, before), folder)),
        lambda folder, model: raised(save(split_copies(model, after), folder)),
        read_parallel,
    )


BIN, BIN_SHARDS = {}, {"max_shard_size": "64KB"}
SAFE = {"safe_serialization": True}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([BIN], BIN),
        ([BIN_SHARDS], BIN_SHARDS),
        ([BIN], BIN_SHARDS),
        ([BIN_SHARDS], BIN),
        ([SAFE], BIN),
        ([BIN, SAFE], BIN_SHARDS),
    ],
    ids=["same", "shards", "to shards", "from shards", "from safetensors", "from safetensors beside an older file"],
)
def test_plain_transformers_finds_a_whole_checkpoint_after_a_kill_at_every_step(before, after, tmp_path) -> None:
    def save_old(folder, model) -> None:
        for age, options in reversed(list(enumerate(reversed(before)))):
            older = build(20 + age) if age else model
            raised(save(split_copies(older, 2), folder, merge_checkpoints=True, **options))

    kill_everywhere(
        tmp_path,
        save_old,
        lambda folder, model: raised(save(split_copies(model, 2), folder, merge_checkpoints=True, **after)),
        read_merged,
    )


def test_a_failed_save_after_a_killed_one_leaves_the_killed_ones_checkpoint(tmp_path, monkeypatch) -> None:
    """Killed after its index was put in place, while its shards still were in the staging folder."""
    new = build(2)
    options = {"merge_checkpoints": True, "max_shard_size": "64KB"}
    raised(save(split_copies(build(1), 2), tmp_path, **options))

    def attempt() -> None:
        original = os.replace

        def replace(source, target) -> None:
            original(source, target)
            if str(target).endswith(".index.json"):
                kill_self()

        os.replace = replace
        save(split_copies(new, 2), tmp_path, **options)

    assert in_fork(attempt) == -signal.SIGKILL
    assert_holds(read_merged(tmp_path), new)

    def full(path, *args) -> None:
        if "00001" in path:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "flush_file", full)
        assert all(isinstance(result, Exception) for result in save(split_copies(build(3), 2), tmp_path, **options))
    assert_holds(read_merged(tmp_path), new)


def test_a_kill_in_the_middle_of_a_file_leaves_the_previous_checkpoint(tmp_path) -> None:
    old = build(1)
    for name, options in (("parallel", {}), ("merged", {"merge_checkpoints": True})):
        folder = tmp_path / name
        raised(save(split_copies(old, 2), folder, **options))

        def attempt(folder=folder, options=options) -> None:
            def half(content, path) -> None:
                torch.save(content, path)
                os.truncate(path, os.path.getsize(path) // 2)
                kill_self()

            save(split_copies(build(2), 2), folder, save_function=half, **options)

        assert in_fork(attempt) == -signal.SIGKILL
    models = split_copies(build(9), 2)
    raised(load(models, tmp_path / "parallel"))
    assert_hold_together(models, old)
    assert_holds(read_merged(tmp_path / "merged"), old)


def test_without_hard_links_the_same_checkpoint_is_written(tmp_path, monkeypatch) -> None:
    def link(*args) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    for seed in (1, 2):
        raised(save(split_copies(build(seed), 2), tmp_path, merge_checkpoints=True, max_shard_size="64KB"))
        assert_holds(read_merged(tmp_path), build(seed))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
