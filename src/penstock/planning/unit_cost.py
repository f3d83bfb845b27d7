"""What one unit of a model costs, run alone with random weights: seconds, measured or estimated, and bytes."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import Cache

from penstock.modeling.graph.chunked_loss import ChunkedLogits
from penstock.modeling.graph.costs import operations_of_product
from penstock.modeling.placeholders.ghosts import meta_placeholder
from penstock.planning.profile import UnitCost
from penstock.runtime.gradients.weight_gradients import DeferredGradient, WeightGradientQueues, install, uninstall
from penstock.runtime.loss_proxy import requires_grad

# The leaves of a unit's arguments, and how they are put together.
Call = tuple[list[Any], pytree.TreeSpec]

# A measurement is repeated for at least this long and this often; the median counts.
LEAST_SECONDS, LEAST_TIMES = 0.2, 3
# Of a device's operations per second, what the matrix products of transformers reach (MFU of large runs: 0.3 to 0.5).
REACHED = 0.4
# Operations that it then does while it reads or writes a byte: 312e12 / 1.6e12 for an A100. By data sheets others have
# 76 (3090) to 400 (L4), so that a norm, which only reads and writes, takes 0.4 times to twice the estimate there.
OPERATIONS_PER_BYTE = 200.0 * REACHED


def of_all(runs: Sequence[UnitCost]) -> UnitCost:
    """The cost of a unit that a forward runs several times; it is at work in one run at a time."""
    once = {name: max(getattr(run, name) for run in runs) for name in ("working", "splitting", "forwarding")}
    each = ("forward", "backward", "weight", "kept", "kept_checkpointed", "deferred", "output")
    return replace(runs[0], **once, **{name: sum(getattr(run, name) for run in runs) for name in each})


def cost_of(
    module: nn.Module,
    call: Call,
    device: torch.device | str | None,
    is_last: bool,
    operations_per_second: float,
    loss_chunk_tokens: int | None = None,
    recomputed: bool = False,
) -> UnitCost:
    """The cost of one run of a unit alone, in a training step.

    Args:
        device: where it is run; None estimates the seconds for one of so many `operations_per_second`.
        is_last: whether its first result gives the loss.
        loss_chunk_tokens: of a last unit that is a head, of how many tokens the logits exist at once; None for all.
        recomputed: whether gradient checkpointing runs its forward again, which it does not at a model's ends.
    """
    where = torch.device("meta" if device is None else device)
    unit = meta_placeholder(module).to_empty(device=where).train()
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name, parameter in unit.named_parameters():
        parameter.requires_grad_(name in trained)
    for tensor in (*unit.parameters(), *unit.buffers()):
        with torch.no_grad():
            tensor.normal_(0, 0.02) if tensor.is_floating_point() else tensor.zero_()
    for parameter in filter(requires_grad, unit.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    hidden = next((leaf for leaf in call[0] if _is_hidden(leaf)), None)
    leaves = [_argument(leaf, where, hidden) for leaf in call[0]]
    args, kwargs = pytree.tree_unflatten(leaves, call[1])
    sources = [leaf for leaf in _tensors(leaves) if leaf.requires_grad]
    parameters = list(filter(requires_grad, unit.parameters()))

    returned: list[torch.Tensor] = []

    def forward() -> list[torch.Tensor]:
        if loss_chunk_tokens is not None:
            output: Any = ChunkedLogits.of(unit, unit, leaves[0], loss_chunk_tokens)
            logits = output.flatten(0, -2).float()
            return [functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=where))]
        output = unit(*args, **kwargs)
        differentiable = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        if is_last and differentiable and differentiable[0].dim() > 1:  # the loss, which is outside of all units
            returned[:] = differentiable[:1]  # the caller has them
            logits = differentiable[0].float().flatten(0, -2)
            differentiable[0] = functional.cross_entropy(
                logits, torch.zeros(len(logits), dtype=torch.long, device=where)
            )
        return differentiable[:1] if is_last else differentiable

    # Masks and the like are one for all units.
    shared = [leaf for leaf in _tensors(leaves) if not leaf.requires_grad]
    shared += [parameter for parameter in unit.parameters() if not parameter.requires_grad]
    kept, forwarding, working, forward_work, backward_work = _memory(forward, parameters, shared, sources, returned)
    queue = _Queue()
    # The head's weight gradient is not put off where logits come in chunks.
    puts_off = install(unit, queue, None if loss_chunk_tokens is None else unit)
    _, _, splitting, _, of_input = _memory(forward, parameters, shared, sources, returned)
    uninstall(unit)
    checkpointed = float(sum(source.nbytes for source in sources)) if recomputed else kept
    if device is None:
        work = forward_work, of_input, max(0.0, backward_work - of_input)
        seconds, backward, weight = (each / (REACHED * operations_per_second) for each in work)
    else:
        seconds, backward, weight = _seconds(forward, sources, parameters, where)
        if not puts_off:
            backward, weight = backward + weight, 0.0
    return UnitCost(
        "", seconds, backward, weight, min(kept, checkpointed), kept=kept, deferred=queue.num_bytes(parameters),
        output=float(sum(tensor.nbytes for tensor in returned)), working=working, splitting=splitting,
        forwarding=forwarding,
    )  # fmt: skip


def _is_hidden(leaf: Any, like: torch.Tensor | None = None) -> bool:
    """Whether an argument may be hidden states: (batch, length, width), or an image; and such as `like`, if given."""
    if not (isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim() > 2):
        return False
    return like is None or (leaf.dim() == like.dim() and (leaf.dim() > 3 or leaf.shape[-1] == like.shape[-1]))


def _argument(leaf: Any, device: torch.device, hidden: torch.Tensor | None) -> Any:
    """What a unit is called with: random values for what gradients go back to, zeros for masks and the like."""
    if isinstance(leaf, Cache):
        return None  # training has none
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not _is_hidden(leaf, hidden):
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=device).normal_().requires_grad_()


def _seconds(
    forward: Callable[[], list[torch.Tensor]],
    sources: list[torch.Tensor],
    parameters: list[nn.Parameter],
    device: torch.device,
) -> tuple[float, float, float]:
    """Median seconds of F, of a backward for the inputs, and of what a backward for all takes longer; measured in
    turns, so that a machine whose speed drifts is as fast for one as for another."""
    samples: list[tuple[float, float, float]] = []
    begin = time.perf_counter()
    # The first turn, which sets things up, is left out.
    while len(samples) <= LEAST_TIMES or time.perf_counter() - begin < LEAST_SECONDS:
        of_forward, outputs = timed(forward, device)
        of_inputs, _ = timed(partial(_gradients, outputs, sources), device) if sources else (0.0, None)
        outputs = forward()
        of_all, _ = timed(partial(_gradients, outputs, [*sources, *parameters]), device)
        samples.append((of_forward, of_inputs, of_all))
        del outputs
    seconds, of_inputs, of_all = (statistics.median(column) for column in zip(*samples[1:], strict=True))
    return seconds, of_inputs, max(0.0, of_all - of_inputs)


def timed(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds until what `run` does on a device is done, and its result."""
    synchronize(device)
    start = time.perf_counter()
    result = run()
    synchronize(device)
    return time.perf_counter() - start, result


def _gradients(outputs: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if outputs and sources:
        torch.autograd.grad(outputs, sources, [torch.ones_like(output) for output in outputs], allow_unused=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Queue(WeightGradientQueues):
    """Keeps what a backward leaves for its weight gradients, for good."""

    takes_weight_gradients = True

    def __init__(self) -> None:
        super().__init__()
        self._left: list[DeferredGradient] = []

    def defer(self, deferred: DeferredGradient) -> None:
        self._left.append(deferred)

    def num_bytes(self, parameters: list[nn.Parameter]) -> float:
        """The bytes of what was left, without the parameters, which are there anyway."""
        owned = {parameter.untyped_storage()._cdata for parameter in parameters}
        left = _tensors([cast(partial[None], entry.compute).args for entry in self._left])
        sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in left}
        return float(sum(size for key, size in sizes.items() if key not in owned))


def _memory(
    forward: Callable[[], list[torch.Tensor]],
    parameters: list[nn.Parameter],
    shared: list[torch.Tensor],
    sources: list[torch.Tensor],
    returned: list[torch.Tensor],
) -> tuple[float, float, float, float, float]:
    """Bytes that live from a forward to its backward: what autograd keeps, and what `forward` leaves in `returned`. The
    most besides them at once in the forward, and in either. The work of the forward and of the backward: operations of
    products, and for reading and writing as many as would take as long; what is put off is in neither."""
    owned = {tensor.untyped_storage()._cdata for tensor in (*parameters, *shared)}
    given = {tensor.untyped_storage()._cdata for tensor in sources}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    live = LiveBytes()
    with live:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), _fused_attention() as attention:
            outputs = forward()
        for tensor in returned:
            keep(tensor)
        products, traffic, most = live.products + attention.operations, live.written, live.peak
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        del outputs
    backward_products = live.products + attention.operations * 3.5 - products  # it runs the forward again
    forward_work = products + OPERATIONS_PER_BYTE * 2 * traffic
    backward_work = backward_products + OPERATIONS_PER_BYTE * 2 * (live.written - traffic)
    made_here = sum(size for key, size in kept.items() if key not in given)
    forwarding, working = (max(0.0, float(peak - made_here)) for peak in (most, live.peak))
    return float(sum(kept.values())), forwarding, working, forward_work, backward_work


class _Attention(torch.autograd.Function):
    """Fused attention on the meta device, which has only the kernel that keeps all weights."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


@contextmanager
def _fused_attention() -> Iterator[SimpleNamespace]:
    """Inside, attention on the meta device keeps what fused kernels keep: queries, keys, values and output. Gives its
    number of `operations`.

    Who asks whether the meta device has autocast is told that it has none, in place of an error.
    """
    plain, counter = functional.scaled_dot_product_attention, SimpleNamespace(operations=0.0)
    is_autocast_enabled, grouped = torch.is_autocast_enabled, functional.grouped_mm

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not query.is_meta:
            return plain(query, key, value, *args, **kwargs)
        counter.operations += 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        return _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]  # torch's has no types

    def product(input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        # Each row with its own expert's weight: as much work as with one of them; on meta torch's takes bfloat16 only.
        return input @ weight[0] if input.is_meta else grouped(input, weight, **kwargs)

    def enabled(kind: str = "cpu") -> bool:
        return kind != "meta" and is_autocast_enabled(kind)

    products = mock.patch.multiple(functional, scaled_dot_product_attention=attention, grouped_mm=product)
    with products, mock.patch.object(torch, "is_autocast_enabled", enabled):
        yield counter


class LiveBytes(TorchDispatchMode):
    """Follows what operations make: bytes that live, the most that did, bytes written, and products' operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.now = self.peak = self.written = self.products = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._follow(tensor.untyped_storage(), counts=False)  # it was there before
        output = func(*args, **kwargs)
        self.products += operations_of_product(func, args, kwargs, output)
        if not func.is_view:
            for tensor in _tensors(output):
                self.written += tensor.nbytes
                self._follow(tensor.untyped_storage())
        return output

    def _follow(self, storage: torch.UntypedStorage, counts: bool = True) -> None:
        key, size = storage._cdata, storage.nbytes() if counts else 0
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
