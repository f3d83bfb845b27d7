"""Saving and loading over real processes that talk through gloo."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpoint_ranks import assert_holds, kill_self, scramble, split_copies
from families import FAMILIES
from penstock.checkpoint import (
    CheckpointError,
    GroupComm,
    TrainingState,
    files,
    from_parallelized,
    load_training_state,
    save_parallelized,
)
from pool import Pool, WorkerDied


def build(seed: int) -> torch.nn.Module:
    return scramble(FAMILIES["mixtral"].build(dtype=torch.float32).to(torch.bfloat16), seed)


def my_part(seed: int, num_stages: int) -> torch.nn.Module:
    return split_copies(build(seed), num_stages)[dist.get_rank() % num_stages]


def save_as(seed: int, directory: Path, num_stages: int, **options) -> None:
    """Pipelines of `num_stages` ranks; the first one writes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pipelines = [list(range(start, start + num_stages)) for start in range(0, size, num_stages)]
    groups = [dist.new_group(ranks, backend="gloo") for ranks in pipelines]
    place = {"stage": rank % num_stages, "num_stages": num_stages, "is_writer": rank < num_stages}
    comms = {"world_comm": GroupComm(), "pipeline_comm": GroupComm(groups[rank // num_stages])}
    save_parallelized(my_part(seed, num_stages), directory, **place, **comms, **options)


def load_as(seed: int, directory: Path, num_stages: int) -> set[str]:
    model = from_parallelized(my_part(seed + 1, num_stages), directory, world_comm=GroupComm())
    return assert_holds(model, build(seed))


def test_three_processes_save_and_two_load(pool: Pool, tmp_path) -> None:
    pool.run(3, save_as, 1, tmp_path, 3)
    assert set().union(*pool.run(2, load_as, 1, tmp_path, 2)) == set(build(1).state_dict())


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}, {"safe_serialization": True}])
def test_two_replicas_of_two_stages_merge(options, pool: Pool, tmp_path) -> None:
    pool.run(4, save_as, 1, tmp_path, 2, merge_checkpoints=True, **options)
    reference = build(1)
    assert_holds(type(reference).from_pretrained(tmp_path), reference)


def fill_the_disk_of(failing: int, seed: int, directory: Path, num_stages: int, **options) -> str:
    if dist.get_rank() == failing:

        def full(path: str) -> None:
            raise OSError(28, "No space left on device")

        files.flush_file, kept = full, files.flush_file
    try:
        save_as(seed, directory, num_stages, **options)
    except CheckpointError as error:
        return str(error)
    finally:
        if dist.get_rank() == failing:
            files.flush_file = kept
    return "no error"


@pytest.mark.parametrize("options", [{}, {"merge_checkpoints": True, "max_shard_size": "20KB"}])
def test_a_full_disk_on_one_process_is_an_error_on_all(options, pool: Pool, tmp_path) -> None:
    pool.run(3, save_as, 1, tmp_path, 3)
    messages = pool.run(3, fill_the_disk_of, 1, 2, tmp_path, 3, **options)
    assert len(set(messages)) == 1
    assert "rank 1: cannot write" in messages[0] and str(tmp_path) in messages[0] and "No space left" in messages[0]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    pool.run(2, load_as, 1, tmp_path, 2)


def die_while_writing(dying: int, seed: int, directory: Path, num_stages: int) -> float:
    """Seconds until the others notice."""
    start = time.monotonic()

    def write(content, path) -> None:
        if dist.get_rank() == dying:
            kill_self()
        torch.save(content, path)

    try:
        save_as(seed, directory, num_stages, save_function=write)
    except RuntimeError:
        return time.monotonic() - start
    return -1.0


def test_a_process_that_is_killed_ends_the_save_on_the_others_and_keeps_the_previous_checkpoint(
    pool: Pool, tmp_path
) -> None:
    pool.run(3, save_as, 1, tmp_path, 3)
    results = pool.run(3, die_while_writing, 2, 2, tmp_path, 3, outcomes=True)
    assert isinstance(results[2], WorkerDied)
    assert all(0 <= seconds < 20 for seconds in results[:2])
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
    place = {"stage": dist.get_rank(), "num_stages": 2, "is_writer": True}
    comms = {"world_comm": GroupComm(), "pipeline_comm": GroupComm()}
    save_parallelized(model, directory, training_state=TrainingState(optimizer, step=4), **place, **comms)


def resume(directory: Path) -> tuple[int, float, int]:
    model = my_part(2, dist.get_world_size())
    optimizer = torch.optim.AdamW(model.parameters())
    state = load_training_state(model, directory, TrainingState(optimizer), world_comm=GroupComm())
    return state.step, torch.rand(1).item(), len(optimizer.state)


def test_each_process_takes_up_its_own_random_stream(pool: Pool, tmp_path) -> None:
    pool.run(2, train_and_save, tmp_path)
    drawn = [torch.rand(1, generator=torch.Generator().manual_seed(rank)).item() for rank in range(2)]
    steps, numbers, states = zip(*pool.run(2, resume, tmp_path), strict=True)
    assert steps == (4, 4) and list(numbers) == drawn
    assert sum(states) == len(list(build(1).parameters()))
    ((step, number, count),) = pool.run(1, resume, tmp_path)
    assert (step, number, count) == (4, drawn[0], sum(states))
