"""User code that sees a microbatch where it means a batch is warned of by name, once, and nothing else is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import weight_norm
from transformers.modeling_outputs import BaseModelOutput

import penstock
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import in_turn, parallelize, run_step

WIDTH, ROWS = 6, 8
INPUTS = {"ids": torch.arange(ROWS * 3).view(ROWS, 3) % 5, "target": torch.ones(ROWS, 3, WIDTH)}


class Chain(nn.Module):
    def __init__(self, second: nn.Module | None = None, by_frequency: str = "") -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH, scale_grad_by_freq=by_frequency == "module")
        self.functional = by_frequency == "function"
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), second or nn.Linear(WIDTH, WIDTH)])
        self.forwards = 0

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return {"loss": functional.mse_loss(hidden, target)}


class Looked(nn.Module):
    """Looks its vectors up by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.table, scale_grad_by_freq=True)


def looked() -> nn.Module:
    model = Chain()
    model.embedding = Looked()  # type: ignore[assignment]
    return model


class Keeping(nn.Module):
    """Keeps something in an attribute, as `keep` says."""

    def __init__(self, keep: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.layer, self.keep = nn.Linear(WIDTH, WIDTH), keep
        self.count, self.shape, self.mean = 0, (), None
        self.table: Any = None
        self.history: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keep(self, x)
        return self.layer(x)


def count(module: Any, x: torch.Tensor) -> None:
    module.count += module.training


def grow(module: Any, x: torch.Tensor) -> None:
    module.history.append(x.shape[0])


def average(module: Any, x: torch.Tensor) -> None:
    mean = x.detach().mean()
    module.mean = mean if module.mean is None else 0.9 * module.mean + 0.1 * mean


def replace(module: Any, x: torch.Tensor) -> None:
    module.table = module.table or [None]
    module.table[0] = x.detach().mean()


def replace_of_a_graph(module: Any, x: torch.Tensor) -> None:
    """What no later forward could go on with."""
    module.table = module.table or [None]
    module.table[0], module.mean, module.shape = x.mean(), x.sum(), (x.sum(), 0.1 * 3)


def add(module: Any, x: torch.Tensor) -> None:
    module.table = module.table or {1}
    module.table.add(1 + max(module.table))


def write(module: Any, x: torch.Tensor) -> None:
    module.shape = module.shape or (torch.zeros(()),)
    module.shape[0].add_(1.0)


def look_up(module: Any, x: torch.Tensor) -> None:
    """What every forward finds as the first one has left it."""
    module.shape = tuple(x.shape[1:])
    if module.table is None:
        module.table = torch.arange(3)


def set_anew(module: Any, x: torch.Tensor) -> None:
    module.device, module.ratio = torch.device(x.device), np.float32(x.shape[1])
    module.table = BaseModelOutput(last_hidden_state=x + 1.0)
    module.sizes = [1, {"two": (2, x + 2.0)}]


def replace_array(module: Any, x: torch.Tensor) -> None:
    module.table = np.zeros(1) if module.table is None else module.table + 1


def set_a_circle(module: Any, x: torch.Tensor) -> None:
    """Objects of which nothing is told in a finite number of steps."""
    first, second = SimpleNamespace(), SimpleNamespace()
    first.other, second.other = second, first
    module.table = first


def set_weight(module: Any, x: torch.Tensor) -> None:
    if not module.count:
        module.count = 1
        with torch.no_grad():
            module.layer.bias.copy_(x.mean((0, 1)))


def normed() -> nn.Module:
    model = Chain()
    weight_norm(model.blocks[1])
    return model


class Rooted(Chain):
    """Counts in the model's own code."""

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        self.forwards += 1
        return super().forward(ids, target)


def clamp(parameter: Any) -> None:
    parameter.grad.clamp_(-1e-3, 1e-3)


def hooked(hook: str) -> nn.Module:
    model = Chain()
    weight = model.blocks[1].weight
    assert isinstance(weight, nn.Parameter)
    if hook == "before":
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    else:
        weight.register_post_accumulate_grad_hook(clamp)
    return model


# What makes a model, and what a warning on some rank says of it; None if there is none.
MODELS: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "nothing": (Chain, None),
    "a count": (lambda: Chain(Keeping(count)), "changes attributes of modules (blocks.1.count)"),
    "a list": (lambda: Chain(Keeping(grow)), "changes attributes of modules (blocks.1.history)"),
    "a running mean": (lambda: Chain(Keeping(average)), "changes attributes of modules (blocks.1.mean)"),
    "a replaced entry": (lambda: Chain(Keeping(replace)), "changes attributes of modules (blocks.1.table)"),
    "a set": (lambda: Chain(Keeping(add)), "changes attributes of modules (blocks.1.table)"),
    "a tensor in a tuple": (lambda: Chain(Keeping(write)), "changes attributes of modules (blocks.1.shape)"),
    "what is of a graph": (lambda: Chain(Keeping(replace_of_a_graph)), None),
    "what is set anew": (lambda: Chain(Keeping(set_anew)), None),
    "an array": (lambda: Chain(Keeping(replace_array)), "changes attributes of modules (blocks.1.table)"),
    "a circle": (lambda: Chain(Keeping(set_a_circle)), "changes attributes of modules (blocks.1.table)"),
    "what is looked up": (lambda: Chain(Keeping(look_up)), None),
    "a count between units": (Rooted, "changes attributes of modules (forwards)"),
    "a first forward that sets a weight": (
        lambda: Chain(Keeping(set_weight)),
        "changes attributes of modules (blocks.1.layer.bias)",
    ),
    "a weight that hooks make anew": (normed, None),
    "a hook": (lambda: hooked("before"), "hooks on the gradients of parameters (blocks.1.weight)"),
    "a hook after": (lambda: hooked("after"), "hooks on the gradients of parameters (blocks.1.weight)"),
    "by frequency": (
        lambda: Chain(by_frequency="module"),
        "aten::embedding with scale_grad_by_freq=True in the unit embedding",
    ),
    "by frequency, by a function": (looked, "aten::embedding with scale_grad_by_freq=True in the unit embedding"),
}


def warned(name: str, num_microbatches: int) -> list[str]:
    """What this rank is warned of in three steps."""
    torch.manual_seed(0)
    model = penstock.initialize(
        MODELS[name][0](), pipeline_parallel_size=2, num_microbatches=num_microbatches, example_inputs=INPUTS
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            run_step(model, INPUTS)
    return [str(each.message) for each in seen if "microbatch" in str(each.message)]


def all_warned(num_microbatches: int) -> list[list[str]]:
    return in_turn([lambda name=name: warned(name, num_microbatches) for name in MODELS])


def test_what_sees_a_microbatch_is_warned_of_by_name_and_once(pool: Pool) -> None:
    for (name, (_, expected)), *ranks in zip(MODELS.items(), *pool.run(2, all_warned, 4), strict=True):
        for told in ranks:
            assert len(told) <= 1, name
        told = [each for rank in ranks for each in rank]
        assert bool(told) == bool(expected), (name, told)
        assert all(str(expected) in each for each in told), (name, told)


def test_nothing_is_warned_of_where_a_microbatch_is_the_batch(pool: Pool) -> None:
    assert pool.run(2, all_warned, 1) == [[[]] * len(MODELS)] * 2


FORWARDS: list[int] = []


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        FORWARDS.append(1)
        return self.layer(x)


class Decorated(Counting):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        FORWARDS.append(1)
        return self.layer(x) + x


def keeping_by_a_hook() -> nn.Module:
    model, seen = Chain(), {}  # type: ignore[var-annotated]
    model.blocks[1].register_forward_hook(lambda module, args, output: seen.update(output=output))
    return model


def looking_by_a_hook() -> nn.Module:
    model, seen = Chain(), []  # type: ignore[var-annotated]
    model.blocks[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    return model


OF_ONE_RANK = {
    "a variable": (lambda: Chain(Counting()), f"forwards change variables ({__name__}.FORWARDS)"),
    "a variable, by a decorated forward": (
        lambda: Chain(Decorated()),
        f"forwards change variables ({__name__}.FORWARDS)",
    ),
    "tensors that a hook keeps": (keeping_by_a_hook, "forward hooks keep tensors (blocks.1)"),
    "shapes that a hook keeps": (looking_by_a_hook, None),
}


def of_one_rank(name: str) -> list[str]:
    model: Any = penstock.initialize(
        OF_ONE_RANK[name][0](), pipeline_parallel_size=2, num_microbatches=2, example_inputs=INPUTS
    )
    FORWARDS.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run_step(model, INPUTS)
        run_step(model, INPUTS)
    return [str(each.message) for each in seen]


def test_what_only_one_rank_has_of_a_forward_is_warned_of_by_name(pool: Pool) -> None:
    for name, (_, expected) in OF_ONE_RANK.items():
        first, second = pool.run(2, of_one_rank, name)
        assert first == [], name
        assert [each.split(":")[0].split(". ")[0] for each in second] == ([] if expected is None else [expected]), name


def counted() -> int:
    """Of a model that counts its forwards in its own code, after `initialize` and one evaluation."""
    model: Any = penstock.initialize(Rooted(), pipeline_parallel_size=2, num_microbatches=2, example_inputs=INPUTS)
    with torch.no_grad():
        model(**INPUTS)
    return int(model.forwards)


def test_following_a_forward_counts_as_none(pool: Pool) -> None:
    assert pool.run(2, counted) == [2, 2]


def train(family: str) -> list[str]:
    model = parallelize(FAMILIES[family].build(dropout=0.1), 2, num_microbatches=4)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for seed in range(2):
            run_step(model, batch(FAMILIES[family].kind, 8, seed=seed))
    return [str(each.message) for each in seen if "penstock" in each.filename]


def train_all(families: tuple[str, ...]) -> list[list[str]]:
    return in_turn([lambda family=family: train(family) for family in families])


def test_models_of_transformers_are_warned_of_nothing(pool: Pool) -> None:
    families = ("gpt2", "llama", "gemma3", "t5", "bart", "vit", "whisper")
    assert pool.run(2, train_all, families) == [[[]] * len(families)] * 2
