"""What units hand each other beside arguments and results: exact over stages, or refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock
from penstock.modeling.graph.shapes import ShapeFunctions
from penstock.modeling.graph.units import list_units
from tests.support.pool import Pool
from tests.support.stage_driver import split
from tests.support.training import EXACT, assert_same_gradients, gradients_of

WIDTH, ROWS = 4, 6
STORE: dict[str, Any] = {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = x + torch.tanh(self.linear(x))
        return hidden


class Held:
    """An object in which one block leaves something for another one."""

    value: Any = None


class Leaves(Block):
    """Leaves its result in an attribute, a list, a tensor, an object or a variable."""

    def __init__(self, where: str, held: Any) -> None:
        super().__init__()
        self.where, self.held, self.penalty = where, held, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        if self.where == "attribute":
            self.penalty = hidden.square().mean()  # type: ignore[assignment]
        elif self.where == "list":
            self.held.append(hidden.square().mean())
        elif self.where == "tensor":
            self.held.value[0] = hidden.square().mean()
        elif self.where == "object":
            self.held.value = hidden
        else:
            STORE["hidden"] = hidden
        return hidden


class Uses(Block):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = STORE.get("hidden") if self.held is None else self.held.value
        return super().forward(x if other is None else x + other)


class Chain(nn.Module):
    def __init__(self, blocks: list[nn.Module], held: Any = None) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(blocks)
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.held, list):
            self.held.clear()
        if isinstance(self.held, Held):
            self.held.value = x.new_zeros(1)
        for block in self.blocks:
            x = block(x)
        if isinstance(self.held, Held):
            penalties: Any = self.held.value
        else:
            penalties = self.held or [getattr(each, "penalty", 0.0) for each in self.blocks]
        return x.square().mean() + sum(penalties)


def leaving(where: str, pair: tuple[int, int] = (0, 3)) -> nn.Module:
    torch.manual_seed(2)
    STORE.clear()
    held: Any = {"list": [], "tensor": Held(), "object": Held()}.get(where)
    blocks: list[nn.Module] = [Block() for _ in range(4)]
    blocks[pair[0]] = Leaves(where, held)
    if where in ("object", "variable"):
        blocks[pair[1]] = Uses(held)
    return Chain(blocks, held if where in ("list", "tensor") else None).double()


class Reads(Block):
    """Reads what the model's code has put into the model."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.__dict__["root"] = root

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.root.start


class Root(nn.Module):
    kind: type[Reads] = Reads

    def __init__(self) -> None:
        super().__init__()
        self.first, self.start = nn.Linear(WIDTH, WIDTH), None
        self.blocks = nn.ModuleList(self.kind(self) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.start = x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def reading() -> nn.Module:
    torch.manual_seed(2)
    return Root().double()


class ReadsAndMeans(Reads):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = super().forward(x)
        return hidden, hidden.mean()


class RootOfPairs(Root):
    """Uses only the first of what each block returns, so that no stage receives all of it."""

    kind = ReadsAndMeans

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.start = x = self.first(x)
        for block in self.blocks:
            x = block(x)[0]
        return x.square().mean()


class Gives(Reads):
    def forward(self, x: torch.Tensor) -> Any:
        return Block.forward(self, x), self.root.start


class RootOfStarts(Root):
    """Uses what its blocks return as they have found it in the model."""

    kind = Gives

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.start = x = self.first(x)
        for block in self.blocks:
            x, start = block(x)
            x = x + start
        return x.square().mean()


def giving() -> nn.Module:
    torch.manual_seed(2)
    return RootOfStarts().double()


def reading_in_pairs() -> nn.Module:
    torch.manual_seed(2)
    return RootOfPairs().double()


class Borrows(Block):
    """Multiplies with the weight of another block, which it holds but has not registered."""

    def __init__(self, other: Block) -> None:
        super().__init__()
        self.__dict__["other"] = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(super().forward(x), self.other.linear.weight)


def borrowing() -> nn.Module:
    torch.manual_seed(2)
    first = Block()
    return Chain([first, Block(), Block(), Borrows(first)]).double()


def inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


def compare(makes: list[Callable[[], nn.Module]]) -> None:
    for make in makes:
        whole = make()
        loss = whole(**inputs())
        loss.backward()
        options = {"pipeline_parallel_size": 2, "num_microbatches": 3}
        model: Any = penstock.initialize(make(), {"model_parallelism": options}, example_inputs=inputs())
        found = 0.0
        for out in model(**inputs()):
            out.loss.backward()
            found += out.loss.item()
        assert abs(found - loss.item()) < EXACT, make
        assert_same_gradients(gradients_of(model), gradients_of(whole))


def leaves_beside() -> nn.Module:
    return leaving("object", (2, 3))


def alike_leave_in_a_variable() -> nn.Module:
    """The last of several units that are alike is the one whose result is used, on its own stage."""
    made: Any = leaving("variable", (2, 3))
    for place in (0, 1):
        made.blocks[place] = Leaves("variable", None).double()
    return made  # type: ignore[no-any-return]


def test_what_a_unit_reads_beside_its_arguments_is_sent_to_its_stage(pool: Pool) -> None:
    made = [reading, reading_in_pairs, giving, borrowing, leaves_beside, alike_leave_in_a_variable]
    pool.run(2, compare, made)


def refused(where: str) -> None:
    options = {"pipeline_parallel_size": 2, "num_microbatches": 3}
    model: Any = penstock.initialize(leaving(where), {"model_parallelism": options}, example_inputs=inputs())
    for _ in model(**inputs()):
        pass


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("attribute", "blocks.0 leaves a tensor behind in its attribute penalty, and the model's output"),
        ("list", "blocks.0 leaves a tensor behind in its attribute held, and the model's output"),
        ("tensor", "blocks.0 leaves a tensor behind, in an object of Python's, and the model's output"),
        ("object", "blocks.0 leaves a tensor behind in its attribute held, and blocks.3, on another stage"),
        ("variable", "blocks.0 leaves a tensor behind, in an object of Python's, and blocks.3, on another stage"),
    ],
)
def test_what_a_unit_leaves_for_another_stage_is_refused_by_name_on_all_ranks(
    pool: Pool, where: str, words: str
) -> None:
    for outcome in pool.run(2, refused, where, outcomes=True):
        assert isinstance(outcome, NotImplementedError)
        assert words in str(outcome)


class Ends(nn.Module):
    """Four blocks, of which one gives something beside its result, and what is made of both at the end."""

    def __init__(self, place: int, block: nn.Module, end: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Block() for _ in range(4))
        self.blocks[place], self.place, self.end = block, place, end
        self.dummy_inputs = inputs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            x = block(x, total) if isinstance(block, Adds) else block(x)
        return self.end(self.blocks[self.place], x) + total


class Adds(Block):
    """Adds to an argument."""

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = super().forward(x)
        total.add_(hidden.square().sum())
        return hidden


class Sums(Leaves):
    """Leaves a sum over the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = Block.forward(self, x)
        if self.where == "attribute":
            self.penalty = hidden.square().sum()  # type: ignore[assignment]
        else:
            STORE["penalty"] = hidden.square().sum()
        return hidden


def left_by(block: Any) -> torch.Tensor:
    penalty: torch.Tensor = block.penalty if block.where == "attribute" else STORE["penalty"]
    return penalty


def loss_of(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x.square().mean()


# What Python does with what a unit has left behind, or changed.
READ: dict[str, Callable[[], nn.Module]] = {
    "a condition": lambda: Ends(
        0, Leaves("attribute", None), lambda block, x: loss_of(block, 2 * x if float(block.penalty) > 0 else x)
    ),
    "a factor": lambda: Ends(
        0, Sums("attribute", None), lambda block, x: loss_of(block, x) * (1 + float(block.penalty))
    ),
    "of a variable": lambda: Ends(
        0, Sums("variable", None), lambda block, x: loss_of(block, x) * (1 + left_by(block).item())
    ),
}


@pytest.mark.parametrize("name", READ)
def test_what_python_reads_of_what_a_unit_of_another_stage_leaves_is_refused_by_name(name: str) -> None:
    for rank in split(READ[name]().double(), 2):
        with pytest.raises(
            NotImplementedError, match=r"depends on values computed by blocks\.0, which not every stage"
        ):
            rank.plan(inputs())


# Of the last stage: its penalty is a sum over the microbatch, beside a mean.
UNSEEN: dict[str, Callable[[], nn.Module]] = {
    "an attribute": lambda: Ends(3, Sums("attribute", None), lambda block, x: loss_of(block, x) + left_by(block)),
    "a variable": lambda: Ends(3, Sums("variable", None), lambda block, x: loss_of(block, x) + left_by(block)),
    "an argument": lambda: Ends(3, Adds(), loss_of),
    "an attribute, read": lambda: Ends(
        3, Leaves("attribute", None), lambda block, x: loss_of(block, x) * (1 + float(block.penalty))
    ),
    "an attribute, compared": lambda: Ends(
        3, Leaves("attribute", None), lambda block, x: loss_of(block, x) * (2 if float(block.penalty) > 0.5 else 1)
    ),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_a_loss_by_what_a_unit_leaves_beside_its_result_is_said_not_to_be_exact(name: str) -> None:
    rule = split(UNSEEN[name]().double(), 2)[0].plan(inputs()).loss
    assert rule is not None and not rule.exact


class Calls(Block):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.__dict__["other"] = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.other(x))


def test_a_unit_that_calls_another_one_is_refused_by_name() -> None:
    first = Block()
    with pytest.raises(NotImplementedError, match=r"the unit blocks\.3 calls blocks\.0, which is a unit of its own"):
        list_units(Chain([first, Block(), Block(), Calls(first)]), {"x": torch.zeros(2, WIDTH)})


@pytest.mark.parametrize("where", ["attribute", "list", "tensor", "object"])
def test_following_a_forward_leaves_nothing_in_the_model(where: str) -> None:
    model = leaving(where)
    held = [vars(block).get("held") for block in model.blocks]  # type: ignore[union-attr, unused-ignore]
    list_units(model, {"x": torch.zeros(2, WIDTH, dtype=torch.float64)})
    assert [vars(block).get("held") for block in model.blocks] == held  # type: ignore[union-attr, unused-ignore]
    assert held[0] is None or held[0] == [] or held[0].value is None
    assert model.blocks[0].penalty == 0.0  # type: ignore[index, union-attr, unused-ignore]


def decorated(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        return forward(*args, **kwargs)

    return run


class Registers(Chain):
    """Changes what is registered, and a variable."""

    @decorated
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        STORE["calls"] = STORE.get("calls", 0) + 1
        STORE["hidden"] = hidden = super().forward(x)
        self.table = torch.ones(3)
        self.last = nn.Identity()
        return hidden


def test_following_a_forward_leaves_what_is_registered_and_variables_that_a_decorated_forward_names_alone() -> None:
    model: Any = Registers([Block() for _ in range(4)])
    model.register_buffer("table", torch.zeros(3), persistent=False)
    model.last = nn.Tanh()
    table, last = model.table, model.last
    STORE.clear()
    list_units(model, {"x": torch.zeros(2, WIDTH)})
    assert not STORE
    assert model.table is table and model.last is last


def test_a_shape_that_a_stage_asks_for_leaves_nothing_in_variables() -> None:
    STORE.clear()
    functions = ShapeFunctions({"block": Leaves("variable", None)})
    functions("block", (torch.zeros(2, WIDTH),), {})
    assert not STORE
