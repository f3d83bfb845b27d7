"""Saving and loading over real processes that talk through gloo."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import penstock
from checkpoint_ranks import assert_holds, kill_self, scramble, split_copies
from families import FAMILIES
from penstock import PipelineFailure
from penstock.checkpoint import files
from penstock.checkpoint.load import from_parallelized
from penstock.checkpoint.plan import CheckpointRanks, SavingRank
from penstock.checkpoint.save import save_parallelized
from penstock.checkpoint.training_state import TrainingState, load_training_state, save_object
from penstock.checkpoint.untrusted import CheckpointError
from pool import Pool, WorkerDied


def build(seed: int) -> torch.nn.Module:
    return scramble(FAMILIES["mixtral"].build(dtype=torch.float32).to(torch.bfloat16), seed)


def my_part(seed: int, num_stages: int) -> torch.nn.Module:
    return split_copies(build(seed), num_stages)[dist.get_rank() % num_stages]


def save_as(seed: int, directory: Path, num_stages: int, **options) -> None:
    """Pipelines of `num_stages` ranks; the first one writes."""
    rank = dist.get_rank()
    place = SavingRank(rank % num_stages, num_stages, is_writer=rank < num_stages)
    world = CheckpointRanks(dist.group.WORLD)
    save_parallelized(my_part(seed, num_stages), directory, place=place, world_comm=world, **options)


def load_as(seed: int, directory: Path, num_stages: int) -> set[str]:
    model = from_parallelized(my_part(seed + 1, num_stages), directory, world_comm=CheckpointRanks(dist.group.WORLD))
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
    place = SavingRank(dist.get_rank(), 2)
    world, state = CheckpointRanks(dist.group.WORLD), TrainingState(optimizer, step=4)
    save_parallelized(model, directory, training_state=state, place=place, world_comm=world)


def resume(directory: Path) -> tuple[int, float, int]:
    model = my_part(2, dist.get_world_size())
    optimizer = torch.optim.AdamW(model.parameters())
    state = load_training_state(
        model, directory, TrainingState(optimizer), world_comm=CheckpointRanks(dist.group.WORLD)
    )
    return state.step, torch.rand(1).item(), len(optimizer.state)


def test_each_process_takes_up_its_own_random_stream(pool: Pool, tmp_path) -> None:
    pool.run(2, train_and_save, tmp_path)
    drawn = [torch.rand(1, generator=torch.Generator().manual_seed(rank)).item() for rank in range(2)]
    steps, numbers, states = zip(*pool.run(2, resume, tmp_path), strict=True)
    assert steps == (4, 4) and list(numbers) == drawn
    assert sum(states) == len(list(build(1).parameters()))
    ((step, number, count),) = pool.run(1, resume, tmp_path)
    assert (step, number, count) == (4, drawn[0], sum(states))


DYING = 1
SAVING = ["preparing the folder", "comparing what ranks hold", "writing the files", "putting the files in place"]
LOADING = ["checking the files", "copying the weights"]


def die_at(call: str, number: int) -> None:
    """End this process when it calls `torch.distributed`'s function of this name for the `number`th time."""
    original, left = getattr(dist, call), number

    def counted(*arguments, **options):
        nonlocal left
        if left == 0:
            time.sleep(0.5)  # until the others have come to this call, too
            kill_self()
        left -= 1
        return original(*arguments, **options)

    setattr(dist, call, counted)


def lose_a_rank(directory: Path, loads: bool, call: str, number: int, **options) -> tuple[Exception | None, float]:
    """Rank 1 ends during a save or a load of a pipeline; the others' error, and after how many seconds."""
    model = penstock.initialize(build(1), {"model_parallelism": {"pipeline_parallel_size": dist.get_world_size()}})
    if loads:
        model.save_parallelized(directory)
    if dist.get_rank() == DYING:
        die_at(call, number)
    start = time.monotonic()
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
        (False, "send", 0, "for pytorch_model-000"),
    ],
)
def test_a_rank_lost_in_a_save_or_a_load_is_named_with_the_phase(
    loads: bool, call: str, number: int, phase: str, pool: Pool, tmp_path: Path
) -> None:
    options = {"merge_checkpoints": True, "max_shard_size": "20KB"} if call == "send" else {}
    results = pool.run(3, lose_a_rank, tmp_path, loads, call, number, timeout=90, outcomes=True, **options)
    assert isinstance(results[DYING], WorkerDied)
    texts = []
    for rank in (0, 2):
        error, seconds = results[rank]
        assert isinstance(error, PipelineFailure), error
        assert error.rank == DYING and "rank 1 was lost" in str(error)
        assert seconds < 20
        texts.append(str(error))
    assert any(phase in text and (call == "send" or str(tmp_path) in text) for text in texts), texts


def lose_a_rank_of_a_plain_group(directory: Path) -> Exception | None:
    if dist.get_rank() == DYING:
        die_at("all_reduce", 0)
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


def interrupt_one(directory: Path) -> BaseException | None:
    def interrupted(content, path) -> None:
        if dist.get_rank() == DYING:
            raise KeyboardInterrupt
        torch.save(content, path)

    try:
        save_as(2, directory, 2, save_function=interrupted)
    except BaseException as error:
        return error if isinstance(error, Exception) else RuntimeError(type(error).__name__)
    return None


def test_a_save_interrupted_on_one_rank_ends_on_all_and_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_as, 1, tmp_path, 2)
    other, interrupted = pool.run(2, interrupt_one, tmp_path, outcomes=True)
    assert str(interrupted) == "KeyboardInterrupt"
    assert isinstance(other, CheckpointError) and "rank 1: KeyboardInterrupt;" in str(other)
    pool.run(2, load_as, 1, tmp_path, 2)
