"""Attention of one part of a sequence to all of it, through transformers' own registries.

Whatever attention function a model chooses, it is given the keys and values of all parts, and a mask with a row for
each token of this part and a column for each of the whole sequence. What tells a part is this mask: it has more columns
than there are keys. So a layer that gradient checkpointing runs again, in the backward, needs to know nothing else, and
whole sequences (in generation, say) go their ordinary way.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, packed_sequence_compatibility_function
from transformers.modeling_utils import AttentionInterface

from penstock.context_parallel.sequence import Cut, SequencePart
from penstock.runtime.failures.board import FailureBoard

# The attention functions of transformers that take any mask, by their names.
KNOWN = ("sdpa", "eager")


class Exchange:
    """What the ranks of a context-parallel group exchange in a layer; counts the bytes that this one receives.

    A gather of keys and values brings (c - 1) / c of those of the whole sequence, as does the sum of their gradients.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, board: FailureBoard) -> None:
        self._group: dist.ProcessGroup | None = group
        self._ranks = dist.get_process_group_ranks(group)
        self._device, self._board = device, board
        self.index, self.size = dist.get_rank(group), len(self._ranks)
        self.num_bytes = 0
        board.on_abort(self.clear)

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's part, in order."""
        parts = [torch.empty_like(part) for _ in self._ranks]
        with self._board.guard("gathering keys and values of a sequence's parts", self._ranks):
            dist.all_gather(parts, part, group=self._alive())
        self.num_bytes += part.nbytes * (self.size - 1)
        return parts

    def scatter_sum(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The sum over the ranks of what each has for this one."""
        mine = torch.empty_like(parts[0])
        with self._board.guard("summing gradients of a sequence's parts", self._ranks):
            dist.reduce_scatter(mine, parts, group=self._alive())
        self.num_bytes += mine.nbytes * (self.size - 1)
        return mine

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """The sums over the ranks."""
        total = values.to(self._device, copy=True)
        with self._board.guard("summing over a sequence's parts", self._ranks):
            dist.all_reduce(total, group=self._alive())
        return total

    def clear(self) -> None:
        """Release the group: one that is still referenced keeps its connections, and the ranks waiting on them."""
        self._group = None

    def _alive(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this model's context-parallel group was closed")
        return self._group


# By module, what its ranks exchange through.
_exchanges: weakref.WeakKeyDictionary[nn.Module, Exchange] = weakref.WeakKeyDictionary()
# The part whose forward is under way.
_under_way: list[SequencePart] = []


def connect(model: nn.Module, exchange: Exchange) -> None:
    """From here on the attention of this model's modules, given a part, exchanges through this."""
    _install()
    _exchanges.update(dict.fromkeys(model.modules(), exchange))


@contextmanager
def computing(part: SequencePart) -> Iterator[None]:
    """Inside, masks are those of a part."""
    _under_way.append(part)
    try:
        yield
    finally:
        _under_way.pop()


@functools.cache
def _install() -> None:
    """Once in a process: stand between models and the functions that transformers' registries give them."""
    get_interface = AttentionInterface.get_interface

    @functools.wraps(get_interface)
    def found(self: AttentionInterface, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(_attend, get_interface(self, attn_implementation, default))

    AttentionInterface.get_interface = found
    masking_utils.find_packed_sequence_indices = functools.partial(
        _separate, masking_utils.find_packed_sequence_indices
    )
    for name in KNOWN:
        ALL_MASK_ATTENTION_FUNCTIONS[name] = functools.partial(_mask, ALL_MASK_ATTENTION_FUNCTIONS[name])


def _separate(find: Callable[[torch.Tensor], Any], position_ids: torch.Tensor) -> Any:
    """What transformers asks before it makes a mask, if the model keeps the sequences of a packed row apart. Of a part
    it is found in the whole: its own positions jump where its second piece begins."""
    if not _under_way:
        return find(position_ids)
    _under_way[-1].separates = True
    return None


def _mask(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What transformers makes a mask with; of a part it has the rows of its tokens only."""
    if not _under_way:
        return make(*args, **kwargs)
    part = _under_way[-1]
    cut, of_whole = part.cut, kwargs["mask_function"]
    separates, part.separates = part.separates, False
    own = 2 * cut.piece
    if kwargs["q_length"] != own or kwargs["kv_length"] not in (own, cut.length) or kwargs.get("use_vmap"):
        raise NotImplementedError(
            f"the model makes a mask for {kwargs['q_length']} queries and {kwargs['kv_length']} keys, which is not one "
            "of the whole sequence's tokens, or makes it with a function of its own"
        )
    if separates and part.packed is not None:
        of_whole = packed_sequence_compatibility_function(of_whole, *part.packed)
    # Tokens that were filled in look at what the last one looks at.
    places = cut.positions(torch.device(kwargs.get("device", "cpu"))).clamp(max=cut.length - 1)

    def of_part(sample: Any, head: Any, query: Any, key: Any) -> Any:
        return of_whole(sample, head, places[query], key)

    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return make(*args, **{**kwargs, **skips, "kv_length": cut.length, "mask_function": of_part})


def _attend(
    attention: Callable[..., Any],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A model's attention function; a part's queries look at the keys and values of all parts."""
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4:
        length, given = attention_mask.shape[-1], key.shape[2]
        if length > given and (module in _exchanges or _under_way):
            key, value = _whole(module, key, length), _whole(module, value, length)
    return attention(module, query, key, value, attention_mask, *args, **kwargs)


def _whole(module: nn.Module, part: torch.Tensor, length: int) -> torch.Tensor:
    """Of keys or values (samples, heads, tokens, width) those of the whole sequence, of so many tokens."""
    if part.is_meta:
        return part.new_empty((*part.shape[:2], length, part.shape[3]))
    exchange = _exchanges[module]
    cut = Cut(length, exchange.index, exchange.size)
    whole: torch.Tensor = _WholeSequence.apply(exchange, cut, part)  # type: ignore[no-untyped-call]  # torch's has no types
    return whole


class _WholeSequence(torch.autograd.Function):
    """All parts of a sequence; backward, the sum over the ranks of the gradients for this one's."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, cut: Cut, part: torch.Tensor) -> torch.Tensor:
        ctx.exchange, ctx.cut = exchange, cut
        return cut.join(exchange.gather(part.contiguous()), 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        every = [replace(ctx.cut, index=index) for index in range(ctx.cut.size)]
        return None, None, ctx.exchange.scatter_sum([cut.take(gradient, 2) for cut in every])
