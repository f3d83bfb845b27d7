"""A schedule that the user wrote runs like a named one."""

from __future__ import annotations

from itertools import chain, zip_longest
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import penstock
from penstock.runtime.boundary import boundaries
from penstock.schedule import ScheduleError, build
from penstock.schedule.text import format_schedule, own_or_named
from pool import Pool


def tiny() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=61, n_embd=16, n_layer=3, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return GPT2LMHeadModel(config)


def train_with(schedule: str | list[str], num_microbatches: int, told: bool = True) -> tuple[float, float]:
    """The loss of a step and of an evaluation of another size, which the schedule was not written for."""
    ids = torch.randint(0, 61, (2 * num_microbatches, 8), generator=torch.Generator().manual_seed(1))
    section = {"pipeline_parallel_size": 2, "schedule": schedule}
    if told:
        section["num_microbatches"] = num_microbatches
    model = penstock.initialize(tiny(), {"model_parallelism": section})
    loss = 0.0
    for out in model(input_ids=ids, labels=ids):
        out.loss.backward()
        loss += out.loss.item()
    with torch.no_grad():
        return loss, model(input_ids=ids[:1], labels=ids[:1]).loss.item()


def test_rows_and_a_csv_file_train_like_the_named_schedule(pool: Pool, tmp_path: Path) -> None:
    text = format_schedule(build("zb-h1", 2, 4))
    path = tmp_path / "mine.csv"
    path.write_text(text)
    ids = torch.randint(0, 61, (8, 8), generator=torch.Generator().manual_seed(1))
    model = tiny()
    expected = (model(input_ids=ids, labels=ids).loss.item(), model(input_ids=ids[:1], labels=ids[:1]).loss.item())
    for schedule, told in ((str(path), False), (text.splitlines(), False), (text.splitlines(), True)):
        for losses in pool.run(2, train_with, schedule=schedule, num_microbatches=4, told=told, timeout=60):
            assert losses == pytest.approx(expected, rel=1e-5)


def far_ahead(num_microbatches: int, lead: int) -> list[str]:
    """Rank 0 sends `lead` activations before it gives the gradient that rank 1 wants before it takes the second."""
    forwards = [f"0F{i}" for i in range(num_microbatches)]
    turns = [f"3F{i},3B{i},0B{i - 1}" if i else "3F0,3B0" for i in range(num_microbatches)]
    rest = chain.from_iterable(zip_longest(turns, forwards[lead:]))
    return [
        ",".join([*forwards[:lead], *filter(None, rest), f"0B{num_microbatches - 1}"]),
        ",".join(f"1F{i},2F{i},2B{i},1B{i}" for i in range(num_microbatches)),
    ]


def train_with_large_messages(schedule: list[str], num_microbatches: int) -> tuple[float, float]:
    """`train_with`, where receives are posted no further ahead than those of large tensors are."""
    with mock.patch.object(boundaries, "BYTES_AHEAD", 1):
        return train_with(schedule, num_microbatches)


# The second has so many microbatches that sends are waited for within the step.
@pytest.mark.parametrize(("num_microbatches", "lead"), [(24, 24), (40, 14)])
def test_a_schedule_may_send_far_ahead(pool: Pool, num_microbatches: int, lead: int) -> None:
    ids = torch.randint(0, 61, (2 * num_microbatches, 8), generator=torch.Generator().manual_seed(1))
    expected = tiny()(input_ids=ids, labels=ids).loss.item()
    rows = far_ahead(num_microbatches, lead)
    arguments = {"schedule": rows, "num_microbatches": num_microbatches}
    for loss, _ in pool.run(2, train_with_large_messages, **arguments, timeout=60):
        assert loss == pytest.approx(expected, rel=1e-5)


def test_a_schedule_of_other_size_is_refused_before_training(pool: Pool) -> None:
    rows = format_schedule(build("1f1b", 2, 4)).splitlines()
    for error in pool.run(2, train_with, schedule=rows, num_microbatches=3, timeout=60, outcomes=True):
        assert isinstance(error, ValueError) and "not written for 3 microbatches" in str(error)


def test_a_broken_schedule_is_refused_with_what_blocks_it() -> None:
    with pytest.raises(ScheduleError):
        own_or_named(["0F0,0B0", "1B0,1F0"], 2)
    with pytest.raises(ScheduleError, match="written for 2 ranks"):
        own_or_named(["0F0,0B0", "1F0,1B0"], 3)
