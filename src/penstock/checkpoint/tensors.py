"""What a rank holds of a model's state, ready to be written: CPU tensors, their descriptions and their checksums."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import nn

from penstock.checkpoint.untrusted import Checksum, Count
from penstock.modeling.instrumentation import known_of
from penstock.modeling.libraries import is_adapter_layer
from penstock.modeling.placeholders.ghosts import absent_parameters
from penstock.modeling.weights.whole import alias_groups, packed_weights, ties_of, unit_of

# Every dtype of torch, by the name that `dtype_name` gives it.
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor in a file. `checksum` is the CRC-32 of its bytes in memory order."""

    shape: tuple[Count, ...]
    dtype: Annotated[str, DTYPES]
    checksum: Checksum

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has this shape and dtype."""
        return tuple(tensor.shape) == self.shape and dtype_name(tensor.dtype) == self.dtype


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's bytes in memory order; without a copy if it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().data


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a CPU tensor's bytes."""
    return zlib.crc32(bytes_of(tensor))


def outline(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same shape and dtype, also of a library's class whose `empty_like` makes none."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def of_run(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's checkpoint holds of a state: all, or of a quantised model its adapters and what else is trained."""
    if not packed_weights(model) and getattr(model, "hf_quantizer", None) is None:
        return dict(state)
    adapters = {name for name, module in model.named_modules() if is_adapter_layer(module)}
    trained = {
        name for name, parameter in (*model.named_parameters(), *absent_parameters(model)) if parameter.requires_grad
    }

    def is_held(name: str) -> bool:
        owner = unit_of(name, adapters)
        of_adapter = owner is not None and not name[len(owner) + 1 :].startswith(("base_layer.", "original_module."))
        return of_adapter or name in trained

    return {name: tensor for name, tensor in state.items() if is_held(name)}


def to_cpu(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` on the CPU, each tensor contiguous and in memory of its own size, as a file format may store whole memory
    blocks; tied names share one tensor."""

    def move(name: str, tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.cpu().contiguous()
        return moved if moved.untyped_storage().nbytes() == moved.nbytes else moved.clone()

    return once_for_tied(state, move)


def once_for_tied(
    state: Mapping[str, torch.Tensor], make: Callable[[str, torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What `make` makes of each name and tensor. Names of one tensor get what was made for the first of them."""
    done: dict[Any, torch.Tensor] = {}
    result: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride(), tensor.dtype)
        if not tensor.numel() or key not in done:
            done[key] = make(name, tensor)
        result[name] = done[key]
    return result


def tied_groups(model: nn.Module) -> list[list[str]]:
    """Groups of the unsplit model's names that are one weight. Sorted, so that any layout names a group alike. Tied are
    parameters that were one when the model was split, or are one now if it was not; and buffers that it declares tied.
    """
    aliases = known_of(model).aliases or alias_groups(model)
    known = {name for names in aliases for name in names}
    groups: dict[str, set[str]] = {names[0]: set(names) for names in aliases if len(names) > 1}
    for target, source in ties_of(model).items():
        if not {target, source} <= known:
            groups.setdefault(source, {source}).add(target)
    return sorted(sorted(group) for group in groups.values())


def first_of_tied(groups: Iterable[Sequence[str]]) -> dict[str, str]:
    """For each name in a group of `tied_groups`, the first name of that group."""
    return {name: group[0] for group in groups for name in group}
