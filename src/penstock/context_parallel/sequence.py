"""A microbatch of whole sequences, and the part of it that one rank computes.

The sequence is padded to a multiple of twice the number of parts, and cut into so many pieces. Part i of c has the
pieces i and 2c - 1 - i, so that each has as many pairs of positions under a causal mask (Grattafiori et al. 2024,
"The Llama 3 Herd of Models", section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch.nn import functional
from transformers import masking_utils

from penstock.data.microbatch import WITHOUT_BATCH
from penstock.data.packed import LENGTHS
from penstock.modeling.graph.loss import NUM_ITEMS, LossTerm

SHIFTED = "shift_labels"
IGNORED = -100


class AttentionWay(Enum):
    """How a part attends to whole sequences; see `attention`."""

    BY_HEADS = "by heads"
    BY_TOKENS = "by tokens"


@dataclass(frozen=True)
class Cut:
    """Where the parts of sequences of `length` tokens are; `index` of `size` is this rank's."""

    length: int
    index: int
    size: int

    @property
    def piece(self) -> int:
        """Tokens in each of the two pieces of a part."""
        return -(-self.length // (2 * self.size))

    @property
    def tokens(self) -> int:
        """Tokens in a part."""
        return 2 * self.piece

    @property
    def padded(self) -> int:
        """Tokens in all parts."""
        return self.size * self.tokens

    @property
    def all_parts(self) -> list[Cut]:
        """The cuts of all parts, in order."""
        return [replace(self, index=index) for index in range(self.size)]

    def pieces_of(self, part: int) -> tuple[int, int]:
        """Where the pieces of a part begin."""
        return part * self.piece, (2 * self.size - 1 - part) * self.piece

    def positions(self, device: torch.device) -> torch.Tensor:
        """The places of this part's tokens in the whole sequence, shape (tokens,)."""
        steps = torch.arange(self.piece, device=device)
        return torch.cat([steps + start for start in self.pieces_of(self.index)])

    def take(self, whole: torch.Tensor, dim: int, filled_with: int = 0) -> torch.Tensor:
        """This part of a tensor whose dimension `dim` are the tokens."""
        if extra := self.padded - whole.shape[dim]:
            shape = list(whole.shape)
            shape[dim] = extra
            whole = torch.cat([whole, whole.new_full(shape, filled_with)], dim)
        first, second = self.pieces_of(self.index)
        return torch.cat([whole.narrow(dim, first, self.piece), whole.narrow(dim, second, self.piece)], dim)

    def join(self, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
        """The whole of which these are the parts, in their order, without what was filled in."""
        firsts = [part.narrow(dim, 0, self.piece) for part in parts]
        seconds = [part.narrow(dim, self.piece, self.piece) for part in reversed(parts)]
        whole = torch.cat([*firsts, *seconds], dim)
        return whole.narrow(dim, 0, self.length)


class SequencePart(dict[str, Any]):
    """The inputs of one part of a microbatch, and what a mask over whole sequences needs to know besides.

    Attributes:
        packed: of rows that hold several sequences, the positions and the number of the sequence of each token, both of
            shape (samples, length); None where a row is one sequence.
        positions: the position ids of whole sequences, None if the model takes none.
        way: BY_HEADS at first; a trace of the model makes it BY_TOKENS when it meets a layer whose heads cannot be
            shared out (`attention._attend`).
        num_shares: over how many ranks the heads of a layer are shared out, those of tensor parallelism included.
        separates: whether the mask that is made next is to keep the sequences of a row apart.
    """

    def __init__(
        self, inputs: Mapping[str, Any], cut: Cut, packed: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        super().__init__(inputs)
        self.cut, self.packed, self.way, self.num_shares = cut, packed, AttentionWay.BY_HEADS, cut.size
        self.positions: torch.Tensor | None = None
        self.separates = False

    def with_inputs(self, inputs: Mapping[str, Any]) -> SequencePart:
        """The same part, with other inputs."""
        made = SequencePart(inputs, self.cut, self.packed)
        made.way, made.num_shares, made.positions = self.way, self.num_shares, self.positions
        return made


def length_of(inputs: Mapping[str, Any]) -> int:
    """Tokens in each sequence of a microbatch. Raises NotImplementedError if there are none."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(tokens := inputs.get(name), torch.Tensor) and tokens.dim() >= 2:
            return int(tokens.shape[1])
    raise NotImplementedError(
        f"context_parallel_size cuts sequences of tokens, but the inputs are {', '.join(inputs) or 'none'}: give "
        "input_ids or inputs_embeds"
    )


def cut_inputs(
    inputs: Mapping[str, Any],
    index: int,
    size: int,
    *,
    compared: Sequence[LossTerm],
    positions: torch.Tensor | None,
) -> SequencePart:
    """This part of a microbatch's inputs.

    Args:
        compared: the means of the loss. The labels that they count are filled up with what counts for nothing. Labels
            that the model compares with the output at the token before are shifted before they are cut.
        positions: what the model takes as position ids where it is given none, (samples or 1, length); None if it takes
            none.

    Raises:
        NotImplementedError: sequences are too short, or it is not known how to cut or fill up an input.
    """
    length = length_of(inputs)
    cut = Cut(length, index, size)
    if length <= cut.tokens:
        raise NotImplementedError(
            f"context_parallel_size {size} cannot share out sequences of {length} tokens: give longer sequences"
        )
    fillings: dict[str | None, int] = {}
    for term in compared:
        ignored = IGNORED if term.ignore_index is None else term.ignore_index
        if fillings.setdefault(term.input, ignored) != ignored:
            raise NotImplementedError(
                f"context_parallel_size needs one label that counts for nothing, but of {term.input} the loss ignores "
                f"{fillings[term.input]} in one mean and {ignored} in another"
                ": ignore the same one in all"
            )
    for name in ("input_ids", "inputs_embeds"):
        if name in fillings and cut.padded != length:
            raise NotImplementedError(
                f"context_parallel_size {size} cannot fill up {name} of {length} tokens, which the loss counts as "
                f"labels: give labels as an input of their own, or sequences whose length {2 * size} divides"
            )
    shifts = any(term.input == "labels" and term.start == 1 for term in compared)
    given = inputs.get("position_ids")
    own_inputs: dict[str, Any] = {}
    for name, value in inputs.items():
        if name in LENGTHS and given is not None:
            continue
        if name in LENGTHS:
            raise NotImplementedError(f"{name} without position_ids: under context_parallel_size give both")
        if value is None or isinstance(value, bool | int | float | str) or name == NUM_ITEMS:
            own_inputs[name] = value
        elif not isinstance(value, torch.Tensor) or name in WITHOUT_BATCH:
            raise NotImplementedError(
                f"context_parallel_size cannot cut the input {name}, a {type(value).__name__}"
                ": give tensors, or leave context_parallel_size out"
            )
        elif name == "attention_mask" and value.dim() == 2 and value.shape[1] == length:
            own_inputs[name] = value  # keys come from all parts
        elif name == "attention_mask" or value.dim() < 2 or value.shape[1] != length:
            raise NotImplementedError(
                f"context_parallel_size cannot cut the input {name} of shape {tuple(value.shape)}: sequences have "
                f"{length} tokens, and those that can be cut are of shape (samples, {length}, ...)"
                ". Give it so, or leave context_parallel_size out"
            )
        else:
            own_inputs[name] = cut.take(value, 1, fillings.get(name, 0))
    tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    if shifts and inputs.get(SHIFTED) is None and isinstance(labels := inputs.get("labels"), torch.Tensor):
        label = fillings["labels"]
        own_inputs[SHIFTED] = cut.take(functional.pad(labels[:, 1:], (0, 1), value=label), 1, label)
    packed = None
    if given is None and positions is not None:
        own_inputs["position_ids"] = cut.take(positions.expand(tokens.shape[0], -1), 1)
    elif isinstance(given, torch.Tensor):
        every = given.expand(tokens.shape[0], -1)
        numbers = masking_utils.find_packed_sequence_indices(every)
        packed = None if numbers is None else (every, numbers)
    part = SequencePart(own_inputs, cut, packed)
    part.positions = given if isinstance(given, torch.Tensor) else positions
    return part
