"""A module that is registered under several names is one module: it keeps its weights, trains and is saved as such."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import penstock
from tests.support.pool import Pool
from tests.support.training import assert_same_gradients, gradients_of, kept_in_double, run_step

WIDTH = 4


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        inner = [nn.Linear(WIDTH, WIDTH) for _ in range(2 if kind == "deep" else 1)]
        self.inner: nn.Module = nn.ModuleList(inner) if kind == "deep" else nn.Sequential(*inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        for one in self.inner.children():
            hidden = torch.tanh(one(hidden))
        return x + hidden


class Alias(NamedTuple):
    """`holder.name = target`, registered before all that the holder has, if `first`. Places are numbers of modules in
    the tree, taken modulo their number."""

    holder: int
    target: int
    name: str
    first: bool


class Tree(NamedTuple):
    """How a model is made: its blocks' kinds, how deep their list lies, whether the forward calls blocks by the last of
    their names, and what else is registered."""

    kinds: tuple[str, ...]
    depth: int
    by_alias: bool
    aliases: tuple[Alias, ...]


class Model(nn.Module):
    """Runs its blocks one after the other, by the first or the last of their names."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        body: nn.Module = self
        for _ in range(tree.depth):
            body.body = nn.Module()
            body = body.body
        body.layers = nn.ModuleList(map(Layer, tree.kinds))
        self.head = nn.Linear(WIDTH, WIDTH)
        blocks = list(body.layers)
        for alias in tree.aliases:
            self._register(alias)
        names: dict[nn.Module, list[str]] = {}
        for name, module in self.named_modules(remove_duplicate=False):
            names.setdefault(module, []).append(name)
        self.path = [names[block][-1 if tree.by_alias else 0] for block in blocks]

    def _register(self, alias: Alias) -> None:
        modules = list(self.modules())
        holder, target = modules[alias.holder % len(modules)], modules[alias.target % len(modules)]
        # No module may contain itself, nor a list, a Sequential or a block what is no part of its forward.
        if holder in target.modules() or isinstance(holder, (nn.ModuleList, nn.Sequential)):
            return
        if alias.name == "norm":
            if not (isinstance(holder, Layer) and isinstance(target, nn.LayerNorm)):
                return
        elif alias.name in holder._modules:
            return
        rest = {name: child for name, child in holder._modules.items() if name != alias.name}
        holder._modules.clear()
        holder._modules.update({alias.name: target, **rest} if alias.first else {**rest, alias.name: target})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.path:
            x = self.get_submodule(name)(x)
        return self.head(x)


class Simple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.linear(self.norm(x))
        return hidden


class Shared(nn.Module):
    """Two layers of different stages share one normalisation, and stand in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Simple(), Simple(), Simple()
        self.third.norm = self.first.norm
        self.last_norm = self.second.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


def criterion(output: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(output, inputs["target"])


def batch() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {"x": torch.randn(4, WIDTH, generator=draw), "target": torch.randn(4, WIDTH, generator=draw)}


def build(tree: Tree | None) -> nn.Module:
    torch.manual_seed(3)
    return (Shared() if tree is None else Model(tree)).double()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def steps(tree: Tree | None, folder: str) -> Any:
    """On a worker: weights after `initialize`, gradients and weights after a step."""
    with kept_in_double():
        inputs = {name: value.double() for name, value in batch().items()}
        model: Any = penstock.initialize(
            build(tree),
            {
                "model_parallelism": {
                    "pipeline_parallel_size": torch.distributed.get_world_size(),
                    "num_microbatches": 2,
                }
            },
            criterion,
            example_inputs={"x": inputs["x"][:1]},
        )
        at_start = weights_of(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run_step(model, inputs)
        gradients = gradients_of(model)
        optimizer.step()
        model.save_parallelized(f"{folder}/merged", merge_checkpoints=True)
        return at_start, gradients, weights_of(model)


aliases = st.builds(
    Alias, st.integers(0, 99), st.integers(0, 99), st.sampled_from(["one", "other", "norm"]), st.booleans()
)
trees = st.builds(
    Tree,
    st.lists(st.sampled_from(["plain", "deep"]), min_size=3, max_size=4).map(tuple),
    st.integers(0, 2),
    st.booleans(),
    st.lists(aliases, min_size=1, max_size=4).map(tuple),
)


def assert_exact(pool: Pool, tree: Tree | None, stages: int) -> None:
    with kept_in_double():
        plain = build(tree)
        start, inputs = weights_of(plain), {name: value.double() for name, value in batch().items()}
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        criterion(plain(inputs["x"]), inputs).backward()
        expected = gradients_of(plain)
        optimizer.step()
    names = set()
    with tempfile.TemporaryDirectory() as folder:
        for at_start, gradients, after in pool.run(stages, steps, tree, folder, timeout=60):
            assert all(torch.equal(tensor, start[name]) for name, tensor in at_start.items())
            assert_same_gradients(gradients, expected)
            assert all(torch.allclose(tensor, plain.state_dict()[name], atol=1e-12) for name, tensor in after.items())
            names |= after.keys()
        assert names == start.keys()
        merged = torch.load(f"{folder}/merged/pytorch_model.bin")
        assert merged.keys() == start.keys()
        build(tree).load_state_dict(merged)
        assert all(torch.allclose(merged[name], tensor, atol=1e-12) for name, tensor in plain.state_dict().items())


@settings(max_examples=12)
@given(tree=trees, stages=st.sampled_from([2, 3]))
def test_modules_under_several_names_keep_their_weights_and_train_exactly(pool: Pool, tree: Tree, stages: int) -> None:
    assert_exact(pool, tree, stages)


def test_a_module_that_layers_of_two_stages_share_is_a_tied_weight(pool: Pool) -> None:
    assert_exact(pool, None, 2)
