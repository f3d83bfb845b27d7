"""What a loss is found to be, a mean or a sum of what, and how a microbatch's loss is scaled to its exact share.

A loss that is a mean over tokens must be weighted by tokens, one over samples by samples: averaging microbatches with
equal weights is wrong as soon as one of them holds more padding. `loss_trace` finds the rule (`LossRule`) while the
forward is traced; here it is applied in each step.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.utils import ModelOutput

from penstock.data.microbatch import NO_DIMS, BatchDims, batch_dim
from penstock.modeling.collectives import CriterionCollective, OwnCollective
from penstock.modeling.graph.chunked_loss import ChunkedLogits
from penstock.nested import named_tensors

# Functions whose mean leaves out ignored targets, and may weigh the others.
LOSS_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)

# (model output, the microbatch's inputs) -> that microbatch's own mean loss, or its sum. It may have an attribute
# `reduction`, "sum" if microbatches' results add up, and `own_inputs`, the names of inputs that it alone is given.
Criterion = Callable[[Any, Mapping[str, Any]], torch.Tensor]
# The number by which a caller who accumulates divides the sum over a batch.
NUM_ITEMS = "num_items_in_batch"


class CriterionError(ValueError):
    """The caller's criterion failed, or the loss is none, or none that stages and microbatches can compute."""


class LoopError(RuntimeError):
    """The loop over the microbatches was not written as it must be: one `backward()` for each yielded loss, in order,
    and nothing in it that waits for other ranks."""


def loss_by(criterion: Criterion | None, output: Any, inputs: Mapping[str, Any]) -> torch.Tensor | None:
    if criterion is None:
        return loss_of(output)
    try:
        loss = criterion(output, inputs)
    except OwnCollective as error:
        raise CriterionCollective(error.call) from error
    except (KeyError, AttributeError, TypeError) as error:
        raise CriterionError(
            f"the criterion failed with {type(error).__name__}: {error}. It is called as criterion(outputs, inputs); "
            f"the inputs here are {', '.join(inputs)}. Call model(..., criterion=None) for outputs without its loss"
        ) from error
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.is_floating_point():
        tensor = isinstance(loss, torch.Tensor)
        what = f"not one of shape {tuple(loss.shape)} and {loss.dtype}" if tensor else f"but returned {loss!r:.80}"
        raise CriterionError(f"the criterion must return a floating-point tensor of shape (), {what}")
    return loss


class ClassWeights:
    """The weights of classes that a loss function was given. Equal if their values are."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        values = tensor.detach().to("cpu", torch.float64)
        self._summary = f"<{len(values)} weights {zlib.crc32(values.numpy().tobytes()):x}>"

    def __repr__(self) -> str:
        return self._summary

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClassWeights) and self._summary == other._summary

    def __hash__(self) -> int:
        return hash(self._summary)

    def sum(self, classes: torch.Tensor) -> torch.Tensor:
        """The sum of the weights of some targets."""
        return self.tensor.detach().to(classes.device, torch.float64)[classes].sum()

    def refuse_other(self, weight: torch.Tensor | None) -> None:
        """Raise CriterionError if a loss function is given other weights than when the loss was followed."""
        if weight is not self.tensor and (weight is None or not torch.equal(weight, self.tensor.to(weight))):
            raise CriterionError(
                "the weights of classes that the loss gives to torch's loss function have changed since its first "
                "step, by which the batch's loss is divided: keep them as they are, or give a new criterion"
            )


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One mean that enters the loss.

    Its `kind` is `"tokens"` (valid elements of an input), `"positions"` (elements that point into the sequence),
    `"samples"` (each counts once, whatever its value is made of), or `"sum"` (no mean: what microbatches give adds up).
    """

    kind: str
    input: str | None = None  # the argument that is counted
    start: int = 0  # of its last dimension; 1 for shifted (causal) labels
    stop: int | None = None
    ignore_index: int | None = None  # elements equal to it are not counted; if None, negative ones are not
    mask: str | None = None  # an argument of the same shape; elements where it is not 1 are not counted
    limit: str | None = None  # for `"positions"`, the argument whose second dimension bounds them
    weights: ClassWeights | None = None  # for `"tokens"`: the weights of their classes are added up in place of ones
    calls: tuple[int, ...] = ()  # numbers of the calls of loss functions in the forward that give this mean

    def count(self, inputs: Mapping[str, Any], num_samples: int | None = None) -> int | torch.Tensor:
        """The number of elements in the mean for these inputs (1 for a sum): shape () where it depends on values."""
        if self.kind == "sum":
            return 1
        if self.input is None:  # samples
            return batch_size(inputs) if num_samples is None else num_samples
        if self.input not in inputs:  # it is inside of one
            inputs = {**inputs, **named_tensors(inputs)}
        tensor = inputs[self.input]
        counted = tensor[..., self.start : self.stop] if tensor.dim() else tensor
        if self.kind == "positions":
            assert self.limit is not None
            within: torch.Tensor = (counted < inputs[self.limit].shape[1]).sum()
            return within
        valid = counted >= 0 if self.ignore_index is None else counted != self.ignore_index
        if self.mask is not None:
            valid = valid & (inputs[self.mask][..., self.start : self.stop] == 1)
        number: torch.Tensor = valid.sum() if self.weights is None else self.weights.sum(counted[valid])
        return number


_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class LossRule:
    """How the batch's loss is put together from its microbatches' losses.

    A forward with the `shares` of its microbatch gives that share of the loss; the shares add up to the loss of the
    whole batch, and a microbatch without a single counted element contributes an exact zero rather than 0/0, unless the
    batch has none.

    Attributes:
        terms: the means that enter the loss; nearly always one.
        rest: by what all else in the loss is weighted (a router's balance loss); None: by the largest share of `terms`.
        exact: False if the loss is, as far as can be seen, no mean or sum over tokens or samples (contrastive losses, a
            mean over what values select): microbatches are then weighted by the means in it, by samples without any,
            which equals the unsplit model accumulating over them, but not the loss of the whole batch at once.
        fields: other fields of the output that hold one of these means by itself, weighted as the loss is.
    """

    terms: tuple[LossTerm, ...]
    exact: bool = True
    reason: str = ""
    fields: tuple[str, ...] = ()
    rest: LossTerm | None = None

    @property
    def counted(self) -> tuple[LossTerm, ...]:
        """What `counts` and `shares` have a number for: the means, and the rest, if it has its own."""
        return self.terms if self.rest is None else (*self.terms, self.rest)

    def count_later(self, inputs: Mapping[str, Any], num_samples: int | None = None) -> tuple[int | torch.Tensor, ...]:
        """The number of elements in each mean, see `counted`, for `read_counts` to wait for. The number of samples is
        found in the inputs unless it is given."""
        return tuple(term.count(inputs, num_samples) for term in self.counted)

    def shares(self, counts: Sequence[float], totals: Sequence[float]) -> tuple[float, ...]:
        """This microbatch's share of each of the batch's means, see `counted`, with `totals` over all pipelines. A mean
        over nothing in the whole batch is what the model gives for that, NaN."""
        shares = [
            count / total if term.kind != "sum" and total else 1.0
            for term, count, total in zip(self.counted, counts, totals, strict=True)
        ]
        return tuple(shares)

    def weighing(self, shares: Sequence[float]) -> AbstractContextManager[Any]:
        """While open, the means of a loss are weighted against each other, and weights of classes are checked."""
        if self.rest is None and len(self.terms) == 1 and self.terms[0].weights is None:
            return _NOTHING
        weighted = {call: term.weights for term in self.terms if term.weights is not None for call in term.calls}
        base = self._base(shares)
        weights = {
            call: (share / base if base else 0.0)
            for term, share in zip(self.terms, shares, strict=False)
            for call in term.calls
        }
        return _LossWeights(weights, weighted)

    def _base(self, shares: Sequence[float]) -> float:
        """The share by which the whole loss is multiplied, after its means were weighted against that."""
        return max(shares) if self.rest is None else shares[-1]

    def scale(self, loss: torch.Tensor, shares: Sequence[float], connected: Any) -> torch.Tensor:
        """The share of `loss`, which was computed under `weighing`. Where nothing was counted, `loss` is NaN, and its
        share is zero, which keeps its place in the autograd graph through `connected`, outputs of the same forward."""
        share = self._base(shares)
        return loss * share if share else zero_loss(loss, connected)


def read_counts(counted: Sequence[tuple[int | torch.Tensor, ...]]) -> list[tuple[float, ...]]:
    """The values of all of these counts, read from a GPU in one go."""
    tensors = [count for counts in counted for count in counts if isinstance(count, torch.Tensor)]
    values = iter(torch.stack([tensor.to(tensors[0].device) for tensor in tensors]).tolist() if tensors else ())
    return [tuple(next(values) if isinstance(count, torch.Tensor) else count for count in counts) for counts in counted]


def batch_size(inputs: Mapping[str, Any], dims: BatchDims = NO_DIMS) -> int:
    """The number of samples in the first tensor that has a dimension of them."""
    for name, value in named_tensors(inputs).items():
        dim = batch_dim(name, value, dims)
        if dim is not None and value.dim() > dim:
            return int(value.shape[dim])
    raise ValueError("the inputs contain no tensor with a batch dimension")


class _Zero(torch.autograd.Function):
    """Zero, whatever its arguments hold; their gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return None, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.kinds)


def zero_loss(loss: torch.Tensor, connected: Any) -> torch.Tensor:
    """An exact zero of the kind of `loss` that is connected to the graph of the tensors in `connected`."""
    tensors = [
        leaf
        for each in torch.utils._pytree.tree_leaves(connected)
        for leaf in (each.connected if isinstance(each, ChunkedLogits) else (each,))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf is not loss
    ]
    if not tensors and loss.requires_grad:
        return torch.nan_to_num(loss * 0.0)
    zero: torch.Tensor = _Zero.apply(loss.detach(), *tensors)  # type: ignore[no-untyped-call]  # torch's has no types
    return zero


class _LossWeights(TorchFunctionMode):
    """Multiplies the results of loss functions, in the order of their calls."""

    def __init__(self, weights: Mapping[int, float], of_classes: Mapping[int, ClassWeights]) -> None:
        super().__init__()
        self._weights, self._of_classes = weights, of_classes
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in LOSS_FUNCTIONS:
            return result
        weight = self._weights.get(self._calls, 1.0)
        if self._calls in self._of_classes:
            self._of_classes[self._calls].refuse_other(kwargs.get("weight") if len(args) < 3 else args[2])
        self._calls += 1
        if weight == 0.0:
            return zero_loss(result, (args, kwargs))
        return result * weight


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss in an output: its `loss`, a scalar that leads a tuple or is its only one, or the output, if scalar."""
    if isinstance(output, (dict, Mapping)):  # first what is quickly told
        loss = output.get("loss")
    elif isinstance(output, torch.Tensor):
        loss = output
    elif isinstance(output, (tuple, list)) and not hasattr(output, "loss"):
        scalars = [entry for entry in output if _is_scalar(entry)]
        return scalars[0] if len(scalars) == 1 or (scalars and scalars[0] is output[0]) else None
    else:
        loss = getattr(output, "loss", None)
    return loss if _is_scalar(loss) else None


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def set_loss(output: ModelOutput, loss: torch.Tensor) -> None:
    """`output.loss = loss`, which would look through the class's fields twice, in every microbatch."""
    output.__dict__["loss"] = loss
    OrderedDict.__setitem__(output, "loss", loss)
