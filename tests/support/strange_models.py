"""Modules as strangers write them. What is strange about one is plain data, drawn from a table; a model is made of it.

Each is a root with an input layer, four blocks and an output layer, of a few numbers each. Where a model draws random
numbers, they cancel out wherever every stage draws the same ones, so the plain model is the oracle for these, too.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import random
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, SAMPLES, BLOCKS = 4, 6, 4


@dataclass(frozen=True)
class Strange:
    """What is strange about a model. The first entry of each row of `CHOICES` is what is ordinary."""

    base: str = "module"
    registered: str = "list"
    carried: str = "tensor"
    config: str = "none"
    alias: str = "none"
    tie: str = "none"
    hook: str = "none"
    dtype: str = "double"
    noise: str = "none"
    flow: str = "chain"
    inside: str = "plain"
    state: str = "none"
    forward: str = "x"
    output: str = "tensor"
    stages: int = 2
    schedule: str = "1f1b"

    def __str__(self) -> str:
        ordinary = Strange()
        told = (f"{name}={value!r}" for name, value in vars(self).items() if value != getattr(ordinary, name))
        return f"Strange({', '.join(told)})"


CHOICES: Mapping[str, tuple[Any, ...]] = {
    "base": (
        *(
            "module",
            "abstract",
            "generic",
            "mixin",
            "abstract last",
            "protocol",
            "slots",
            "metaclass",
            "told of classes",
        ),
        *("own call", "own getattr", "forward of an instance", "own setattr"),
    ),
    "registered": ("list", "dict", "sequential", "attributes", "inside another", "numbers", "odd names"),
    "carried": (
        *("tensor", "tuple", "list", "dict", "ordered dict", "data class", "frozen data class", "named tuple"),
        *("nested", "with a number", "with integers", "with none"),
    ),
    "config": ("none", "dict", "list", "text", "named tuple", "slots", "data class", "raises", "module", "class"),
    "alias": ("none", "list", "block", "norm", "first", "in a block", "in a list"),
    "tie": ("none", "ends", "norms", "layer"),
    "hook": (
        *("none", "before", "after", "with names", "of the root", "backward", "of a tensor", "of a parameter"),
        "on a layer",
    ),
    "dtype": ("double", "single", "mixed", "complex"),
    "noise": ("none", "torch", "dropout", "numpy", "python", "generator of a layer"),
    "flow": (
        *("chain", "detached", "unused block", "unused value", "never called", "side branch", "twice in a row"),
        *("without gradients", "frozen", "in place", "in training", "parameter of the root", "weight of a block"),
        *("input again", "module of a buffer", "loop"),
    ),
    "inside": ("plain", "checkpoint", "checkpoint again", "autocast", "no meta", "shape"),
    "state": (
        *("none", "extra", "extra tensor", "extra of the root", "entry", "own names", "sparse", "none buffer"),
        *("integers", "temporary", "empty"),
    ),
    "forward": ("x", "any names", "one mapping", "own loss", "star"),
    "output": ("tensor", "tuple", "dict", "data class", "named tuple"),
    "stages": (2, 3),
    "schedule": ("1f1b", "gpipe", "zb-h1"),
}


def drawn(seed: int) -> Strange:
    """What is strange about example `seed`: of each row what is ordinary, or as often something else."""
    choose = random.Random(seed)
    chosen = {}
    for name, (ordinary, *others) in CHOICES.items():
        chosen[name] = choose.choice((ordinary, choose.choice(others)))
    return Strange(**chosen | {"stages": 2 + seed % 2})


# -- what blocks are given and give ------------------------------------------------------------------------------------


@dataclass
class Hidden:
    hidden: Any
    skip: Any


@dataclass(frozen=True)
class FrozenHidden:
    hidden: Any
    skip: Any


class HiddenTuple(NamedTuple):
    hidden: Any
    skip: Any


# How the two are put into one, and are taken out again.
CARRIED: Mapping[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "tensor": (lambda hidden, skip: hidden, lambda one: (one, one)),
    "tuple": (lambda hidden, skip: (hidden, skip), lambda one: one),
    "list": (lambda hidden, skip: [hidden, skip], lambda one: one),
    "dict": (lambda hidden, skip: {"hidden": hidden, "skip": skip}, lambda one: (one["hidden"], one["skip"])),
    "ordered dict": (
        lambda hidden, skip: collections.OrderedDict(hidden=hidden, skip=skip),
        lambda one: (one["hidden"], one["skip"]),
    ),
    "data class": (Hidden, lambda one: (one.hidden, one.skip)),
    "frozen data class": (FrozenHidden, lambda one: (one.hidden, one.skip)),
    "named tuple": (HiddenTuple, lambda one: (one.hidden, one.skip)),
    "nested": (
        lambda hidden, skip: {"a": (hidden, [Hidden(skip, None)])},
        lambda one: (one["a"][0], one["a"][1][0].hidden),
    ),
    "with a number": (lambda hidden, skip: (hidden, skip, 2.0), lambda one: (one[0], one[1] * one[2] / 2)),
    "with integers": (
        lambda hidden, skip: (hidden, skip, torch.arange(len(hidden), device=hidden.device)),
        lambda one: (one[0] + 0 * one[2][:, None], one[1]),
    ),
    "with none": (lambda hidden, skip: (hidden, None, skip), lambda one: (one[0], one[2])),
}


# -- modules -----------------------------------------------------------------------------------------------------------

T = TypeVar("T")


class Registering(type):
    """Keeps the names of its classes."""

    names: ClassVar[list[str]] = []

    def __new__(mcs, name: str, bases: tuple[type, ...], content: dict[str, Any]) -> Registering:
        mcs.names.append(name)
        return super().__new__(mcs, name, bases, content)


class Printing:
    """A mixin that is no module."""

    def shown(self) -> str:
        return type(self).__name__


class Runs(Protocol):
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...


class ToldOfClasses(nn.Module):
    def __init_subclass__(cls, *, said: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.said = said


class OwnCall(nn.Module):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class OwnGetattr(nn.Module):
    """Gives what its layer has."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "linear":
                raise
            return getattr(self.linear, name)


class OwnSetattr(nn.Module):
    """Keeps a list of what was set."""

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.setdefault("were_set", []).append(name)
        super().__setattr__(name, value)


class Slots(nn.Module):
    __slots__ = ("told",)


BASES: Mapping[str, tuple[Any, ...]] = {
    "module": (nn.Module,),
    "abstract": (abc.ABC, nn.Module),
    "generic": (Generic[T], nn.Module),
    "mixin": (Printing, nn.Module),
    "abstract last": (nn.Module, abc.ABC),
    "protocol": (Runs, nn.Module),
    "slots": (Slots,),
    "metaclass": (nn.Module,),
    "told of classes": (ToldOfClasses,),
    "own call": (OwnCall,),
    "own getattr": (OwnGetattr,),
    "forward of an instance": (nn.Module,),
    "own setattr": (OwnSetattr,),
}


def class_like(body: type, base: str) -> Any:
    """The methods of `body` in a class with other bases."""
    keywords: dict[str, Any] = {"metaclass": {"metaclass": Registering}, "told of classes": {"said": "yes"}}.get(
        base, {}
    )
    content = {name: value for name, value in vars(body).items() if isinstance(value, types.FunctionType)}
    return types.new_class(body.__name__, BASES[base], keywords, lambda namespace: namespace.update(content))


class Block:
    def __init__(self: Any, strange: Strange) -> None:
        nn.Module.__init__(self)
        self.strange = strange
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        if strange.dtype == "mixed":
            self.norm.float()
        if strange.dtype == "complex":
            self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128) / 4)
        if strange.state == "own names":
            self.scale = nn.Parameter(torch.ones(WIDTH))
        if strange.state == "entry":
            self.register_state_dict_post_hook(_add_entry)
        if strange.state == "sparse":
            self.register_buffer("map", torch.eye(WIDTH).to_sparse(), persistent=False)
        if strange.state == "none buffer":
            self.register_buffer("map", None)
        if strange.state == "integers":
            self.register_buffer("order", torch.tensor([1, 0, 3, 2]))
        if strange.state == "temporary":
            self.register_buffer("order", torch.tensor([1, 0, 3, 2]), persistent=False)
        if strange.state == "empty":
            self.register_buffer("nothing", torch.zeros(0, 3))
        if strange.noise == "dropout":
            self.drop = nn.Dropout(0.5)
        if strange.base == "forward of an instance":
            self.forward = self.steps
        if strange.hook == "on a layer":
            self.linear.register_forward_hook(lambda module, args, output: output * 0.5)

    def forward(self: Any, carried: Any) -> Any:
        return self.steps(carried)

    def steps(self: Any, carried: Any) -> Any:
        pack, unpack = CARRIED[self.strange.carried]
        hidden, skip = unpack(carried)
        if self.strange.inside.startswith("checkpoint"):
            hidden = checkpoint(self.compute, hidden, use_reentrant=self.strange.inside == "checkpoint again")
        elif self.strange.inside == "autocast":
            kind = hidden.device.type
            with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind)):
                hidden = self.compute(hidden)
        else:
            hidden = self.compute(hidden)
        if self.strange.noise != "none":
            hidden = hidden + 0 * functional.dropout(hidden, 0.5, self.training)
        if self.strange.hook == "of a tensor" and hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 0.5)
        return pack(hidden, skip)

    def compute(self: Any, hidden: Any) -> Any:
        normed = self.norm(hidden.to(self.norm.weight.dtype)).to(hidden.dtype)
        if self.strange.inside == "shape":
            rows, width = normed.shape
            normed = normed.reshape(rows, 2, width // 2).transpose(1, 2).reshape(rows, width)
        if self.strange.inside == "no meta" and bool((normed > 100).any()):
            normed = normed / 2
        found = torch.tanh(self.linear(normed))
        if self.strange.dtype == "complex":
            found = found + (found * self.turn).real
        if self.strange.state == "own names":
            found = found * self.scale
        if self.strange.state == "sparse":
            found = torch.sparse.mm(self.map, found.T).T
        if self.strange.state in ("integers", "temporary"):
            found = found[:, self.order]
        if self.strange.noise == "dropout":
            found = found + 0 * self.drop(found)
        return hidden + found


class Stateful:
    """What a block's class has where it keeps more than tensors."""

    def get_extra_state(self: Any) -> Any:
        return {"seen": 3, "name": "a", "ratio": 0.5, "nested": [1, (2, None)], "raw": b"\x00\xff"}

    def set_extra_state(self: Any, state: Any) -> None:
        assert state == Stateful.get_extra_state(self)
        self.was_told = True


class StatefulTensor:
    def get_extra_state(self: Any) -> Any:
        return torch.arange(3)

    def set_extra_state(self: Any, state: Any) -> None:
        assert torch.equal(state, torch.arange(3))
        self.was_told = True


class OwnNames:
    """Saves the logarithm of its scale."""

    def _save_to_state_dict(self: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        destination[f"{prefix}log_scale"] = destination.pop(f"{prefix}scale").detach().log()

    def _load_from_state_dict(self: Any, state: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}log_scale" in state:
            state[f"{prefix}scale"] = state.pop(f"{prefix}log_scale").exp()
        nn.Module._load_from_state_dict(self, state, prefix, *args)


class Versioned:
    """Takes the entry of `_add_entry`."""

    def _load_from_state_dict(self: Any, state: Any, prefix: str, *args: Any) -> None:
        assert state.pop(f"{prefix}version", 2) == 2
        nn.Module._load_from_state_dict(self, state, prefix, *args)


def _add_entry(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[f"{prefix}version"] = 2


STATES: Mapping[str, type] = {
    "extra": Stateful,
    "extra tensor": StatefulTensor,
    "own names": OwnNames,
    "entry": Versioned,
}


class Places(nn.Module):
    """Has only a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.places


class Body(nn.Module):
    """Holds blocks, and is never called."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)


class Root:
    def __init__(self: Any, strange: Strange) -> None:
        nn.Module.__init__(self)
        self.strange = strange
        kind = class_like(Block, strange.base)
        if strange.state in STATES:
            own = {
                name: one for name, one in vars(STATES[strange.state]).items() if isinstance(one, types.FunctionType)
            }
            for name, method in own.items():
                setattr(kind, name, method)
        blocks = [kind(strange) for _ in range(BLOCKS)]
        self.first = nn.Linear(WIDTH, WIDTH)
        if strange.alias == "first":
            self.favourite = blocks[2]
        self.names = register(self, blocks, strange.registered)
        self.last = nn.Linear(WIDTH, WIDTH)
        if strange.config != "none":
            self.config = configuration(strange.config)
        if strange.tie == "ends":
            self.last.weight = self.first.weight
        if strange.tie == "norms":
            blocks[3].norm.weight = blocks[0].norm.weight
        if strange.tie == "layer":
            blocks[3].linear = blocks[1].linear
        if strange.alias == "list":
            self.again = nn.ModuleList(blocks)
        if strange.alias == "block":
            self.final = blocks[-1]
        if strange.alias == "norm":
            self.final_norm = blocks[3].norm
        if strange.alias == "in a block":
            blocks[3].before = blocks[2].linear
        if strange.alias == "in a list":
            self.norms = nn.ModuleList(block.norm for block in blocks)
        if strange.flow == "never called":
            self.spare = nn.Linear(WIDTH, WIDTH)
        if strange.flow in ("unused block", "side branch", "module of a buffer"):
            self.side = Places() if strange.flow == "module of a buffer" else nn.Linear(WIDTH, WIDTH)
        if strange.flow == "parameter of the root":
            self.places = nn.Parameter(torch.linspace(0, 1, WIDTH))
        if strange.flow == "frozen":
            blocks[1].requires_grad_(False)
        hook(self, blocks, strange.hook)

    def blocks(self: Any) -> list[Any]:
        return [self.get_submodule(name) for name in self.names]

    def noise(self: Any, x: torch.Tensor) -> Any:
        """Numbers that are drawn in the root's forward."""
        kind = self.strange.noise
        if kind in ("torch", "dropout"):
            return torch.rand(x.shape, dtype=x.dtype)
        if kind == "generator of a layer":
            return functional.dropout(torch.ones_like(x), 0.5)
        if kind == "numpy":
            return torch.tensor(np.random.rand(*x.shape), dtype=x.dtype)
        return torch.full(x.shape, random.random(), dtype=x.dtype)

    def compute(self: Any, x: torch.Tensor) -> torch.Tensor:
        strange, blocks = self.strange, self.blocks()
        pack, unpack = CARRIED[strange.carried]
        hidden = self.first(x)
        if strange.flow == "parameter of the root":
            hidden = hidden + self.places
        if strange.flow == "module of a buffer":
            hidden = self.side(hidden)
        carried = pack(hidden, hidden)
        noise, seen = None, None
        for number, block in enumerate(blocks):
            if strange.flow == "without gradients" and number == 0:
                with torch.no_grad():
                    carried = block(carried)
            else:
                carried = block(carried)
            if strange.flow == "twice in a row":
                carried = block(carried)
            if strange.flow == "loop":
                for _ in range(2):
                    carried = block(carried)
            if strange.noise != "none" and number == 0:
                noise = self.noise(x)
                seen = unpack(carried)[0] * 0 + noise
            if number == 1:
                carried = self.between(carried)
        hidden, skip = unpack(carried)
        if strange.flow != "unused value":
            hidden = hidden + skip
        if strange.flow == "side branch":
            hidden = hidden + self.side(x)
        if strange.flow == "input again":
            hidden = hidden + x
        if strange.flow == "parameter of the root":
            hidden = hidden * self.places
        if strange.flow == "weight of a block":
            hidden = hidden @ blocks[3].linear.weight
        hidden = self.last(hidden)
        return hidden if noise is None else hidden + 1000 * (seen - noise)

    def between(self: Any, carried: Any) -> Any:
        """What the root does after the second block."""
        flow, (pack, unpack) = self.strange.flow, CARRIED[self.strange.carried]
        hidden, skip = unpack(carried)
        if flow == "detached":
            hidden, skip = hidden.detach(), skip.detach()
        elif flow == "unused block":
            self.side(hidden)
        elif flow == "in place":
            hidden = hidden.add_(1)
        elif flow == "in training" and self.training:
            hidden = hidden * 2
        else:
            return carried
        return pack(hidden, skip)

    def given(self: Any, x: torch.Tensor) -> Any:
        found, output = self.compute(x), self.strange.output
        if output == "tuple":
            return found, found.sum(1)
        if output == "dict":
            return {"out": found, "sum": found.sum(1)}
        if output == "data class":
            return Hidden(found, found.sum(1))
        if output == "named tuple":
            return HiddenTuple(found, found.sum(1))
        return found


class TakesX:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.given(x)


class TakesAnyNames:
    def forward(self: Any, **inputs: Any) -> Any:
        return self.given(inputs["x"])


class TakesOneMapping:
    def forward(self: Any, batch: Any) -> Any:
        return self.given(batch["x"])


class TakesStar:
    def forward(self: Any, x: torch.Tensor, *more: Any, **others: Any) -> Any:
        return self.given(x)


class HasOwnLoss:
    def forward(self: Any, x: torch.Tensor, target: torch.Tensor | None = None) -> Any:
        found = self.compute(x)
        return {"loss": None if target is None else functional.mse_loss(found, target), "out": found}


FORWARDS: Mapping[str, type] = {
    "x": TakesX, "any names": TakesAnyNames, "one mapping": TakesOneMapping, "own loss": HasOwnLoss, "star": TakesStar,
}  # fmt: skip


class ExtraOfRoot:
    def get_extra_state(self: Any) -> Any:
        return "of the root"

    def set_extra_state(self: Any, state: Any) -> None:
        assert state == "of the root"


def register(root: Any, blocks: list[nn.Module], how: str) -> list[str]:
    """Put the blocks into the root; returns their names."""
    lists: dict[str, Callable[[], tuple[str, nn.Module]]] = {
        "list": lambda: ("layers", nn.ModuleList(blocks)),
        "dict": lambda: ("layers", nn.ModuleDict({f"b{number}": block for number, block in enumerate(blocks)})),
        "sequential": lambda: ("layers", nn.Sequential(*blocks)),
        "inside another": lambda: ("body", Body(blocks)),
    }
    if how in lists:
        root.add_module(*lists[how]())
    else:
        for number, block in enumerate(blocks):
            root.add_module(
                {"attributes": "block{}", "numbers": "{}", "odd names": "\u00fcnd {}-"}[how].format(number), block
            )
    names = {module: name for name, module in root.named_modules()}
    return [names[block] for block in blocks]


def hook(root: Any, blocks: list[Any], how: str) -> None:
    if how == "before":
        blocks[1].register_forward_pre_hook(lambda module, args: args)
    elif how == "after":
        pack, unpack = CARRIED[root.strange.carried]
        blocks[2].register_forward_hook(lambda module, args, output: pack(unpack(output)[0] * 0.5, unpack(output)[1]))
    elif how == "with names":
        blocks[1].register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True)
    elif how == "of the root":
        root.register_forward_hook(lambda module, args, output: output)
    elif how == "backward":
        blocks[1].linear.register_full_backward_hook(lambda module, given, taken: None)
    elif how == "of a parameter":
        blocks[2].linear.weight.register_hook(lambda gradient: gradient * 0.5)


class NamedConfiguration(NamedTuple):
    width: int = WIDTH


class SlotsConfiguration:
    __slots__ = ("width",)


@dataclass
class Configuration:
    width: int = WIDTH
    dropout: float = 0.0


class Raises(dict[str, Any]):
    """Entries are attributes; what is lacking is a KeyError, and not an AttributeError."""

    __getattr__ = dict.__getitem__


def configuration(kind: str) -> Any:
    return {
        "dict": {"width": WIDTH},
        "list": [WIDTH],
        "text": "width: 4",
        "named tuple": NamedConfiguration(),
        "slots": SlotsConfiguration(),
        "data class": Configuration(),
        "raises": Raises(width=WIDTH),
        "module": nn.Linear(1, 1),
        "class": Configuration,
    }[kind]


def build(strange: Strange) -> Any:
    """The model, the same for the same `strange`."""
    torch.manual_seed(5)
    kind = class_like(Root, strange.base)
    for part in (FORWARDS[strange.forward], *([ExtraOfRoot] if strange.state == "extra of the root" else [])):
        for name, method in vars(part).items():
            if isinstance(method, types.FunctionType):
                setattr(kind, name, method)
    if abc.ABC in BASES[strange.base]:
        kind = abc.update_abstractmethods(kind)
    model = kind(strange)
    return model.float() if strange.dtype == "single" else model


def batch(strange: Strange, step: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(step)
    dtype = torch.float32 if strange.dtype == "single" else torch.float64
    x, target = (torch.randn(SAMPLES, WIDTH, generator=draw, dtype=dtype) for _ in range(2))
    return {"batch": {"x": x}, "target": target} if strange.forward == "one mapping" else {"x": x, "target": target}


def inputs_of(strange: Strange, whole: Mapping[str, Any]) -> dict[str, Any]:
    """What the plain model is given of a batch."""
    return {name: value for name, value in whole.items() if name != "target" or strange.forward == "own loss"}


def criterion(output: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    if isinstance(output, Mapping):
        output = output["out"]
    elif dataclasses.is_dataclass(output) or hasattr(output, "_fields"):
        output = output.hidden
    elif isinstance(output, tuple):
        output = output[0]
    return functional.mse_loss(output, inputs["target"])
