"""What each unit of a model costs, measured or estimated; and how fast messages between ranks are."""

from __future__ import annotations

import contextlib
import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from penstock.modeling.graph.chunked_loss import head_unit, refuse_head
from penstock.modeling.graph.crossing import BoundaryReport, boundary_before
from penstock.modeling.graph.dataflow import ReachedInside
from penstock.modeling.graph.dummy_inputs import InputsNeeded, dtype_of, dummy_inputs
from penstock.modeling.graph.meta_operations import Untraceable
from penstock.modeling.graph.plan import refusal
from penstock.modeling.graph.shapes import OutputShape, ShapeFunctions, flatten
from penstock.modeling.graph.units import trace_units, traced_units, without_cache
from penstock.modeling.instrumentation import known_of, tensors_of
from penstock.nested import map_tensors
from penstock.planning.cluster import Link
from penstock.planning.profile import Profile, UnitCost
from penstock.planning.unit_cost import Call, cost_of, of_all, timed
from penstock.runtime.comm.devices import local_device
from penstock.runtime.comm.exchange import Ranks

# Bytes of the messages by which links are measured, and how often.
SMALL, LARGE, REPETITIONS = 4096, 8 * 2**20, 9


@dataclass(frozen=True)
class FollowedForward:
    """A forward of a model, followed once."""

    names: list[str]
    calls: dict[str, list[Call]]  # what each unit is called with
    boundaries: list[BoundaryReport]  # behind each unit but the last
    costs: dict[Any, UnitCost]  # of the units that were run; those of equal shapes cost the same
    inputs: Mapping[str, Any]  # what it was called with


def profile_model(
    model: nn.Module,
    batch: int = 1,
    length: int = 128,
    device: torch.device | str | None = None,
    operations_per_second: float = 312e12,
    optimizer_states: float = 2,
    loss_chunk_tokens: int | None = None,
    followed: FollowedForward | None = None,
) -> Profile:
    """The costs of a model's units for microbatches of `batch` samples of `length` tokens.

    Args:
        length: of what models of text are given; not of inputs of the user's own.
        device: where the units are run; None estimates the seconds for one of so many `operations_per_second`.
        optimizer_states: numbers of a parameter's type that the optimizer keeps for it: 2 for Adam.
        followed: a forward of this model, or of one that differs in what is inside the units.

    Raises:
        NotImplementedError: the model cannot be split.
    """
    followed_forward = followed or follow(model, batch, length)
    names, head = followed_forward.names, None
    if loss_chunk_tokens is not None:
        head = chunked_head(model, followed_forward) if followed is None else _head_of(model, names)
    users: dict[int, list[str]] = {}
    for name in names:
        for inner, parameter in model.get_submodule(name).named_parameters():
            users.setdefault(id(parameter), []).append(f"{name}.{inner}")
    units = []
    for index, name in enumerate(names):
        module, is_last = model.get_submodule(name), index == len(names) - 1
        chunk = loss_chunk_tokens if name == head else None
        calls = followed_forward.calls.get(name, [])
        key = (_shapes(module), *map(_key, calls), is_last, chunk, device, operations_per_second)
        if key not in followed_forward.costs:
            each = partial(
                cost_of, module, device=device, is_last=is_last, loss_chunk_tokens=chunk,
                recomputed=_is_recomputed(model, name),
            )  # fmt: skip
            runs = [each(call, operations_per_second=operations_per_second) for call in calls]
            followed_forward.costs[key] = of_all(runs) if runs else UnitCost("", 0.0, 0.0, 0.0)
        sizes = tuple(float(parameter.nbytes) for parameter in module.parameters() if parameter.requires_grad)
        boundary = None if is_last else followed_forward.boundaries[index]
        units.append(
            replace(
                followed_forward.costs[key],
                name=name,
                weights=float(sum(part.nbytes for parts in tensors_of(module).values() for part in parts)),
                gradients=sum(sizes),
                optimizer=optimizer_states * sum(sizes),
                crossing=float(sum(crossing.num_bytes for crossing in boundary.crossing)) if boundary else 0.0,
                joined=bool(boundary and boundary.reason),
                sizes=sizes,
                tied=tuple(
                    (
                        users[id(parameter)][0],
                        float(parameter.nbytes),
                        float(parameter.nbytes * parameter.requires_grad),
                    )
                    for parameter in module.parameters()
                    if len(users[id(parameter)]) > 1
                ),
            )
        )
    about: dict[str, str | int | float] = {
        "microbatch": batch,
        **({} if known_of(model).example_inputs else {"length": length}),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "device": "estimated" if device is None else str(device),
    }
    if device is not None and torch.device(device).type == "cuda":
        about["card"] = torch.cuda.get_device_name(device)
    if device is None:
        about["operations per second"] = operations_per_second
    if loss_chunk_tokens is not None:
        about["loss_chunk_tokens"] = loss_chunk_tokens
    return Profile(type(model).__name__, tuple(units), device is not None, about)


def _head_of(model: nn.Module, names: Sequence[str]) -> str | None:
    return head_unit(model, {name: model.get_submodule(name) for name in names})


def chunked_head(model: nn.Module, followed: FollowedForward) -> str | None:
    """The unit that makes the logits. Raises ChunkedLossError if these cannot be made in chunks."""
    head = _head_of(model, followed.names)
    refuse_head(None if head is None else model.get_submodule(head), model)
    if "input_ids" in followed.inputs:
        functions = ShapeFunctions({name: model.get_submodule(name) for name in followed.names}, model)
        with contextlib.suppress(Untraceable, ReachedInside, NotImplementedError):
            trace_units(model, functions, {**followed.inputs, "labels": followed.inputs["input_ids"]}, head=head)
    return head


def follow(model: nn.Module, batch: int, length: int) -> FollowedForward:
    """Follow a forward on the first guess of inputs that can be traced; those with so many samples are tried first."""
    guesses = sorted(
        dummy_inputs(model, batch, length),
        key=lambda guess: not any(isinstance(x, torch.Tensor) and x.shape[:1] == (batch,) for x in guess.values()),
    )
    device = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), torch.device("cpu"))
    dtype = dtype_of(model)
    failure: Exception | None = None
    for guess in guesses:
        inputs = map_tensors(
            lambda _, x: x.to(device=device, dtype=dtype if x.is_floating_point() else x.dtype),
            "",
            without_cache(model, guess),
        )
        try:
            names, traced, recorder, _ = traced_units(model, inputs, _Recorder)
        except Exception as error:  # whatever a model's own code raises
            failure = failure or error
            continue
        assert isinstance(recorder, _Recorder)
        boundaries = [boundary_before(traced, names, index) for index in range(1, len(names))]
        return FollowedForward(names, recorder.calls, boundaries, {}, inputs)
    if known_of(model).example_inputs is None and not isinstance(model, PreTrainedModel):
        raise InputsNeeded(model, str(failure)) from failure
    if not isinstance(failure, (NotImplementedError, ValueError)):
        failure = refusal(model, f"{type(failure).__name__}: {failure}")
    raise failure


# ---------------------------------------------------------------- what units are called with


class _Recorder(ShapeFunctions):
    """Shape functions that remember the arguments of each call."""

    def __init__(self, units: dict[str, nn.Module], model: nn.Module | None = None) -> None:
        super().__init__(units, model)
        self.calls: dict[str, list[Call]] = {}

    def __call__(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], known: tuple[int, ...] = ()
    ) -> OutputShape:
        leaves, spec = flatten((args, kwargs))
        self.calls.setdefault(name, []).append((leaves, spec))
        return super().__call__(name, args, kwargs, known)


def _is_recomputed(model: nn.Module, unit: str) -> bool:
    """Whether gradient checkpointing runs a unit's forward again as a whole, as it does with a list's layers."""
    module, (where, _, number) = model.get_submodule(unit), unit.rpartition(".")
    if any(isinstance(inner, GradientCheckpointingLayer) for inner in module.modules()):
        return True
    owner = model.get_submodule(where.rpartition(".")[0])
    by_parts = any(hasattr(inner, "gradient_checkpointing") for inner in module.modules())
    return number.isdigit() and hasattr(owner, "gradient_checkpointing") and not by_parts


def _shapes(module: nn.Module) -> Any:
    return type(module), tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters()
    )


def _key(call: Call) -> Any:
    return tuple(
        (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x) if isinstance(x, Cache) else repr(x)
        for x in call[0]
    )


# ---------------------------------------------------------------- links


def measure_links() -> tuple[Link | None, Link | None]:
    """The link inside a node and the one between nodes; None for one that rank 0 does not have. Every rank calls it."""
    ranks = Ranks(dist.group.WORLD, lambda doing, peers: contextlib.nullcontext())
    hosts = ranks.exchange(socket.gethostname(), "measuring links")
    inside = [rank for rank, host in enumerate(hosts) if rank and host == hosts[0]]
    between = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
    links = [_between_first_and(peers[0]) if peers else None for peers in (inside, between)]
    measured = ranks.exchange([link and astuple(link) for link in links], "measuring links")[0]
    first, second = (link and Link(*link) for link in measured)
    return first, second


def _between_first_and(peer: int) -> Link | None:
    rank, device = dist.get_rank(), local_device()
    if rank not in (0, peer):
        return None

    def one_way(size: int) -> float:
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)

        def there_and_back() -> None:
            for sender, receiver in ((0, peer), (peer, 0)):
                if rank == sender:
                    dist.send(buffer, receiver)
                else:
                    dist.recv(buffer, sender)

        return statistics.median([timed(there_and_back, device)[0] / 2 for _ in range(REPETITIONS)][1:])

    small, large = one_way(SMALL), one_way(LARGE)
    bandwidth = (LARGE - SMALL) / max(large - small, 1e-9)
    return Link(max(0.0, small - SMALL / bandwidth), bandwidth)
