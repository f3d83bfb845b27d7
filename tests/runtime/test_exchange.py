"""What ranks tell each other: plain data, whole and the same everywhere, and how they fail together."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, namedtuple
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutput

import penstock
from penstock.modeling.tensor_spec import TensorSpec
from penstock.runtime.comm.exchange import Ranks, from_plain, to_plain
from penstock.runtime.comm.gloo import wait_for_all
from tests.support.audit import unpickling
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import parallelize, run_step

PACKAGE = Path(penstock.__file__).parent
# Of each rank: of very different lengths, and what encodings stumble over.
DATA = (
    {"text": 'é\n"\\ \udcff 你', "none": None, "list": [True, -(2**70), 0.1, math.inf]},
    [],
    ["x" * 100_000],
)


class ConnectionGone(RuntimeError):
    pass


@contextmanager
def naming_peers(doing: str, peers: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ConnectionGone(f"{doing} with {list(peers)}") from error


def world() -> Ranks:
    return Ranks(dist.group.WORLD, naming_peers)


def exchange_data() -> list[Any]:
    ranks = world()
    return ranks.exchange(DATA[ranks.rank], "telling")


def test_all_ranks_get_the_data_of_all(pool: Pool) -> None:
    assert pool.run(3, exchange_data) == [list(DATA)] * 3


def fail_on(failing: int, error: type[BaseException]) -> Any:
    def work() -> Any:
        if dist.get_rank() == failing:
            raise error("no memory is left")
        return dist.get_rank()

    try:
        return world().together("reading", work, "nothing was changed")
    except BaseException as caught:
        # The ranks can go on.
        return f"{type(caught).__name__}: {caught}", world().exchange(dist.get_rank(), "going on")


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_what_fails_on_one_rank_is_an_error_on_all(pool: Pool, error: type[BaseException]) -> None:
    own, other = pool.run(2, fail_on, 0, error)
    assert own == (f"{error.__name__}: no memory is left", [0, 1])
    words = f"rank 0 failed while reading: {error.__name__}: no memory is left; nothing was changed"
    assert other == (f"RuntimeError: {words}", [0, 1])
    assert pool.run(2, fail_on, 2, error) == [[0, 1]] * 2


def tell_what_is_not_plain() -> Any:
    return world().together("telling", lambda: {1, 2} if dist.get_rank() else 0)


def test_data_that_is_not_plain_is_an_error_on_all_ranks(pool: Pool) -> None:
    first, second = pool.run(2, tell_what_is_not_plain, outcomes=True)
    assert isinstance(second, TypeError) and "set is not JSON serializable" in str(second)
    assert isinstance(first, RuntimeError) and str(first).startswith("rank 1 failed while telling: TypeError")


Pair = namedtuple("Pair", ["first", "second"])
VALUES = {
    "settings": {"betas": (0.9, 0.999), "milestones": Counter({3: 1}), "none": None, 5: {"five"}},
    "pair": Pair(1, [torch.Size([2, 3]), torch.bfloat16]),
    "spec": TensorSpec((2, 3), torch.float16, True),
    "output": CausalLMOutput(loss=torch.tensor(0.1), logits=torch.zeros(2, 0)),
    "numbers": np.arange(3),
    "half": torch.tensor([[0.1, -3.0]], dtype=torch.bfloat16),
}


def test_values_of_simple_types_and_tensors_come_back_as_they_were() -> None:
    found = from_plain(json.loads(json.dumps(to_plain(VALUES))))
    ours, structure = pytree.tree_flatten(VALUES)
    theirs, their_structure = pytree.tree_flatten(found)
    assert structure == their_structure
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other)
        else:
            assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


def test_numbers_of_numpy_are_told_as_numbers() -> None:
    assert from_plain(to_plain({"samples": np.int64(7), "shuffled": np.bool_(True)})) == {
        "samples": 7,
        "shuffled": True,
    }


def test_what_is_neither_plain_nor_a_tensor_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"a PosixPath is neither"):
        to_plain({"where": [Path("a")]})
    with pytest.raises(TypeError, match=r"os\.system"):
        from_plain({"fields": ["os.system", [["command", "true"]]]})


def compare(values: Sequence[str]) -> str:
    ranks = world()
    ranks.require_equal({"same": 1}, "comparing", lambda first, other, rank: "never said")
    with pytest.raises(ValueError, match=" here, ") as caught:
        mine = values[ranks.rank]
        ranks.require_equal(mine, "comparing", lambda first, other, rank: f"{first} here, {other} on rank {rank}")
    return str(caught.value)


def test_what_differs_is_the_same_error_on_every_rank(pool: Pool) -> None:
    assert pool.run(3, compare, ["a", "a", "b"]) == ["a here, b on rank 2"] * 3


def end_alone() -> list[str]:
    ranks = world()
    if ranks.rank == 1:
        os._exit(0)
    errors = []
    for doing in ("saving", "trying again"):
        with pytest.raises(ConnectionGone) as caught:
            ranks.exchange(0, doing)
        errors.append(str(caught.value))
    return errors


def test_after_a_rank_was_lost_every_exchange_fails_at_once_by_the_first_error(pool: Pool) -> None:
    first, _ = pool.run(2, end_alone, outcomes=True, timeout=20)
    assert first == ["saving with [1]"] * 2


def test_no_process_unpickles_what_another_sent() -> None:
    calls = re.compile(r"dist\.\w+_object|pickle\.loads?\b")
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if calls.search(path.read_text())}
    assert found == set()


CPU = torch.device("cpu")


class GivenUp(Exception):
    pass


def sum_that_is_given_up() -> float:
    """The other rank comes only after this one has given up its wait; its sum goes on."""
    group, numbers, looks = dist.group.WORLD, torch.ones(3), []
    assert group is not None

    def give_up() -> None:
        looks.append(1)
        if len(looks) == 2:
            raise GivenUp

    if dist.get_rank():
        dist.recv(torch.zeros(1), 0)
    work = group.allreduce([numbers])
    if dist.get_rank() == 0:
        with pytest.raises(GivenUp):
            wait_for_all(work, group, CPU, give_up)
        dist.send(torch.zeros(1), 1)
    wait_for_all(work, group, CPU, lambda: None)
    with pytest.raises(RuntimeError, match="invalid"):
        wait_for_all(cast(dist.Work, Broken()), group, CPU, give_up)
    return float(numbers.sum())


class Broken:
    """A collective that has ended with an error."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> bool:
        raise RuntimeError("invalid")


def test_a_wait_for_a_sum_ends_by_what_is_looked_at_meanwhile_and_harms_no_sum(pool: Pool) -> None:
    assert pool.run(2, sum_that_is_given_up) == [6.0, 6.0]


def train_save_load_and_generate(folder: str) -> list[str]:
    unpickled: list[str] = []
    with unpickling(unpickled.append):
        model = parallelize(FAMILIES["gpt2"].build(dtype=torch.float32), 2)
        optimizer = torch.optim.AdamW(model.parameters())
        loader = model.prepare_dataloader([{"input_ids": row, "labels": row} for row in torch.arange(64).view(8, 8)], 2)
        for inputs in loader:
            run_step(model, inputs)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        run = {"model": model, "optimizer": optimizer, "dataloader": loader}
        penstock.save_checkpoint(f"{folder}/run", **run, extra={"best": 1})
        penstock.load_checkpoint(f"{folder}/run", **run)
        model.save_parallelized(f"{folder}/model")
        model.save_pretrained(f"{folder}/ordinary", safe_serialization=False)
        model.load_ordinary(f"{folder}/ordinary")
        with torch.no_grad():
            model(**batch("causal", 4))
        model.generate(batch("causal", 2)["input_ids"], max_new_tokens=3, do_sample=False)
        penstock.from_pretrained(f"{folder}/ordinary", pipeline_parallel_size=2)
    return unpickled


def test_a_run_that_trains_saves_loads_and_generates_unpickles_nothing(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(4, train_save_load_and_generate, str(tmp_path)) == [[]] * 4
