"""Ordinary folders from the ranks of a pipeline, as transformers and PEFT write them: which files one has, who
assembles each, and writing them.

The plan is decided on meta tensors from names, shapes and dtypes, by every rank for itself and alike.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from penstock.modeling.graph.dataflow import DataFlow, Given
from penstock.modeling.placeholders.ghosts import shown_whole
from penstock.modeling.weights.names import unit_of
from penstock.modeling.weights.whole import packed_weights, shards_of, whole_state

from .files import Behind, flush_file, write_tensors, writing
from .manifest import ADAPTER, EXTENSIONS, STAGED_INDEX, FileEntry, is_shard, weight_file_names
from .plan import (
    Content,
    FilePlan,
    Folder,
    SavingRank,
    SavingReport,
    Source,
    first_holders,
    write_side_files,
    writers_of,
)
from .staging import Replacement, write_index
from .tensors import DTYPES, first_of_tied, outline, tied_groups, to_cpu
from .untrusted import is_regular, kind_of


@dataclass
class ModelFolder(Folder):
    """The folder that `save_pretrained` writes for the unsplit model. `files`: names of the files of weights. `index`:
    says which of them holds which tensor; None if there is one. `metadata`: what a library that packs weights has to
    say of them in the files."""

    files: list[str] = field(default_factory=list, init=False)
    index: dict[str, Any] | None = field(default=None, init=False)
    metadata: dict[str, str] = field(default_factory=dict, init=False)

    def report(self, place: SavingRank, folder: str) -> SavingReport:
        quantizer = getattr(self.model, "hf_quantizer", None)
        if quantizer is not None and place.is_writer and self.options.state_dict is None:
            state, self.metadata = quantizer.get_state_dict_and_metadata(self.model)
            self.options = replace(self.options, state_dict=state)
        report = super().report(place, folder)
        return replace(report, names=[json.dumps(self.metadata)] if self.metadata else [])

    def lead(self, folder: str) -> tuple[list[str], list[str]]:
        return write_side_files(self.model, folder), []

    def plan(self, reports: Sequence[SavingReport], rank: int) -> list[FilePlan]:
        """Plan the checkpoint that `save_pretrained` would write for the unsplit model. Each file is assembled by the
        rank that holds most of it already. Raises RuntimeError: from transformers, if weights are tied that the model
        does not declare as tied."""
        model, options = self.model, self.options
        told: list[dict[str, str]] = [json.loads(report.names[0]) for report in reports if report.names]
        self.metadata = {name: text for one in told for name, text in one.items()}
        if told:  # torchao's list of what it has packed
            self.metadata["tensor_names"] = json.dumps([n for one in told for n in json.loads(one["tensor_names"])])
        sources = first_holders(reports, shards_of(model))
        order = {name: place for place, name in enumerate(whole_state(model))}
        packed = {name.removesuffix(".weight") for name in packed_weights(model)}

        def place_of(name: str) -> tuple[int, str]:
            # What a packed weight is saved as only its holder knows, so no order of its own counts.
            layer = unit_of(name, packed)
            return (order.get(name, len(order)), "") if layer is None else (order[f"{layer}.weight"], name)

        names = _saved_names(model, sorted(sources, key=place_of))
        inputs = {name: _on_meta(sources[name]) for name in names}
        outputs, origin = dict(inputs), {name: frozenset({name}) for name in names}
        if self._reverted:
            with followed(inputs) as origin_of:
                outputs = {name: one.contiguous() for name, one in revert_weight_conversion(model, inputs).items()}
            origin = {name: origin_of(tensor) for name, tensor in outputs.items()}
        single, _ = weight_file_names(options.extension, options.variant, self.diffusers)
        stem, _, extension = single.rpartition(".")
        # Fresh tensors: pieces of one fused weight would count as one block of memory and land in one shard.
        split = split_torch_state_dict_into_shards(
            {name: torch.empty_like(tensor) for name, tensor in outputs.items()},
            filename_pattern=f"{stem}{{suffix}}.{extension}",
            max_shard_size=options.max_shard_size,
        )
        files = []
        for file_name, shard_names in split.filename_to_tensors.items():
            needed = frozenset[str]().union(*(origin[name] for name in shard_names))
            held = dict.fromkeys(writers_of(reports), 0)
            for name in needed:
                held[sources[name].ranks[0]] += inputs[name].nbytes
            made_of = {name: sources[name] for name in names if name in needed}
            files.append(FilePlan(file_name, max(held, key=held.__getitem__), made_of, outputs=tuple(shard_names)))
        self.files = [file.name for file in files]
        metadata = {"total_parameters": _count_parameters(model, sources), **split.metadata}
        self.index = {"metadata": metadata, "weight_map": split.tensor_to_filename} if split.is_sharded else None
        return files

    @property
    def _reverted(self) -> bool:
        # transformers cannot turn back what it did to read packed weights.
        was_packed = getattr(getattr(self.model, "hf_quantizer", None), "pre_quantized", False)
        return self.options.save_original_format and isinstance(self.model, PreTrainedModel) and not was_packed

    def write(self, file: FilePlan, content: Content, folder: str, behind: Behind) -> Callable[[], FileEntry] | None:
        assert not isinstance(content, bytes)
        tensors = revert_weight_conversion(self.model, content) if self._reverted else content
        wanted = to_cpu({name: tensors[name] for name in file.outputs})
        if self.options.safe_serialization:  # whose files hold no tensor under two names
            first: dict[int, str] = {}
            shared = [name for name, tensor in wanted.items() if first.setdefault(id(tensor), name) != name]
            wanted.update({name: wanted[name].clone() for name in shared})
        # Not with `behind`, which keeps tensors until all files are written.
        write_tensors(os.path.join(folder, file.name), wanted, self.options.save_function, metadata=self.metadata)
        return None

    def replacement(self, directory: str, folder: str, entries: Mapping[str, FileEntry]) -> Replacement:
        """How the staged files become the checkpoint in `directory`.

        transformers starts from the first of these that exists: `model.safetensors`, its index, `pytorch_model.bin`,
        its index. So the new one is put in place first, and then those are removed that come before it in this order.
        """
        names = {
            extension: weight_file_names(extension, self.options.variant, self.diffusers) for extension in EXTENSIONS
        }
        search_order, index = list(chain(*names.values())), names[self.options.extension][1]
        start, staged, shards = self.files[0], self.files[0], list[str]()
        if self.index is not None:
            write_index(folder, self.index["weight_map"], self.index["metadata"])
            start, staged, shards = index, STAGED_INDEX, self.files
        found = [name for name in search_order if kind_of(os.path.join(directory, name)) is not None]
        hiding = [name for name in reversed(search_order[: search_order.index(start)]) if name in found]
        old = [index] if index in found and index != start else []
        return Replacement(self.sides, {start: staged}, shards, hiding, old + self._old_shards(directory))

    def _old_shards(self, directory: str) -> list[str]:
        """Shards in `directory` that no index refers to any more once the new checkpoint is complete."""
        # A safetensors checkpoint hides a .bin one that may stand beside it, but does not replace it.
        extensions = (".safetensors",) if self.options.safe_serialization else EXTENSIONS
        return sorted(
            name
            for name in os.listdir(directory)
            if name not in self.files
            and any(is_shard(name, extension, self.options.variant, self.diffusers) for extension in extensions)
            and is_regular(os.path.join(directory, name))
        )


def _on_meta(source: Source) -> torch.Tensor:
    return torch.empty(source.holding.shape, dtype=DTYPES[source.holding.dtype], device="meta")


def _saved_names(model: nn.Module, names: Sequence[str]) -> list[str]:
    """`names` without those that `save_pretrained` leaves out: the ignored ones, and all but one of tied ones.

    A module that is no model of transformers has them all, as its `load_state_dict` asks for them.
    """
    if not isinstance(model, PreTrainedModel):
        return list(names)
    ignored = set(model._keys_to_ignore_on_save or ())
    kept = [name for name in names if name not in ignored]
    first = first_of_tied(tied_groups(model))
    memory: dict[str, torch.Tensor] = {}
    stand_ins = {name: memory.setdefault(first.get(name, name), torch.empty(1)) for name in kept}
    return list(remove_tied_weights_from_state_dict(stand_ins, model))


def _count_parameters(model: nn.Module, sources: Mapping[str, Source]) -> int:
    """Elements of all parameters, tied ones once, as `num_parameters()` of the unsplit model counts them."""
    first = first_of_tied(tied_groups(model))
    parameters = {name: source.holding for name, source in sources.items() if source.holding.is_parameter}
    sizes = {first.get(name, name): torch.Size(holding.shape).numel() for name, holding in parameters.items()}
    sizes |= {first.get(name, name): size for name, size in packed_weights(model).items()}
    return sum(sizes.values())


@contextmanager
def followed(inputs: Mapping[str, torch.Tensor]) -> Iterator[Callable[[torch.Tensor], frozenset[str]]]:
    """Follow what becomes of some meta tensors inside. Gives what tells from which of them another one was made."""
    with DataFlow(position=lambda: 0) as flow:
        for name, tensor in inputs.items():
            flow.mark(tensor, (Given(name),))
        yield lambda tensor: frozenset(one.name for one in flow.sources(tensor) if isinstance(one, Given))


State = Mapping[str, torch.Tensor]


@dataclass
class AdapterFolder(Folder):
    """The folder of one adapter, `options.variant`, of a model. `select`: gives what the adapter's file holds, from the
    state of the whole model, also of meta tensors. `write_files`: writes the files into a folder, given those tensors
    of the model's state that `select` reads."""

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
        return [FilePlan(f"{ADAPTER} of {self.options.variant}", leader, sources)]

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
        weights = [name for name in written if name.startswith(ADAPTER)]
        first, second = (f"{ADAPTER}{extension}" for extension in EXTENSIONS)
        hides = second in written and first not in written and kind_of(os.path.join(directory, first)) is not None
        others = [name for name in written if name not in weights]
        return Replacement(others, {name: name for name in weights}, hiding=[first] if hides else [])
