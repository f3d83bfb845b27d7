"""A cross-entropy of logits that never exist as a whole: the head and the loss run over a chunk of tokens at a time.

In training the head's call returns `ChunkedLogits`, which have the hidden states and the head. A cross-entropy of them
runs the head chunk by chunk, and again in the backward, so that a stage holds the logits of one chunk. In between they
may be shifted, reshaped and converted; everything else is refused by name, also other losses. No code per model
family."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

KEY = "loss_chunk_tokens"


class ChunkedLossError(ValueError):
    """The loss cannot be computed over chunks of tokens."""


class ChunkedLogits(torch.Tensor):
    """Logits that are made a chunk at a time; their storage is a single element."""

    _hidden: torch.Tensor | None
    _head: Any
    _tokens: int
    _types: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, head: nn.Module, call: Callable[..., Any], hidden: torch.Tensor, tokens: int) -> ChunkedLogits:
        """What `call(hidden)`, which calls the module `head`, would return, of which `tokens` are made at once."""
        with torch.no_grad():
            first = call(hidden.detach().flatten(0, -2)[:1])
        logits = torch.zeros((), dtype=first.dtype, device=first.device).expand(*hidden.shape[:-1], first.shape[-1])
        return cls._with(logits, hidden, (head, call), tokens, ())

    @classmethod
    def standing_for(cls, placeholder: torch.Tensor) -> ChunkedLogits:
        """While a forward is followed, in place of logits."""
        return cls._with(placeholder, None, None, 0, ())

    @classmethod
    def _with(
        cls, logits: torch.Tensor, hidden: torch.Tensor | None, head: Any, tokens: int, types: tuple[torch.dtype, ...]
    ) -> ChunkedLogits:
        self: ChunkedLogits = torch.Tensor._make_subclass(cls, logits)
        self._hidden, self._head, self._tokens, self._types = hidden, head, tokens, types
        return self

    @property
    def connected(self) -> list[torch.Tensor]:
        """What the gradient of a loss of these goes to."""
        return [] if self._hidden is None else [self._hidden, *self._head[0].parameters()]

    def in_parts(self, tokens: int) -> Iterator[torch.Tensor]:
        """The logits of so many tokens at a time, as rows, made without gradient: for metrics."""
        assert self._hidden is not None
        for hidden in self._hidden.detach().flatten(0, -2).split(tokens):
            with torch.no_grad():
                yield _converted(self._head[1](hidden), self._types)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        return f"<logits {tuple(self.shape)} that are not made: {KEY}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.cross_entropy and isinstance(args[0] if args else kwargs.get("input"), cls):
            return _cross_entropy(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        self = args[0] if args and isinstance(args[0], cls) else None
        if self is not None and (name in _ASKS or name == "__get__"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if self is None or name not in _MOVES:
            raise ChunkedLossError(
                f"{KEY}: the logits are used by {name}, so they must exist as a whole. They may only go from the head "
                "to a cross-entropy: no scaling or capping in between, no other loss, and nobody reads out.logits in "
                f"training. Leave {KEY} out for this model or this use"
            )
        taken_apart = f"{KEY}: {name} takes apart the logits of a token. Leave {KEY} out"
        with torch._C.DisableTorchFunctionSubclass():
            logits = func(*args, **kwargs)
            hidden = self._hidden
            if hidden is not None and name == "__getitem__":
                try:
                    func(hidden[..., :1], *args[1:])
                except IndexError as error:  # an index along the classes, which a single one has not
                    raise ChunkedLossError(taken_apart) from error
                hidden = func(hidden, *args[1:])
            elif hidden is not None:
                hidden = hidden.detach() if name == "detach" else hidden.reshape(*logits.shape[:-1], hidden.shape[-1])
            moved = logits.shape[-1:] != self.shape[-1:] or (
                hidden is not None and hidden.shape[:-1] != logits.shape[:-1]
            )
            if moved:
                raise ChunkedLossError(taken_apart)
        types = self._types if logits.dtype == self.dtype else (*self._types, logits.dtype)
        return cls._with(logits, hidden, self._head, self._tokens, types)


# What logits may be asked, and what may be done with them.
_ASKS = {
    "size", "dim", "numel", "is_floating_point", "untyped_storage", "__len__", "is_contiguous", "stride", "ndimension",
}  # fmt: skip
_MOVES = {
    "view", "reshape", "flatten", "contiguous", "float", "double", "to", "type", "__getitem__", "detach", "unsqueeze",
    "squeeze",
}  # fmt: skip


def _cross_entropy(
    input: ChunkedLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` of logits that do not exist: a sum over chunks of tokens."""
    if weight is not None or reduction not in ("mean", "sum") or input.dim() != 2 or target.is_floating_point():
        raise ChunkedLossError(
            f"{KEY}: the loss must be a mean or a sum over tokens of classes without weights. Leave {KEY} out"
        )
    if input._hidden is None:
        with torch._C.DisableTorchFunctionSubclass():
            return functional.cross_entropy(
                input, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
            )
    of_chunk = partial(_of_chunk, input._head[1], input._types, ignore_index, label_smoothing)
    chunks = zip(input._hidden.split(input._tokens), target.split(input._tokens), strict=True)
    # Nothing is drawn in a head.
    run = partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
    total = torch.stack([run(*chunk) for chunk in chunks]).sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _of_chunk(
    head: Callable[..., Any],
    types: Sequence[torch.dtype],
    ignore_index: int,
    smoothing: float,
    hidden: torch.Tensor,
    target: torch.Tensor,
) -> torch.Tensor:
    logits = _converted(head(hidden[None])[0], types)
    return functional.cross_entropy(
        logits, target, ignore_index=ignore_index, reduction="sum", label_smoothing=smoothing
    )


def _converted(logits: torch.Tensor, types: Sequence[torch.dtype]) -> torch.Tensor:
    for dtype in types:
        logits = logits.to(dtype)
    return logits


def head_unit(model: nn.Module, units: Mapping[str, nn.Module]) -> str | None:
    """The unit that is the output embedding of a model of transformers; None if there is none."""
    module = getattr(model, "get_output_embeddings", lambda: None)()
    return None if module is None else next((name for name, unit in units.items() if unit is module), None)


def refuse_head(head: nn.Module | None, model: nn.Module) -> nn.Module:
    """The head, or a ChunkedLossError if it is none that makes each token's logits by itself."""
    if head is None:
        raise ChunkedLossError(
            f"{KEY} needs a language model of transformers with an output embedding that is a unit by itself, and "
            f"{type(model).__name__} has none. Leave {KEY} out"
        )
    dropouts = [module for module in head.modules() if isinstance(module, nn.Dropout) and module.p]
    if dropouts:
        raise ChunkedLossError(
            f"{KEY}: the head has dropout, which would differ by chunks. Set it to 0, or leave {KEY} out"
        )
    return head
