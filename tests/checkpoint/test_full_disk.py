"""A disk that is full, or may not be written to: a clear error on every rank, and the previous checkpoint intact."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import penstock
from penstock.checkpoint import files
from penstock.checkpoint.file_specs import Source
from penstock.checkpoint.ranks import CheckpointRanks
from penstock.checkpoint.training_state import save_object
from penstock.checkpoint.untrusted import CheckpointError
from tests.support.checkpoint_ranks import (
    assert_hold_together,
    content,
    gpt2,
    in_fork,
    load,
    raised,
    save,
    split_copies,
)
from tests.support.pool import Pool

OPTIONS: list[dict[str, Any]] = [{}, {"safe_serialization": True}, {"merge_checkpoints": True}]


def refuse(directory: Path, *parts: str, intact: bool = True, **options: Any) -> None:
    """The save fails on every rank in these words, and says so of the checkpoint before; the folder stays as it was."""
    before = content(directory)
    for result in save(split_copies(gpt2(2), 2), directory, **options):
        assert isinstance(result, CheckpointError), result
        text = str(result)
        before_or_this = f"the checkpoint in {directory}, if any, is whole: the previous one, or already this one"
        assert (f"that was in {directory} before, if any, is intact" if intact else before_or_this) in text, text
        assert "rank " in text and "Errno" not in text and "os error" not in text, text
        for part in parts:
            assert re.search(part, text), text
    assert content(directory) == before


def assert_whole(directory: Path, seed: int) -> None:
    models = split_copies(gpt2(9), 2)
    raised(load(models, directory))
    assert_hold_together(models, gpt2(seed))


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB, or of the size that is asked for, if this process may mount one."""
    where = tmp_path / "disk"
    where.mkdir()
    size = getattr(request, "param", "400k")
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)], capture_output=True)
    if mount.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_full_file_system_is_told_with_what_is_needed_and_free(small_disk: Path) -> None:
    directory = small_disk / "checkpoint"
    raised(save(split_copies(gpt2(1), 2), directory))
    number = 0
    while os.statvfs(small_disk).f_bavail * 4096 > 40_000:
        (small_disk / f"filler-{number}").write_bytes(bytes(4096))
        number += 1
    for options in OPTIONS:
        refuse(
            directory, str(directory), r"cannot write \S+ \(\d+ tensors\): No space left on device",
            r"[\d,]+ bytes are needed, [\d,]+ are free", "make room", **options,
        )  # fmt: skip
    assert_whole(directory, 1)


def test_a_file_system_for_reading_only_is_told(small_disk: Path) -> None:
    directory = small_disk / "checkpoint"
    raised(save(split_copies(gpt2(1), 2), directory))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    refuse(directory, "Read-only file system; the file system is mounted for reading only")
    assert_whole(directory, 1)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save_object({}, small_disk / "object.bin", world_comm=CheckpointRanks())


def test_a_limit_on_the_size_of_files_is_told_whatever_library_writes(tmp_path: Path) -> None:
    """A real refusal of the operating system, which needs no rights."""
    raised(save(split_copies(gpt2(1), 2), tmp_path))

    def attempt() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        for options in (*OPTIONS, {"safe_serialization": True, "merge_checkpoints": True}):
            refuse(tmp_path, f"cannot write {tmp_path}", "File too large", "ulimit -f", **options)

    split_copies(gpt2(2), 2)  # in the parent, so that it is quick in the child
    assert in_fork(attempt) == 0
    assert_whole(tmp_path, 1)


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for result in save(split_copies(gpt2(), 2), tmp_path / "file" / "below"):
        assert isinstance(result, CheckpointError) and "rank 0" in str(result) and str(tmp_path / "file") in str(result)


@pytest.mark.parametrize(
    ("where", "number", "words"),
    [
        ("weights", errno.ENOSPC, "No space left on device"),
        ("configuration", errno.EDQUOT, "your quota there is used up"),
        ("folder", errno.EROFS, "mounted for reading only"),
        ("table of contents", errno.EACCES, "you may not write there"),
        # Whichever rank assembles the second shard; it goes on taking part in the transfers of the others.
        ("pytorch_model-00002-of", errno.ENOSPC, "No space left on device"),
        # The other rank, which would send many tensors, has no error of its own.
        ("room to gather", errno.ENOMEM, "failed: rank 0: MemoryError: cannot hold it; the checkpoint"),
    ],
)
def test_every_step_of_a_save_tells_why_it_could_not_write_and_the_next_save_succeeds(
    where: str, number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised(save(split_copies(gpt2(1), 2), tmp_path))
    error: Exception = OSError(number, os.strerror(number))
    fsync, flush = os.fsync, files.flush_file
    parts = {"configuration": "/config.json", "table of contents": "parallel_checkpoint.json", "weights": ".bin"}
    part = parts.get(where, where)

    def failing(*arguments: Any, **options: Any) -> None:
        raise error

    def fail_some(path: str, *rest: Any) -> None:
        failing() if part in path else flush(path, *rest)

    # Only small files that are written whole come here with a descriptor that can be asked for its name.
    def fail_small(descriptor: int) -> None:
        failing() if os.readlink(f"/proc/self/fd/{descriptor}").endswith(part) else fsync(descriptor)

    merged: dict[str, Any] = {}
    if where.startswith("pytorch"):
        merged = {"merge_checkpoints": True, "max_shard_size": "60KB"}
    elif where == "room to gather":
        merged = {"merge_checkpoints": True}
    with monkeypatch.context() as patch:
        if where == "folder":
            patch.setattr(os, "mkdir", failing)
        elif where == "room to gather":
            error = MemoryError("cannot hold it")
            patch.setattr(Source, "empty", failing)
        elif ".bin" in part or merged:
            patch.setattr(files, "flush_file", fail_some)
        else:
            patch.setattr(os, "fsync", fail_small)
        putting = where in ("configuration", "table of contents")  # in place, after the weights
        refuse(tmp_path, words, str(tmp_path), intact=not putting, **merged)
    assert_whole(tmp_path, 1)
    raised(save(split_copies(gpt2(3), 2), tmp_path))
    assert_whole(tmp_path, 3)


# -- the whole state of a run ------------------------------------------------------------------------------------------


def save_where_it_cannot_be(disk: Path, what: str, asynchronous: bool) -> str:
    """On two ranks: what the second save raises. The first one's state is loaded, and a third save succeeds."""
    model = gpt2(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model = penstock.initialize(model, {"model_parallelism": {"pipeline_parallel_size": 2}})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    penstock.save_checkpoint(disk / "run", **state, step=1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    if dist.get_rank() == 0:
        spoil(disk, what)
    dist.barrier()
    with pytest.raises(CheckpointError) as raised_here:
        penstock.save_checkpoint(disk / "run", **state, step=2, asynchronous=asynchronous)
        penstock.finish_saving(model)
    dist.barrier()
    loaded = penstock.load_checkpoint(disk / "run", **state)
    assert (loaded.step, loaded.damaged) == (1, {})
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    assert all(bool((one == 1).all()) for one in momenta)
    dist.barrier()
    if dist.get_rank() == 0:
        if what == "full":
            (disk / "filler").unlink()
        else:
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True, timeout=60)
    dist.barrier()
    penstock.save_checkpoint(disk / "run", **state, step=3, asynchronous=asynchronous)
    penstock.finish_saving(model)
    assert penstock.load_checkpoint(disk / "run", **state).step == 3
    return str(raised_here.value)


def spoil(disk: Path, what: str) -> None:
    if what == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=60)
        return
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("small_disk", ["2m"], indirect=True)
@pytest.mark.parametrize(
    ("what", "words", "asynchronous"),
    [
        ("full", "No space left on device", False),
        ("full", "No space left on device", True),
        ("read-only", "the file system is mounted for reading only", False),
    ],
)
def test_a_run_whose_disk_is_full_or_for_reading_only_goes_back_to_its_last_checkpoint(
    pool: Pool, small_disk: Path, what: str, words: str, asynchronous: bool
) -> None:
    said = pool.run(2, save_where_it_cannot_be, small_disk, what, asynchronous, timeout=60)
    for text in said:
        assert words in text and "step-00000002" in text and "rank " in text, text
