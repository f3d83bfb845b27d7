"""What one rank does, holds and is told does not grow with the number of ranks."""

from __future__ import annotations

import os
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ended import run_ranks
from families import FAMILIES, batch
from penstock.layout.layout import Layout
from penstock.runtime.comm.bootstrap import allow_descriptors
from training import parallelize, rows, run_step

WORLDS = (4, 8, 16)
TRANSPORT = ("allreduce", "allgather", "broadcast", "send", "recv")
# Python of a step that could look at every rank or pipeline.
COMPARING = ("settings.py", "layout.py", "frozen.py", "parts.py")


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Count what this process asks of its process groups: calls, and the bytes that it hands them for the answers."""
    originals = {name: vars(dist.ProcessGroup)[name] for name in TRANSPORT}

    def counting(name: str) -> Any:
        def call(self: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
            counts[name] += 1
            tensors = [leaf for leaf in pytree.tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            counts[f"bytes of {name}"] += sum(tensor.nbytes for tensor in tensors)
            return originals[name].__get__(self)(*args, **options)

        return call

    for name in TRANSPORT:
        setattr(dist.ProcessGroup, name, counting(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


@contextmanager
def python_calls(counts: Counter[str]) -> Iterator[None]:
    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and os.path.basename(frame.f_code.co_filename) in COMPARING:
            counts["python calls"] += 1

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def form_and_step() -> tuple[dict[str, int], dict[str, int], int]:
    """What forming asked for and what a step asks for, and the number of this rank's process groups."""
    forming, step = Counter[str](), Counter[str]()
    with counted(forming):
        model = parallelize(FAMILIES["gpt2"].build(), 2, num_microbatches=2)
    inputs = rows(batch("causal", 2 * model.data_parallel_size), model.data_parallel_rank, model.data_parallel_size)
    run_step(model, inputs)
    with counted(step), python_calls(step):
        run_step(model, inputs)
    return dict(forming), dict(step), len(dist.distributed_c10d._world.pg_map)


def test_what_a_rank_asks_for_does_not_grow_with_the_world() -> None:
    found = {}
    for world in WORLDS:
        ends = run_ranks(world, form_and_step)
        assert {end.kind for end in ends} == {"nothing"}, ends
        found[world] = [end.value for end in ends]
    forming, step, groups = found[WORLDS[0]][0]
    assert forming["allreduce"] and step["allgather"] and step["python calls"], "something was counted"
    for world in WORLDS:
        # Ranks with the first and with the second stage, of the first and of the last pipelines.
        for rank in (0, 1, world - 2, world - 1):
            first_forming, first_step, first_groups = found[WORLDS[0]][rank % 2]
            forming, step, groups = found[world][rank]
            assert step == first_step, f"a step of rank {rank} of {world}"
            assert groups == first_groups, f"groups of rank {rank} of {world}"
            calls = {name: count for name, count in forming.items() if not name.startswith("bytes")}
            assert calls == {name: first_forming[name] for name in calls}, f"forming of rank {rank} of {world}"


def test_the_place_of_a_rank_is_found_among_unlike_pipelines() -> None:
    sizes = [1 + index * 7 % 5 for index in range(200)]
    layout = Layout.place([[[f"unit {stage}"] for stage in range(size)] for size in sizes], None, 2)
    places = [(index, rank, shard) for index, size in enumerate(sizes) for rank in range(size) for shard in range(2)]
    found = [layout.place_of(rank) for rank in range(layout.world_size)]
    assert [(one.pipeline, one.pipeline_rank, one.tensor_parallel_rank) for one in found] == places
    for outside in (-1, layout.world_size):
        with pytest.raises(ValueError, match=f"rank {outside} is outside"):
            layout.place_of(outside)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_descriptors")
def test_open_files_are_allowed_for_all_ranks_or_their_number_is_said() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_descriptors(8)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 512, "enough already"
    allow_descriptors(200)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 2 * 200
    if hard != resource.RLIM_INFINITY:
        with pytest.raises(RuntimeError, match=rf"{hard} ranks need .* the hard limit here is {hard}: raise"):
            allow_descriptors(hard)
