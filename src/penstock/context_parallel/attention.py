"""Attention of one part of a sequence to all of it, through transformers' own registries.

There are two ways, both for whatever attention function a model chooses:

- **by heads** ("Ulysses": Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.1): the ranks exchange heads for tokens.
  The function is given some of the heads, for all tokens, with the mask of whole sequences.
- **by tokens**: it is given the queries of this part, and the keys and values of all parts, which are gathered. The
  mask has a row for each token of this part, and a column for each of the whole sequence.

By heads is the first choice: a rank then has keys and values of some heads only, and causal attention needs no mask in
memory. Less is exchanged, too, but only from some number of ranks on (see `Exchange`). If a trace of the model meets
one layer whose heads cannot be shared out, every layer goes by tokens.

What tells a part, and the way, is the shape of the mask, see `_way_of`. So a layer that gradient checkpointing runs
again, in the backward, needs to know nothing else, and whole sequences (in generation, say) go their ordinary way.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, packed_sequence_compatibility_function
from transformers.modeling_utils import AttentionInterface

from penstock.context_parallel.positions import hook_position_tables
from penstock.context_parallel.sequence import AttentionWay, Cut, SequencePart
from penstock.runtime.comm.gloo import wait_for_all, wait_for_transfer
from penstock.runtime.failures.board import FailureBoard

# The attention functions of transformers that take any mask, by their names.
KNOWN_ATTENTION = ("sdpa", "eager")


class Exchange:
    """What the ranks of a context-parallel group exchange in a layer; counts the bytes that this one receives.

    Of c ranks, with the bytes q, k, v of a whole sequence's queries, keys and values: by tokens (c - 1) / c of k + v in
    the forward; by heads (c - 1) / c² of q + k + v, and of the output. The backward brings as much of their gradients.
    By heads is less if c > 1 + 2 q / (k + v): from 3 ranks on with as many heads of keys as of queries, from 6 on with
    a quarter as many (Llama 3 8B).
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, board: FailureBoard) -> None:
        self._group: dist.ProcessGroup | None = group
        self._ranks = dist.get_process_group_ranks(group)
        self._device, self._board = device, board
        self.index, self.size = dist.get_rank(group), len(self._ranks)
        self.num_bytes = 0
        board.on_close(self.clear)

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's part, in order."""
        parts = [torch.empty_like(part) for _ in self._ranks]
        with self._board.guard("gathering keys and values of a sequence's parts", self._ranks):
            self._wait(dist.all_gather(parts, part, group=self._alive(), async_op=True))
        self.num_bytes += part.nbytes * (self.size - 1)
        return parts

    def scatter_sum(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The sum over the ranks of what each has for this one."""
        mine = torch.empty_like(parts[0])
        with self._board.guard("summing gradients of a sequence's parts", self._ranks):
            work = dist.reduce_scatter(mine, parts, group=self._alive(), async_op=True)
            if mine.device.type == "cpu":  # gloo's work never says that it has ended
                wait_for_transfer(work, mine.nbytes, self._board.check)
            else:
                work.wait()
        self.num_bytes += mine.nbytes * (self.size - 1)
        return mine

    def swap(self, shares: torch.Tensor) -> torch.Tensor:
        """An all-to-all along the first dimension."""
        mine = torch.empty_like(shares)
        with self._board.guard("exchanging heads for tokens of a sequence's parts", self._ranks):
            self._wait(dist.all_to_all_single(mine, shares, group=self._alive(), async_op=True))
        self.num_bytes += mine.nbytes // self.size * (self.size - 1)
        return mine

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """The sums over the ranks."""
        total = values.to(self._device, copy=True)
        with self._board.guard("summing over a sequence's parts", self._ranks):
            self._wait(dist.all_reduce(total, group=self._alive(), async_op=True))
        return total

    def clear(self) -> None:
        """Release the group: one that is still referenced keeps its connections, and the ranks waiting on them."""
        self._group = None

    def _wait(self, work: dist.Work) -> None:
        wait_for_all(work, self._alive(), self._device, self._board.check)

    def _alive(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this model's context-parallel group was closed")
        return self._group


# By module, what its ranks exchange through. Weak: the engine owns the Exchange, and a strong reference would keep the
# module alive.
_exchanges: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Exchange]] = weakref.WeakKeyDictionary()
# The part whose forward is under way.
_under_way: list[SequencePart] = []


def connect(model: nn.Module, exchange: Exchange) -> None:
    """From here on the attention of this model's modules, given a part, exchanges through this."""
    _install()
    hook_position_tables(model, lambda: _under_way[-1] if _under_way else None)
    _exchanges.update(dict.fromkeys(model.modules(), weakref.ref(exchange)))


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
    def with_parts(
        self: AttentionInterface, attn_implementation: str, default: Callable[..., Any]
    ) -> Callable[..., Any]:
        return functools.partial(_attend, get_interface(self, attn_implementation, default))

    AttentionInterface.get_interface = with_parts
    masking_utils.find_packed_sequence_indices = functools.partial(
        _note_packed, masking_utils.find_packed_sequence_indices
    )
    for name in KNOWN_ATTENTION:
        ALL_MASK_ATTENTION_FUNCTIONS[name] = functools.partial(_mask, ALL_MASK_ATTENTION_FUNCTIONS[name])


def _note_packed(find: Callable[[torch.Tensor], Any], position_ids: torch.Tensor) -> Any:
    """What transformers asks before it makes a mask, if the model keeps the sequences of a packed row apart. For a
    part, `_mask` takes them from the whole: its own positions jump where its second piece begins."""
    if not _under_way:
        return find(position_ids)
    _under_way[-1].separates = True
    return None


def _mask(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What transformers makes a mask with; here it makes one for a part."""
    if not _under_way:
        return make(*args, **kwargs)
    part = _under_way[-1]
    cut, of_whole = part.cut, kwargs["mask_function"]
    separates, part.separates = part.separates and part.packed is not None, False
    tokens = cut.tokens
    if kwargs["q_length"] != tokens or kwargs["kv_length"] not in (tokens, cut.length) or kwargs.get("use_vmap"):
        raise NotImplementedError(
            f"the model makes a mask for {kwargs['q_length']} queries and {kwargs['kv_length']} keys, which is not one "
            "of the whole sequence's tokens, or makes it with a function of its own"
            ": leave context_parallel_size out for this model"
        )
    if separates:
        assert part.packed is not None
        of_whole = packed_sequence_compatibility_function(of_whole, *part.packed)
    # Tokens that were filled in look at what the last one looks at.
    places = cut.positions(torch.device(kwargs.get("device", "cpu"))).clamp(max=cut.length - 1)
    if part.way is AttentionWay.BY_HEADS:
        skips = {"allow_is_causal_skip": False} if separates else {}
        whole = {**kwargs, **skips, "q_length": cut.length, "kv_length": cut.length, "mask_function": of_whole}
        mask = make(*args, **whole)
        if mask is None:  # a mask's shape marks it as a part's (`_way_of`); this one takes no memory
            return torch.ones((), dtype=torch.bool, device=places.device).expand(1, 1, cut.length, cut.length)
        return mask

    def with_own_queries(sample: Any, head: Any, query: Any, key: Any) -> Any:
        return of_whole(sample, head, places[query], key)

    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return make(*args, **{**kwargs, **skips, "kv_length": cut.length, "mask_function": with_own_queries})


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
    way, reference = _way_of(attention_mask, key.shape[2]), _exchanges.get(module)
    exchange = None if reference is None else reference()
    is_traced = exchange is None and query.is_meta and bool(_under_way)
    if way is None or (exchange is None and not is_traced):
        return attention(module, query, key, value, attention_mask, *args, **kwargs)
    cut = _under_way[-1].cut if exchange is None else Cut(attention_mask.shape[3], exchange.index, exchange.size)
    if way is AttentionWay.BY_TOKENS:
        key, value = (_all_tokens(exchange, cut, tensor) for tensor in (key, value))
        return attention(module, query, key, value, attention_mask, *args, **kwargs)
    if is_traced and _needs_tokens((query, key, value), kwargs, _under_way[-1].num_shares):
        _under_way[-1].way = AttentionWay.BY_TOKENS
        return attention(module, query, key, value, None, *args, **kwargs)
    if query.shape[1] % cut.size or key.shape[1] % cut.size:
        raise NotImplementedError(
            f"context_parallel_size: {type(module).__name__} has {query.shape[1]} heads of queries and {key.shape[1]} "
            f"of keys, which {cut.size} ranks cannot share out, and following the model's forward did not show it"
            ": take a context_parallel_size that divides both, or leave it out"
        )
    mask = None if not any(attention_mask.stride()) else attention_mask
    query, key, value = _some_heads(exchange, cut, (query, key, value))
    output, *_ = attention(module, query, key, value, mask, *args, **kwargs)
    return _own_tokens(exchange, cut, output), None


def _way_of(mask: Any, tokens: int) -> AttentionWay | None:
    """The way for which a mask was made, where queries and keys are of so many tokens; None if it is that of whole
    sequences. One of a part has columns, and by heads rows, for more tokens."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or max(mask.shape[2:]) <= tokens:
        return None
    return AttentionWay.BY_TOKENS if mask.shape[2] == tokens else AttentionWay.BY_HEADS


def _needs_tokens(tensors: Sequence[torch.Tensor], arguments: Mapping[str, Any], num_shares: int) -> bool:
    """Whether attention cannot go by heads: they cannot be shared out, or the function has more to know of each."""
    tells_more = any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in arguments.values())
    return tells_more or any(tensor.shape[1] % num_shares for tensor in tensors)


# -- by tokens -------------------------------------------------------------------------------------------------------


def _all_tokens(exchange: Exchange | None, cut: Cut, part: torch.Tensor) -> torch.Tensor:
    """Of keys or values (samples, heads, tokens, width) those of the whole sequence; without an exchange, in a trace,
    only their shape."""
    if exchange is None:
        return part.new_empty((*part.shape[:2], cut.length, part.shape[3]))
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
        return None, None, ctx.exchange.scatter_sum([cut.take(gradient, 2) for cut in ctx.cut.all_parts])


# -- by heads --------------------------------------------------------------------------------------------------------


def _some_heads(exchange: Exchange | None, cut: Cut, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of each of these (samples, heads, tokens, width) this rank's heads for the tokens of the whole sequence."""
    if len({part.shape[3] for part in parts}) > 1:
        return [whole for part in parts for whole in _some_heads(exchange, cut, [part])]
    heads = [part.shape[1] // cut.size for part in parts]
    shares = [
        torch.cat([part.narrow(1, index * count, count) for part, count in zip(parts, heads, strict=True)], 1)
        for index in range(cut.size)
    ]
    return [*cut.join(_swap(exchange, shares), 2).split(heads, 1)]


def _own_tokens(exchange: Exchange | None, cut: Cut, heads: torch.Tensor) -> torch.Tensor:
    """Of an output (samples, tokens, heads, width) for some heads that of all heads, for the tokens of this part."""
    return torch.cat(_swap(exchange, [part.take(heads, 1) for part in cut.all_parts]), 2)


def _swap(exchange: Exchange | None, shares: list[torch.Tensor]) -> list[torch.Tensor]:
    """An all-to-all along the list: each rank gets the one of its index from every rank. Without an exchange, in a
    trace, only shapes count."""
    if exchange is None:
        return shares
    stacked: torch.Tensor = _Swapped.apply(exchange, torch.stack(shares))  # type: ignore[no-untyped-call]  # torch's has no types
    return [*stacked.unbind(0)]


class _Swapped(torch.autograd.Function):
    """An all-to-all along the first dimension; backward, that of the gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, shares: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.swap(shares)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, ctx.exchange.swap(gradient.contiguous())
