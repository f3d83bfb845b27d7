"""A disk that is full, or may not be written to: a clear error on every rank, and the previous checkpoint intact."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import penstock
from checkpoint_ranks import assert_hold_together, in_fork, load, raised, save, scramble, split_copies
from families import FAMILIES
from penstock.checkpoint import files
from penstock.checkpoint.plan import CheckpointRanks
from penstock.checkpoint.training_state import save_object
from penstock.checkpoint.untrusted import CheckpointError
from pool import Pool


def build(seed: int) -> torch.nn.Module:
    return scramble(FAMILIES["gpt2"].build(dtype=torch.float32), seed)


def refuse(directory: Path, *parts: str, **options) -> None:
    """The save fails on every rank in these words, and says so of the checkpoint before."""
    for result in save(split_copies(build(2), 2), directory, **options):
        assert isinstance(result, CheckpointError), result
        text = str(result)
        assert f"the checkpoint that was in {directory} before, if any, is intact" in text, text
        assert "rank " in text and "Errno" not in text and "os error" not in text, text
        for part in parts:
            assert re.search(part, text), text


def assert_whole(directory: Path, seed: int) -> None:
    models = split_copies(build(9), 2)
    raised(load(models, directory))
    assert_hold_together(models, build(seed))


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


@pytest.mark.parametrize("options", [{}, {"safe_serialization": True}, {"merge_checkpoints": True}], ids=str)
def test_a_full_file_system_is_told_with_what_is_needed_and_free(options, small_disk: Path) -> None:
    directory = small_disk / "checkpoint"
    raised(save(split_copies(build(1), 2), directory))
    number = 0
    while os.statvfs(small_disk).f_bavail * 4096 > 40_000:
        (small_disk / f"filler-{number}").write_bytes(bytes(4096))
        number += 1
    before = {name: (directory / name).read_bytes() for name in os.listdir(directory)}
    refuse(
        directory, str(directory), r"cannot write \S+ \(\d+ tensors\): No space left on device",
        r"[\d,]+ bytes are needed, [\d,]+ are free", "make room", **options,
    )  # fmt: skip
    assert {name: (directory / name).read_bytes() for name in os.listdir(directory)} == before
    assert_whole(directory, 1)


def test_a_file_system_for_reading_only_is_told(small_disk: Path) -> None:
    directory = small_disk / "checkpoint"
    raised(save(split_copies(build(1), 2), directory))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    refuse(directory, "Read-only file system; the file system is mounted for reading only")
    assert_whole(directory, 1)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save_object({}, small_disk / "object.bin", world_comm=CheckpointRanks())


@pytest.mark.parametrize("options", [{}, {"safe_serialization": True}, {"merge_checkpoints": True}], ids=str)
def test_a_limit_on_the_size_of_files_is_told(options, tmp_path: Path) -> None:
    """A real refusal of the operating system, which needs no rights."""
    raised(save(split_copies(build(1), 2), tmp_path))

    def attempt() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
        refuse(tmp_path, "File too large", "ulimit -f", **options)

    split_copies(build(2), 2)  # in the parent, so that it is quick in the child
    assert in_fork(attempt) == 0
    assert_whole(tmp_path, 1)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device"),
        (errno.EDQUOT, "your quota there is used up"),
        (errno.EROFS, "mounted for reading only"),
        (errno.EACCES, "you may not write there"),
    ],
)
@pytest.mark.parametrize("where", ["weights", "configuration", "folder", "table of contents"])
def test_every_step_of_a_save_tells_why_it_could_not_write(
    number: int, words: str, where: str, tmp_path: Path, monkeypatch
) -> None:
    raised(save(split_copies(build(1), 2), tmp_path))
    error = OSError(number, os.strerror(number))

    def failing(*arguments, **options) -> None:
        raise error

    original = os.fsync
    with monkeypatch.context() as patch:
        if where == "weights":
            patch.setattr(files, "flush_file", failing)
        elif where == "folder":
            patch.setattr(os, "mkdir", failing)
        else:
            # Only small files that are written whole come here with a descriptor that can be asked for its name.
            small = "/config.json" if where == "configuration" else "manifest.staged"

            def fail_some(descriptor: int) -> None:
                if os.readlink(f"/proc/self/fd/{descriptor}").endswith(small):
                    raise error
                original(descriptor)

            patch.setattr(os, "fsync", fail_some)
        results = save(split_copies(build(2), 2), tmp_path)
    for result in results:
        assert isinstance(result, CheckpointError)
        assert words in str(result) and str(tmp_path) in str(result) and "Errno" not in str(result), str(result)
    assert_whole(tmp_path, 1)


# -- the whole state of a run ------------------------------------------------------------------------------------------


def save_where_it_cannot_be(disk: Path, what: str, asynchronous: bool) -> str:
    """On two ranks: what the second save raises. The first one's state is loaded, and a third save succeeds."""
    model = scramble(FAMILIES["gpt2"].build(dtype=torch.float32, n_layer=2), 1)
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
        if what == "full":
            fill_up(disk)
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=60)
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


def fill_up(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


@pytest.mark.parametrize("small_disk", ["2m"], indirect=True)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("what", "words"),
    [("full", "No space left on device"), ("read-only", "the file system is mounted for reading only")],
)
def test_a_run_whose_disk_is_full_or_for_reading_only_goes_back_to_its_last_checkpoint(
    pool: Pool, small_disk: Path, what: str, words: str, asynchronous: bool
) -> None:
    said = pool.run(2, save_where_it_cannot_be, small_disk, what, asynchronous, timeout=60)
    for text in said:
        assert words in text and "step-00000002" in text and "rank " in text, text
