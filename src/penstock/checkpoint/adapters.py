"""One ordinary adapter folder from the ranks of a pipeline: what PEFT's, or transformers', own save writes.

Adapters are small. So the rank that leads gathers the tensors of one, and lets that save write them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.modeling.placeholders.ghosts import shown_whole
from penstock.modeling.weights.whole import whole_state

from .comm import CheckpointRanks
from .files import flush_file, writing
from .manifest import FileEntry
from .merge import followed
from .names import EXTENSIONS
from .plan import Content, FilePlan, Folder, SavingReport, first_holders, writers_of
from .safetensors_file import Behind
from .staging import Replacement
from .tensors import outline, to_cpu
from .untrusted import CheckpointError, cannot_read, kind_of

State = Mapping[str, torch.Tensor]
_STEM = "adapter_model"
# Names in an error.
_SHOWN = 5


@dataclass
class AdapterFolder(Folder):
    """The folder of one adapter, `options.variant`, of a model.

    Attributes:
        select: gives what the adapter's file holds, from the state of the whole model, also of meta tensors.
        write_files: writes the files into a folder, given those tensors of the model's state that `select` reads.
    """

    model: PreTrainedModel
    select: Callable[[State], State]
    write_files: Callable[[str, State], None]

    def lead(self, folder: str) -> tuple[list[str], list[str]]:
        state = {name: outline(tensor) for name, tensor in whole_state(self.model).items()}
        with shown_whole(self.model), followed(state) as origin_of:
            origins = [origin_of(tensor) for tensor in self.select(state).values()]
        needed = frozenset[str]().union(*origins)
        return [], [name for name in state if name in needed]

    def plan(self, reports: Sequence[SavingReport], rank: int) -> list[FilePlan]:
        leader = writers_of(reports)[0]
        sources = first_holders(reports, names=reports[leader].names)
        return [FilePlan(f"{_STEM} of {self.options.variant}", leader, sources)]

    def write(self, file: FilePlan, content: Content, folder: str, behind: Behind) -> None:
        assert not isinstance(content, bytes)
        with writing(folder, file.name, sum(tensor.nbytes for tensor in content.values())):
            with shown_whole(self.model):
                self.write_files(folder, to_cpu(content))
            for name in os.listdir(folder):
                flush_file(os.path.join(folder, name))

    def replacement(self, directory: str, folder: str, entries: Mapping[str, FileEntry]) -> Replacement:
        """The configuration is put in place before the weights. Weights in the format that would be read first go."""
        written = sorted(os.listdir(folder))
        weights = [name for name in written if name.startswith(_STEM)]
        first, second = (f"{_STEM}{extension}" for extension in EXTENSIONS)
        hides = second in written and first not in written and kind_of(os.path.join(directory, first)) is not None
        others = [name for name in written if name not in weights]
        return Replacement(others, {name: name for name in weights}, hiding=[first] if hides else [])


def load_adapters(
    model: nn.Module, folders: Mapping[str, str], *, world_comm: CheckpointRanks, strict: bool = True
) -> None:
    """Copy the weights of ordinary adapter folders, by adapter, into the adapters that a split model has on this rank.

    Without `strict` weights that a folder lacks stay.

    Raises:
        CheckpointError: a folder cannot be read on some rank, or does not fit. No rank's model has changed then.
    """
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    found: dict[str, dict[str, torch.Tensor]] = {}

    def read() -> None:
        for name, folder in folders.items():
            if not any(kind_of(os.path.join(folder, f"{_STEM}{extension}")) for extension in EXTENSIONS):
                raise CheckpointError(f"{folder} has no weights of the adapter {name}: no {_STEM}{EXTENSIONS[0]}")
            try:
                state = load_peft_weights(folder, device="cpu")
            except Exception as error:
                raise cannot_read(folder, error) from None
            with shown_whole(model):
                whole = {key: outline(value) for key, value in model.state_dict().items()}
                wanted = get_peft_model_state_dict(model, whole, name, save_embedding_layers=False)
            state = _under_names_of(wanted, state)
            lacking = [key for key in wanted if key not in state] if strict else []
            if lacking:
                raise CheckpointError(f"{folder} lacks weights of the adapter {name}: {', '.join(lacking[:_SHOWN])}")
            for key, tensor in wanted.items():
                if key in state and state[key].shape != tensor.shape:
                    shapes = f"{list(state[key].shape)} in the file, {list(tensor.shape)} in the model"
                    raise CheckpointError(f"{folder} has another shape of {key}: {shapes}")
            found[name] = state

    world_comm.together(f"reading the adapters to load {', '.join(folders.values())}", read)
    for name, state in found.items():
        set_peft_model_state_dict(model, state, adapter_name=name)


def _under_names_of(wanted: Collection[str], state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` as the model names it: a file has the names in a PeftModel."""
    prefix = "base_model.model."
    if any(name.startswith(prefix) for name in wanted):
        return dict(state)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}
