"""State that modules' own code saves (extra state, entries of hooks, own names): saved as by the unsplit model, and
loaded on any number of stages."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

import penstock
from penstock.checkpoint.contents import merge_checkpoint
from penstock.checkpoint.model_state import as_tensors, as_values
from penstock.checkpoint.untrusted import CheckpointError
from tests.support.pool import Pool

WIDTH, BLOCKS = 4, 4


class Block(nn.Module):
    """Saves the logarithm of its scale, a tensor of how far it has counted, and what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.told: Any = None
        self.counted = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale

    def get_extra_state(self) -> Any:
        return self.told

    def set_extra_state(self, state: Any) -> None:
        self.told = state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}log_scale"] = destination.pop(f"{prefix}scale").detach().log()
        destination[f"{prefix}counted"] = torch.arange(self.counted)

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}log_scale" in state:
            state[f"{prefix}scale"] = state.pop(f"{prefix}log_scale").exp()
            self.counted = len(state.pop(f"{prefix}counted"))
        super()._load_from_state_dict(state, prefix, *args)


class Model(nn.Module):
    """Its hook adds a number, and another hook takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.version = 1
        self.register_state_dict_post_hook(lambda module, state, *_: state.__setitem__("version", module.version))
        self.register_load_state_dict_pre_hook(take_version)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def take_version(module: Any, state: dict[str, Any], *_: Any) -> None:
    module.version = state.pop("version", module.version)


def criterion(output: torch.Tensor, inputs: Any) -> torch.Tensor:
    return functional.mse_loss(output, inputs["target"])


def build(seed: int = 0, marked: bool = False) -> Any:
    """A model; `marked` as it is when it is saved."""
    torch.manual_seed(seed)
    model = Model()
    if marked:
        model.version = 7
        for number, block in enumerate(model.blocks):
            block.counted = number
            block.told = {
                "number": number, "ratio": number / 3, "bytes": bytes(range(number + 1)), "odd": (1e999, [None, "é"]),
                3: OrderedDict(tensor=torch.full((number, 2), 0.1)),
            }  # fmt: skip
    return model


def split(model: Any, stages: int) -> Any:
    section = {"model_parallelism": {"pipeline_parallel_size": stages, "num_microbatches": 2}}
    return penstock.initialize(model, section, criterion, example_inputs={"x": torch.zeros(1, WIDTH)})


def saved_on(stages: int, folder: str) -> None:
    model = split(build(marked=True), stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for out in model(x=torch.ones(4, WIDTH), target=torch.zeros(4, WIDTH)):
        out.loss.backward()
    optimizer.step()
    model.save_parallelized(f"{folder}/parallel")
    model.save_parallelized(f"{folder}/safe-parallel", safe_serialization=True)
    model.save_parallelized(f"{folder}/merged", merge_checkpoints=True)
    model.save_pretrained(f"{folder}/safe")


def loaded_on(stages: int, folder: str) -> list[dict[str, Any]]:
    """What a rank holds after each way to load."""
    found = []
    for kind in ("parallel", "safe-parallel", "merged", "safe"):
        model = split(build(seed=1), stages)
        if "parallel" in kind:
            model.from_parallelized(f"{folder}/{kind}")
        else:
            model.load_ordinary(f"{folder}/{kind}")
        found.append(dict(model.state_dict()))
    return found


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def test_own_state_is_saved_as_by_the_unsplit_model_and_loaded_on_any_number_of_stages(
    pool: Pool, tmp_path: Path
) -> None:
    plain = build(marked=True)
    criterion(plain(torch.ones(4, WIDTH)), {"target": torch.zeros(4, WIDTH)}).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    wanted = dict(plain.state_dict())
    pool.run(2, saved_on, 2, str(tmp_path))

    merged = torch.load(tmp_path / "merged/pytorch_model.bin", weights_only=True)
    assert merged.keys() == wanted.keys()
    merge_checkpoint(tmp_path / "parallel", tmp_path / "command", safe_serialization=False)
    merge_checkpoint(tmp_path / "safe-parallel", tmp_path / "safe-command")
    states = [
        merged,
        torch.load(tmp_path / "command/pytorch_model.bin", weights_only=True),
        *(as_values(load_file(tmp_path / folder / "model.safetensors")) for folder in ("safe", "safe-command")),
    ]
    for state in states:
        fresh = build(seed=2)
        fresh.load_state_dict(state)
        assert_same(dict(sorted(fresh.state_dict().items())), dict(sorted(wanted.items())))
    for stages in (1, 2, 3):
        held = pool.run(stages, loaded_on, stages, str(tmp_path))
        for found in zip(*held, strict=True):  # by each way to load, what each rank holds
            assert {name for one in found for name in one} == wanted.keys()
            for one in found:
                assert_same(one, {name: wanted[name] for name in one})


class Stubborn(Block):
    def get_extra_state(self) -> Any:
        return {"when": object()}


def refused(folder: str) -> tuple[list[str], str]:
    model = Model()
    model.blocks[3] = Stubborn()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        parallel = split(model, 2)
    with pytest.raises(CheckpointError) as caught:
        parallel.save_parallelized(folder)
    return [str(one.message) for one in told], str(caught.value)


def test_what_cannot_be_saved_is_named_before_the_training(pool: Pool, tmp_path: Path) -> None:
    (before, _), (named, failure) = pool.run(2, refused, str(tmp_path / "model"))
    assert not [one for one in before if "saved" in one]
    said = "cannot save blocks.3._extra_state: it is, or holds, a object. It must be a tensor, or plain data"
    assert any(f"can be trained, but not saved: {said}" in one for one in named)
    assert said in failure
    assert not (tmp_path / "model").exists(), "the save had made it"


@pytest.mark.parametrize("value", [{1, 2}, object(), torch.float32, [Path()], 1j])
def test_only_plain_data_is_saved(value: Any) -> None:
    with pytest.raises(CheckpointError, match="cannot save here: it is, or holds, a"):
        as_tensors({"here": value})


@pytest.mark.parametrize(
    "text", ["", "[", '["float"]', '["unknown", 1]', '["tensor", "float32", [8], "AAAA"]', '["dict", 1]', "[" * 100_000]
)
def test_damaged_plain_data_is_refused(text: str) -> None:
    content = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="here//plain is damaged"):
        as_values({"here//plain": content})
