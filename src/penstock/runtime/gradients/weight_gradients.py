"""Deferred weight gradients: a linear layer's backward queues its weight gradient, and the W action computes it.

Splitting backward into input gradients (B) and weight gradients (W) is the idea of zero-bubble pipelines (Qi et al.,
"Zero Bubble Pipeline Parallelism", ICLR 2024, section 2). A queued closure costs no second pass over the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from penstock.modeling.instrumentation import plain_class


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its Python, which looks for transforms of torch.func and default arguments first: that
    takes longer than the call itself. Neither is possible where this is used."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]  # of torch's C base
    return apply


# The most outputs for each input with which a layer defers its weight gradient.
MOST_OUTPUTS = 8
# The mean number of entries in a layer's weight from which its gradient takes longer than the 15 us of Python that
# deferring adds to a layer: on a device (by its speed, not measured), and on a CPU (measured; 128 tokens).
LEAST_WEIGHT = 2**20, 2**16


class DeferredGradient(NamedTuple):
    """A weight gradient still to be computed, and the parameters it is for. `compute` adds it to their `.grad`, and
    runs without gradient mode."""

    parameters: tuple[torch.Tensor, ...]
    compute: Callable[[], None]


class WeightGradientQueues:
    """For each (stage, microbatch), the weight gradients its backward left for later."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], list[DeferredGradient]] = {}
        self._current: list[DeferredGradient] | None = None
        self._at_once = False
        # How many entries there are for a parameter, by its id.
        self._awaited: Counter[int] = Counter()

    @property
    def takes_weight_gradients(self) -> bool:
        """Whether a backward is under way whose weight gradients come here, to be computed now or later."""
        return self._at_once or self._current is not None

    def defer(self, deferred: DeferredGradient) -> None:
        """Leave a weight gradient of the backward under way for its action W, or compute it now if W is part of this
        backward."""
        if self._at_once:
            with torch.no_grad():
                deferred.compute()
            return
        assert self._current is not None
        self._current.append(deferred)
        for parameter in deferred.parameters:
            self._awaited[id(parameter)] += 1

    def awaits(self, parameter: torch.Tensor) -> bool:
        """Whether a part of the gradient of `parameter` is still to be computed."""
        return self._awaited[id(parameter)] > 0

    def open(self, stage: int, microbatch: int) -> None:
        """From here on weight gradients are queued for `stage` and `microbatch`."""
        self._current = self._queues.setdefault((stage, microbatch), [])

    def open_at_once(self) -> None:
        """From here on weight gradients are computed as they come."""
        self._at_once = True

    def close(self) -> None:
        """From here on autograd computes weight gradients itself."""
        self._current, self._at_once = None, False

    def run(self, stage: int, microbatch: int, ready: Callable[[torch.Tensor], None] | None) -> None:
        """Compute what was queued for `stage` and `microbatch`, if anything; tell `ready` each parameter that is
        finished."""
        if queue := self._queues.pop((stage, microbatch), None):
            # The latest first, as its tensors are still in the processor's caches; the earliest first where the
            # reduction of gradients waits for parameters in this order.
            if ready is not None:
                queue.reverse()
            with torch.no_grad():
                self._compute(queue, ready)

    def _compute(self, queue: list[DeferredGradient], ready: Callable[[torch.Tensor], None] | None) -> None:
        """Compute what is in `queue`, the last first."""
        while queue:
            parameters, compute = queue.pop()
            compute()
            del compute  # and with it what it kept
            for parameter in parameters:
                self._awaited[id(parameter)] -= 1
                # A layer that is called twice is finished by its second entry.
                if ready is not None and not self._awaited[id(parameter)]:
                    ready(parameter)

    def clear(self) -> None:
        self._queues.clear()
        self._awaited.clear()
        self.close()


def install(model: nn.Module, queues: WeightGradientQueues, without: nn.Module | None = None) -> int:
    """Make the linear layers of `model`, but those in `without`, defer their weight gradients to `queues`; return how
    many do; see `_deferrable`. Parameters, names and class names stay as they are."""
    deferring = {
        kind: type(kind.__name__, (kind,), _namespace(make_forward(queues, transposed), kind))
        for kind, transposed in ((nn.Linear, False), (Conv1D, True))
    }
    layers = list(_deferrable(model, without))
    for module in layers:
        # A tensor-parallel layer computes on its shard as its plain class does.
        kind = plain_class(module)
        namespace = _namespace(vars(deferring[kind])["forward"], kind)
        sharded = kind is not type(module)
        module.__class__ = type(kind.__name__, (type(module),), namespace) if sharded else deferring[kind]
    return len(layers)


def _deferrable(model: nn.Module, without: nn.Module | None = None) -> Iterator[nn.Linear | Conv1D]:
    """The layers that can defer: plain `nn.Linear` and GPT-2's `Conv1D`. Subclasses may compute something else, and a
    weight that several modules share also gets gradients elsewhere, so both keep autograd's own gradient. So
    does a layer with far more outputs than inputs. To defer its weight gradient would keep the gradient of its outputs,
    which for the head of a language model is as large as the logits."""
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    left_out = set() if without is None else set(without.modules())
    for module in model.modules():
        if module in left_out or plain_class(module) not in (nn.Linear, Conv1D):
            continue
        assert isinstance(module, nn.Linear | Conv1D)
        rows, columns = module.weight.shape
        inputs, outputs = (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
        alone = all(uses[id(parameter)] == 1 for parameter in module.parameters(recurse=False))
        if alone and outputs <= MOST_OUTPUTS * inputs:
            yield module


def deferring_pays(model: nn.Module, device: torch.device) -> bool:
    """Whether ranks gain more by putting off weight gradients than the layers' own Python takes; the same on all ranks.
    They do not under gradient checkpointing, where what is kept for a weight gradient is more than all else."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return False
    sizes = [module.weight.numel() for module in _deferrable(model) if module.weight.requires_grad]
    return bool(sizes) and sum(sizes) >= len(sizes) * LEAST_WEIGHT[device.type == "cpu"]


def uninstall(model: nn.Module) -> None:
    """Undo `install`."""
    for module in model.modules():
        if "_penstock_defers" in vars(type(module)):
            module.__class__ = type(module).__bases__[0]


def _namespace(forward: Callable[..., Any], kind: type) -> dict[str, Any]:
    return {"forward": forward, "__module__": kind.__module__, "_penstock_defers": True}


def make_forward(queues: WeightGradientQueues, transposed: bool) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """A `forward` for a linear layer whose weight is [out, in], or [in, out] if `transposed`."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return functional.linear(input, weight.t() if transposed else weight, bias)
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        output: torch.Tensor = _apply(input, weight, bias, (queues, transposed, weight, bias))
        return output

    return forward


class _DeferringLinear(torch.autograd.Function):
    """y = x w^T + b, or x w + b if transposed, in the dtype of x, as autocast would compute it. `deferral` is (queues,
    transposed, weight, bias): the parameters themselves, as a checkpoint gives back copies of what was saved."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        deferral: tuple[WeightGradientQueues, bool, torch.Tensor, torch.Tensor | None],
    ) -> torch.Tensor:
        _, transposed, _, _ = ctx.deferral = deferral
        ctx.save_for_backward(input, weight)
        if weight.dtype != input.dtype:
            weight = weight.to(input.dtype)
            bias = None if bias is None else bias.to(input.dtype)
        # A view that was made in here could not be changed in place, as some models do with what a layer returns.
        return functional.linear(input, weight.t() if transposed else weight, bias).data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        queues, transposed, weight, bias = ctx.deferral
        input, matrix = ctx.saved_tensors
        input_gradient = None
        if ctx.needs_input_grad[0]:
            if matrix.dtype != gradient.dtype:
                matrix = matrix.to(gradient.dtype)
            input_gradient = gradient @ (matrix.t() if transposed else matrix)
        if bias is not None and not bias.requires_grad:
            bias = None
        input_rows, gradient_rows = _rows(input), _rows(gradient)
        # The weight's gradient is left^T @ right.
        left, right = (input_rows, gradient_rows) if transposed else (gradient_rows, input_rows)
        # Autograd keeps what is no part of a microbatch's backward, second derivatives, and what hooks want to see.
        if (
            not queues.takes_weight_gradients
            or torch.is_grad_enabled()
            or _is_watched(weight)
            or (bias is not None and _is_watched(bias))
        ):
            return input_gradient, left.t() @ right, None if bias is None else gradient_rows.sum(0), None
        parameters = (weight,) if bias is None else (weight, bias)
        queues.defer(DeferredGradient(parameters, partial(_accumulate, weight, bias, left, right, gradient_rows)))
        return input_gradient, None, None, None


_apply = direct_apply(_DeferringLinear)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


def _accumulate(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    gradient_rows: torch.Tensor,
) -> None:
    """Add left^T @ right to the weight's gradient and the column sums of `gradient_rows` to the bias's."""
    if weight.grad is None:
        weight.grad = (left.t() @ right).to(weight.dtype)
    elif weight.grad.dtype == left.dtype:
        weight.grad.addmm_(left.t(), right)
    else:
        weight.grad.add_(left.t() @ right)
    if bias is not None:
        total = gradient_rows.sum(0)
        if bias.grad is None:
            bias.grad = total.to(bias.dtype)
        else:
            bias.grad.add_(total)


def knows_deferral(hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Mark a post-accumulate hook that may run though a gradient is deferred, as it asks `awaits`."""
    hook.knows_deferral = True  # type: ignore[attr-defined]  # a mark on a function
    return hook


def is_hooked(parameter: torch.Tensor) -> bool:
    """Whether hooks of somebody else's want to see the gradient of `parameter` as it comes."""
    after = parameter._post_accumulate_grad_hooks or {}
    return bool(parameter._backward_hooks) or any(not hasattr(hook, "knows_deferral") for hook in after.values())


def _is_watched(parameter: torch.Tensor) -> bool:
    """Whether the gradient of `parameter` is wanted as it comes, by hooks or as autograd passes it on to others."""
    return not parameter.is_leaf or is_hooked(parameter)
