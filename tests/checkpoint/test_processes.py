"""Saving and loading over real processes that talk through gloo."""

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import penstock
from penstock import PipelineFailure
from penstock.checkpoint import files
from penstock.checkpoint.load import from_parallelized
from penstock.checkpoint.ranks import CheckpointRanks, SavingRank
from penstock.checkpoint.save import save_parallelized
from penstock.checkpoint.training_state import TrainingState, load_training_state, save_object
from penstock.checkpoint.untrusted import CheckpointError
from tests.support.checkpoint_ranks import assert_holds, kill_self, scramble, split_copies
from tests.support.families import FAMILIES
from tests.support.pool import Pool, WorkerDied


def build(seed: int) -> torch.nn.Module:
    return scramble(FAMILIES["mixtral"].build(dtype=torch.float32).to(torch.bfloat16), seed)


def my_part(seed: int, num_stages: int) -> torch.nn.Module:
    return split_copies(build(seed), num_stages)[dist.get_rank() % num_stages]


def save_as(seed: int, directory: Path, num_stages: int, model: torch.nn.Module | None = None, **options) -> None:
    """Pipelines of `num_stages` ranks; the first one writes."""
    rank = dist.get_rank()
    world = CheckpointRanks(dist.group.WORLD, place=SavingRank(rank, num_stages, rank // num_stages))
    save_parallelized(model or my_part(seed, num_stages), directory, world_comm=world, **options)


def load_as(seed: int, directory: Path, num_stages: int) -> set[str]:
    model = from_parallelized(my_part(seed + 1, num_stages), directory, world_comm=CheckpointRanks(dist.group.WORLD))
    return assert_holds(model, build(seed))


def merge_each(directory: Path, forms: dict[str, dict[str, Any]]) -> None:
    for name, options in forms.items():
        save_as(1, directory / name, 2, merge_checkpoints=True, **options)


def test_two_replicas_of_two_stages_merge(pool: Pool, tmp_path) -> None:
    forms = {"plain": {}, "shards": {"max_shard_size": "20KB"}, "safe": {"safe_serialization": True}}
    pool.run(4, merge_each, tmp_path, forms)
    for name in forms:
        assert_holds(type(build(1)).from_pretrained(tmp_path / name), build(1))


def fill_the_disk_of(failing: int, directory: Path, forms: list[dict[str, Any]]) -> list[str]:
    """What is said in each form; then what was there before is loaded."""

    def full(path: str) -> None:
        raise OSError(28, "No space left on device")

    save_as(1, directory, 3)
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == failing:
            patch.setattr(files, "flush_file", full)
        for options in forms:
            with pytest.raises(CheckpointError) as error:
                save_as(2, directory, 3, **options)
            errors.append(str(error.value))
    load_as(1, directory, 3)
    return errors


def test_a_full_disk_on_one_process_is_an_error_on_all(pool: Pool, tmp_path) -> None:
    ranks = pool.run(3, fill_the_disk_of, 1, tmp_path, [{}, {"merge_checkpoints": True, "max_shard_size": "20KB"}])
    assert ranks[0] == ranks[1] == ranks[2]
    for said in ranks[0]:
        assert "rank 1: cannot write" in said and str(tmp_path) in said and "No space left" in said
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


DYING = 1


def end_in_a_save(directory: Path, killed: bool) -> tuple[str, float]:
    """One rank ends while it writes: the others' error, and after how many seconds."""
    save_as(1, directory, 3)
    start = time.monotonic()

    def write(content: Any, path: str) -> None:
        if dist.get_rank() == DYING:
            if killed:
                kill_self()
            raise KeyboardInterrupt
        torch.save(content, path)

    try:
        save_as(2, directory, 3, save_function=write)
    except BaseException as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "none", 0.0


@pytest.mark.parametrize("killed", [True, False])
def test_a_process_that_is_killed_or_interrupted_ends_the_save_on_all_and_keeps_the_previous_checkpoint(
    killed: bool, pool: Pool, tmp_path
) -> None:
    results = pool.run(3, end_in_a_save, tmp_path, killed, outcomes=True)
    own = results.pop(DYING)
    assert isinstance(own, WorkerDied) if killed else own[0].startswith("KeyboardInterrupt")
    for said, seconds in results:
        assert said.startswith("CheckpointError") and (killed or "rank 1: KeyboardInterrupt;" in said), said
        assert seconds < 20
    pool.run(2, load_as, 1, tmp_path, 2)
    pool.run(3, save_as, 3, tmp_path, 3)
    pool.run(2, load_as, 3, tmp_path, 2)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def train_and_save(directory: Path) -> None:
    model = my_part(1, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.manual_seed(dist.get_rank())
    save_as(1, directory, 2, training_state=TrainingState(optimizer, step=4), model=model)


def resume(directory: Path) -> tuple[int, float, int]:
    model = my_part(2, dist.get_world_size())
    state = TrainingState(torch.optim.AdamW(model.parameters()))
    step = load_training_state(model, directory, state, world_comm=CheckpointRanks(dist.group.WORLD)).step
    return step, torch.rand(1).item(), len(state.optimizer.state)


def test_each_process_takes_up_its_own_random_stream(pool: Pool, tmp_path) -> None:
    pool.run(2, train_and_save, tmp_path)
    drawn = [torch.rand(1, generator=torch.Generator().manual_seed(rank)).item() for rank in range(2)]
    (first, second), ((step, number, count),) = pool.run(2, resume, tmp_path), pool.run(1, resume, tmp_path)
    assert [first[:2], second[:2]] == [(4, drawn[0]), (4, drawn[1])]
    assert (step, number, count) == (4, drawn[0], first[2] + second[2])
    assert count == len(list(build(1).parameters()))


SAVING = ["preparing the folder", "comparing what ranks hold", "writing the files", "putting the files in place"]
LOADING = ["checking the files", "copying the weights"]


def losing_a_rank_at(call: str, number: int, folder: Path) -> AbstractContextManager[object]:
    """On all ranks: rank 1 ends as it calls `torch.distributed`'s function of this name for the `number`th time, once
    the others have come to it, too; of a send, once rank 0 has come to receive it."""
    dies, left = dist.get_rank() == DYING, number
    others = {0} if call == "isend" else set(range(dist.get_world_size())) - {DYING}
    name = "irecv" if call == "isend" and not dies else call
    original = getattr(dist, name)

    def counted(*arguments, **options):
        nonlocal left
        if name != "irecv" or options["group_src"] == DYING:
            left -= 1
            if left == -1 and not dies:
                (folder / f"came-{dist.get_rank()}").touch()
            elif left == -1:
                give_up = time.monotonic() + 60
                while not all((folder / f"came-{rank}").exists() for rank in others) and time.monotonic() < give_up:
                    time.sleep(0.01)
                kill_self()
        return original(*arguments, **options)

    return mock.patch.object(dist, name, counted)


def lose_a_rank(directory: Path, loads: bool, call: str, number: int, **options) -> tuple[Exception | None, float]:
    """Rank 1 ends during a save or a load of a pipeline; the others' error, and after how many seconds."""
    model = penstock.initialize(build(1), {"model_parallelism": {"pipeline_parallel_size": dist.get_world_size()}})
    if loads:
        model.save_parallelized(directory)
    start = time.monotonic()
    with losing_a_rank_at(call, number, directory.parent):
        try:
            if loads:
                model.from_parallelized(directory)
            else:
                model.save_parallelized(directory, **options)
        except Exception as error:
            return error, time.monotonic() - start
    return None, 0.0


@pytest.mark.parametrize(
    ("loads", "call", "number", "phase"),
    [
        *((False, "all_reduce", 2 * number, phase) for number, phase in enumerate(SAVING)),  # lengths, and content
        *((True, "all_reduce", 2 * number, phase) for number, phase in enumerate(LOADING)),
        (False, "isend", 0, "for pytorch_model-000"),
    ],
)
def test_a_rank_lost_in_a_save_or_a_load_is_named_with_the_phase(
    loads: bool, call: str, number: int, phase: str, pool: Pool, tmp_path: Path
) -> None:
    options = {"merge_checkpoints": True, "max_shard_size": "20KB"} if call == "isend" else {}
    folder = tmp_path / "saved"
    results = pool.run(3, lose_a_rank, folder, loads, call, number, timeout=90, outcomes=True, **options)
    assert isinstance(results[DYING], WorkerDied)
    texts = []
    for rank in (0, 2):
        error, seconds = results[rank]
        assert isinstance(error, PipelineFailure), error
        assert error.rank == DYING and "rank 1 was lost" in str(error)
        assert seconds < 20
        texts.append(str(error))
    assert any(phase in text and (call == "isend" or str(folder) in text) for text in texts), texts


def lose_a_rank_of_a_plain_group(directory: Path) -> Exception | None:
    with losing_a_rank_at("all_reduce", 0, directory):
        try:
            save_object({"step": 1}, directory / "object.bin", world_comm=CheckpointRanks(dist.group.WORLD))
        except Exception as error:
            return error
    return None


def test_without_a_pipeline_too_the_error_says_what_was_going_on(pool: Pool, tmp_path: Path) -> None:
    error, dead = pool.run(2, lose_a_rank_of_a_plain_group, tmp_path, outcomes=True)
    assert isinstance(dead, WorkerDied) and isinstance(error, CheckpointError)
    assert f"lost the connection to rank 1 while writing the file to save {tmp_path / 'object.bin'}" in str(error)
    assert "GLHF" not in str(error)
