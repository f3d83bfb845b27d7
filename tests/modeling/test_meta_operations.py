"""Remembered shapes of operations are the ones that torch finds: the oracle is torch's own meta kernels, each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.modeling.graph import meta_operations, shapes
from penstock.modeling.graph.costs import unit_costs
from penstock.modeling.graph.meta_operations import RememberedOperations
from penstock.modeling.graph.units import traced_units
from tests.support.families import FAMILIES


class Forgetful(TorchDispatchMode):
    """In the place of RememberedOperations: every operation goes to torch."""

    def __init__(self, seen: Any) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def what_is_traced(model: torch.nn.Module) -> tuple[Any, ...]:
    units, found, *_ = traced_units(model)
    return units, found.calls, found.output_sources, found.shapes, found.loss, unit_costs(model, units)


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "mixtral", "t5"])
def test_a_trace_is_the_same_with_and_without_memory(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meta_operations._remembered.clear()
    model = FAMILIES[family].build()
    first, second = what_is_traced(model), what_is_traced(model)
    monkeypatch.setattr(shapes, "RememberedOperations", Forgetful)
    assert first == second == what_is_traced(model)


def meta(*shape: int, **options: Any) -> torch.Tensor:
    return torch.empty(shape, device="meta", **options)


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda: meta(2, 3) + 1, id="an integer beside a tensor"),
        pytest.param(lambda: meta(2, 3, dtype=torch.int64) + 1, id="another type"),
        pytest.param(lambda: meta(2, 3, dtype=torch.int64) + 1.0, id="a number of another type and equal value"),
        pytest.param(lambda: meta(2, 3, dtype=torch.int64) + True, id="a truth value of equal value"),
        pytest.param(lambda: meta(3, 2).t() + 1, id="other strides"),
        pytest.param(lambda: meta(3, 1).expand(3, 2).t() + 1, id="a stride of zero"),
        pytest.param(lambda: meta(2, 3, 4, 5).to(memory_format=torch.channels_last) * 2, id="channels last"),
        pytest.param(lambda: meta(2, 3).max(dim=1)[1], id="several outputs"),
        pytest.param(lambda: meta(2, 3).sum(dim=(0,)), id="a tuple of one"),
        pytest.param(lambda: meta(2, 3).sum(dim=(0, 1), keepdim=True), id="a keyword"),
        pytest.param(lambda: torch.arange(5, device="meta"), id="no tensor"),
        pytest.param(lambda: torch.cat([meta(2, 3), meta(4, 3)]), id="a list"),
        pytest.param(lambda: torch.cat([meta(2, 3), meta(2, 3)], dim=1), id="another list"),
        pytest.param(lambda: torch.view_as_complex(meta(2, 3, 2)) * 2, id="complex numbers"),
        pytest.param(lambda: torch.view_as_complex(meta(2, 3, 2)).conj().clone(), id="conjugates"),
        pytest.param(lambda: meta(2, 3).relu_(), id="in place"),
        pytest.param(lambda: meta(2, 3).split(2, dim=1)[0], id="a view"),
        pytest.param(lambda: torch.empty(2, 3).to("meta"), id="from another device"),
    ],
)
def test_an_answer_from_memory_is_torchs(operation: Any) -> None:
    with torch.no_grad():
        expected = operation()
        with RememberedOperations():
            found = [operation(), operation()]
    for tensor in found:
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert tensor.is_meta and tensor.is_conj() == expected.is_conj()


def test_what_shares_memory_or_writes_is_left_to_torch() -> None:
    with torch.no_grad(), RememberedOperations():
        for _ in range(2):
            tensor = meta(2, 3)
            before = tensor._version
            assert tensor.view(6)._base is tensor and tensor.add_(1) is tensor and tensor._version == before + 1


def test_what_reads_contents_is_left_to_torch() -> None:
    with torch.no_grad(), RememberedOperations():
        for rows in (1, 2):
            mask = torch.tensor([True] * rows + [False])
            assert mask.nonzero().shape == (rows, 1)
        with pytest.raises(RuntimeError, match="meta"):
            meta(1).item()


class Pooled(torch.nn.Module):
    """One row for each sample; how it attends depends on whether its mask leaves anything out."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = hidden[..., 0] > 0
        if not mask.all():
            hidden = hidden * mask[..., None]
        chosen = mask.nonzero()
        return hidden.mean(1) + len(chosen) + sum(mask.sum(1).tolist())


class Selecting(torch.nn.Module):
    """As many rows as a mask leaves."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[hidden[..., 0] > 0]


def test_a_unit_that_asks_after_values_tells_its_shape_if_no_answer_changes_it() -> None:
    hidden, functions = torch.randn(3, 5, 4), shapes.ShapeFunctions({"pooled": Pooled(), "selecting": Selecting()})
    found = functions("pooled", (hidden,), {})
    assert found.leaves[0].shape == tuple(Pooled()(hidden).shape) and found.assumed
    assert functions("selecting", (hidden,), {}).leaves[0].shape == (3, 5, 4)  # taken for shape-preserving


class Slicing(torch.nn.Module):
    """Takes the first half of each image's rows, whose offsets it makes from the images' sizes."""

    def forward(self, hidden: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        offsets = torch.empty(len(sizes), dtype=sizes.dtype)
        offsets[0] = 0
        offsets[1:] = sizes.cumsum(0)[:-1]
        places = [torch.arange(start, start + size // 2) for start, size in zip(offsets, sizes, strict=True)]
        return torch.index_select(hidden, 0, torch.cat(places).to(hidden.device))


class Counting(torch.nn.Module):
    """As many rows as hidden states say, which it writes beside sizes that are known."""

    def forward(self, hidden: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros(2, dtype=sizes.dtype)
        counts[0] = (hidden > 0).sum()
        return hidden[: int(counts[0] + sizes[0])]


def test_shapes_follow_from_known_sizes_and_not_from_what_was_written_over_them() -> None:
    hidden, sizes = torch.randn(10, 4), torch.tensor([4, 6])
    functions = shapes.ShapeFunctions({"slicing": Slicing(), "counting": Counting()})
    found = functions("slicing", (hidden, sizes), {}, known=(1,))
    assert found.leaves[0].shape == tuple(Slicing()(hidden, sizes).shape) and not found.assumed
    assert functions("counting", (hidden, sizes), {}, known=(1,)).assumed


class Alternating(torch.nn.Module):
    """Halves the width where its place in the list is odd, or where it was told to."""

    def __init__(self, layer_idx: int, halves: bool | None = None) -> None:
        super().__init__()
        self.layer_idx, self.halves = layer_idx, halves
        self.runs = torch.nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        halves = self.layer_idx % 2 if self.halves is None else self.halves
        return self.runs(hidden)[..., : 2 if halves else 4]


def test_units_that_look_alike_have_their_own_shapes() -> None:
    hidden = torch.randn(3, 4)
    by_place = [Alternating(index) for index in range(4)]
    by_setting = [Alternating(index, halves=index > 2) for index in range(4)]
    for layers in (by_place, by_setting):
        functions = shapes.ShapeFunctions({str(index): layer for index, layer in enumerate(layers)})
        found = [functions(str(index), (hidden,), {}).leaves[0].shape for index in range(4)]
        assert found == [tuple(layer(hidden).shape) for layer in layers]


def test_units_that_are_alike_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {str(index): Alternating(index, halves=False) for index in range(3)}
    layers["wide"] = Alternating(3, halves=False)
    layers["wide"].runs = torch.nn.Linear(4, 6)
    runs: list[int] = []
    forward = Alternating.forward
    monkeypatch.setattr(
        Alternating, "forward", lambda self, x: (runs.append(vars(self)["layer_idx"]), forward(self, x))[1]
    )
    functions = shapes.ShapeFunctions(layers)
    for name in layers:
        functions(name, (torch.randn(3, 4),), {})
    assert runs == [0, 3]
