"""The formats of saves, as plans of files.

Ordinary folders, as transformers and PEFT write them, have files that are assembled from the ranks of a pipeline.
Parallel checkpoints have files that each rank writes, and their table of contents.

Plans of ordinary folders are made from names, shapes and dtypes, by every rank for itself and alike; those of adapters
from what the leader has seen PEFT ask for.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from penstock.checkpoint.file_specs import (
    Content,
    FileSpec,
    HeldTensor,
    SaveFormat,
    SavingReport,
    Source,
    first_holders,
    write_side_files,
    writers_of,
)
from penstock.checkpoint.files import BackgroundWork, flush_file, write_bytes, write_tensors, writing
from penstock.checkpoint.manifest import (
    ADAPTER,
    EXTENSIONS,
    MODEL,
    SEPARATOR,
    STEMS,
    TRAINING,
    FileEntry,
    Manifest,
    common_file_name,
    is_rank_file,
    is_shard,
    manifest_name,
    rank_file_name,
    weight_file_names,
)
from penstock.checkpoint.model_state import MARK, as_values, held_state, own_name
from penstock.checkpoint.optimizer_state import OptimizerState, completed_groups, described_groups, refuse_unlike_groups
from penstock.checkpoint.ranks import SavingRank
from penstock.checkpoint.staging import Replacement, read_index, write_index
from penstock.checkpoint.tensors import DTYPES, TensorInfo, first_of_tied, of_run, outline, tied_groups, to_cpu
from penstock.checkpoint.training_state import TrainingState, collect_training_state, common_content, random_key
from penstock.checkpoint.untrusted import CheckpointError, is_regular, kind_of
from penstock.modeling.graph.dataflow import DataFlow, ForwardArgument
from penstock.modeling.placeholders.ghosts import shown_whole
from penstock.modeling.weights.whole import packed_weights, shards_of, unit_of, whole_state

logger = logging.getLogger(__name__)


@dataclass
class ModelFormat(SaveFormat):
    """The folder that `save_pretrained` writes for the unsplit model. `files`: names of the files of weights. `index`:
    says which of them holds which tensor; None if there is one file. `metadata`: what a library that packs weights
    has to say of them in the files."""

    files: list[str] = field(default_factory=list, init=False)
    index: dict[str, Any] | None = field(default=None, init=False)
    metadata: dict[str, str] = field(default_factory=dict, init=False)

    def report(self, place: SavingRank, folder: str) -> SavingReport:
        quantizer = getattr(self.model, "hf_quantizer", None)
        if quantizer is not None and place.in_first_pipeline and self.options.state_dict is None:
            state, self.metadata = quantizer.get_state_dict_and_metadata(self.model)
            self.options = replace(self.options, state_dict=state)
        if place.is_leader:
            self.sides = write_side_files(self.model, folder)
        report = super().report(place, folder)
        return replace(report, metadata=self.metadata)

    def plan(self, reports: Sequence[SavingReport], rank: int) -> list[FileSpec]:
        """Each file is assembled by the rank that holds most of it already. transformers raises RuntimeError if weights
        are tied that the model does not declare as tied."""
        model, options = self.model, self.options
        of_ranks = [report.metadata for report in reports if report.metadata]
        self.metadata = {name: text for metadata in of_ranks for name, text in metadata.items()}
        if of_ranks:  # torchao's list of all tensors, by their names before it took packed ones apart
            self.metadata["tensor_names"] = json.dumps(
                [n for metadata in of_ranks for n in json.loads(metadata["tensor_names"])]
            )
        sources = first_holders(reports, shards_of(model))
        order = {name: place for place, name in enumerate(whole_state(model))}
        packed = {name.removesuffix(".weight") for name in packed_weights(model)}

        def place_of(name: str) -> tuple[int, str]:
            # Only its holder knows under which names a packed weight is saved, so these are sorted.
            layer = unit_of(name, packed)
            return (order.get(own_name(name), len(order)), "") if layer is None else (order[f"{layer}.weight"], name)

        names = _saved_names(model, sorted(sources, key=place_of))
        inputs = {name: _on_meta(sources[name]) for name in names}
        outputs, origin = dict(inputs), {name: frozenset({name}) for name in names}
        if self._reverted:
            with followed(inputs) as origin_of:
                outputs = {
                    name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, inputs).items()
                }
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
            files.append(FileSpec(file_name, max(held, key=held.__getitem__), made_of, outputs=tuple(shard_names)))
        self.files = [file.name for file in files]
        metadata = {"total_parameters": _count_parameters(model, sources), **split.metadata}
        named = (lambda name: name) if options.safe_serialization else own_name
        places = {named(name): file for name, file in split.tensor_to_filename.items()}
        self.index = {"metadata": metadata, "weight_map": places} if split.is_sharded else None
        return files

    @property
    def _reverted(self) -> bool:
        # transformers cannot turn back what it did to read packed weights.
        was_packed = getattr(getattr(self.model, "hf_quantizer", None), "pre_quantized", False)
        return self.options.save_original_format and isinstance(self.model, PreTrainedModel) and not was_packed

    def write(self, file: FileSpec, content: Content, folder: str, background: BackgroundWork) -> None:
        assert not isinstance(content, bytes)
        tensors = revert_weight_conversion(self.model, content) if self._reverted else content
        wanted = to_cpu({name: tensors[name] for name in file.outputs})
        if self.options.safe_serialization:  # whose files hold no tensor under two names
            first: dict[int, str] = {}
            shared = [name for name, tensor in wanted.items() if first.setdefault(id(tensor), name) != name]
            wanted.update({name: wanted[name].clone() for name in shared})
        plain = {} if self.options.safe_serialization else {n: wanted.pop(n) for n in [*wanted] if n.endswith(MARK)}
        # Not with `background`, which keeps tensors until all files are written.
        path, save = os.path.join(folder, file.name), self.options.save_function
        write_tensors(path, wanted, save, metadata=self.metadata, plain=as_values(plain))

    def replacement(self, directory: str, folder: str, entries: Mapping[str, FileEntry]) -> Replacement:
        """transformers starts from the first of these that exists: `model.safetensors`, its index, `pytorch_model.bin`,
        its index. So the new one is put in place first, and then those are removed that come before it."""
        options = self.options
        names = {extension: weight_file_names(extension, options.variant, self.diffusers) for extension in EXTENSIONS}
        search_order, index = list(chain(*names.values())), names[options.extension][1]
        start, shards = self.files[0], list[str]()
        if self.index is not None:
            start, shards = index, self.files
            write_index(folder, index, self.index["weight_map"], self.index["metadata"])
        names_there = sorted(os.listdir(directory))
        hiding = [name for name in reversed(search_order[: search_order.index(start)]) if name in names_there]
        old = [index] if index in names_there and index != start else []
        # A safetensors checkpoint hides a .bin one that may stand beside it, but does not replace it.
        replaced = [index] if options.safe_serialization else [name for _, name in names.values()]
        for name in names_there:
            is_old = name not in self.files and any(is_shard(name, replaced_name) for replaced_name in replaced)
            if is_old and is_regular(os.path.join(directory, name)):
                old.append(name)
        return Replacement(self.sides, [start], shards, hiding, old)


def _on_meta(source: Source) -> torch.Tensor:
    return torch.empty(source.holding.shape, dtype=DTYPES[source.holding.dtype], device="meta")


def _saved_names(model: nn.Module, names: Sequence[str]) -> list[str]:
    """`names` without those that `save_pretrained` leaves out: the ignored ones, and all but one of tied ones. A module
    that is no model of transformers has them all, as its `load_state_dict` asks for them."""
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
            flow.mark(tensor, (ForwardArgument(name),))
        yield lambda tensor: frozenset(
            source.name for source in flow.sources(tensor) if isinstance(source, ForwardArgument)
        )


State = Mapping[str, torch.Tensor]


@dataclass
class AdapterFormat(SaveFormat):
    """The folder of one adapter of a model. `adapter`: its name. `select`: gives what the adapter's file holds, from
    the state of the whole model, also of meta tensors. `write_files`: writes the files into a folder, given those
    tensors of the model's state that `select` reads."""

    model: PreTrainedModel
    adapter: str
    select: Callable[[State], State]
    write_files: Callable[[str, State], None]

    @property
    def must_be_equal(self) -> list[Any]:
        return [*super().must_be_equal, self.adapter]

    def report(self, place: SavingRank, folder: str) -> SavingReport:
        report = super().report(place, folder)
        if not place.is_leader:
            return report
        whole = whole_state(self.model)
        state = {name: outline(tensor) for name, tensor in whole.items() if isinstance(tensor, torch.Tensor)}
        with shown_whole(self.model), followed(state) as origin_of:
            origins = [origin_of(tensor) for tensor in self.select(state).values()]
        needed = frozenset[str]().union(*origins)
        return replace(report, wanted=[name for name in state if name in needed])

    def plan(self, reports: Sequence[SavingReport], rank: int) -> list[FileSpec]:
        leader = writers_of(reports)[0]
        sources = first_holders(reports, names=reports[leader].wanted)
        return [FileSpec(f"{ADAPTER} of {self.adapter}", leader, sources)]

    def write(self, file: FileSpec, content: Content, folder: str, background: BackgroundWork) -> None:
        assert not isinstance(content, bytes)
        with writing(folder, file.name, sum(tensor.nbytes for tensor in content.values())):
            with shown_whole(self.model):
                self.write_files(folder, to_cpu(content))
            for name in os.listdir(folder):
                flush_file(os.path.join(folder, name))

    def replacement(self, directory: str, folder: str, entries: Mapping[str, FileEntry]) -> Replacement:
        """The configuration is put in place before the weights. Old weights that would be read first are removed."""
        written = sorted(os.listdir(folder))
        weights = [name for name in written if name.startswith(ADAPTER)]
        first, second = (f"{ADAPTER}{extension}" for extension in EXTENSIONS)
        hides = second in written and first not in written and kind_of(os.path.join(directory, first)) is not None
        others = [name for name in written if name not in weights]
        return Replacement(others, weights, hiding=[first] if hides else [])


# -- parallel checkpoints ----------------------------------------------------------------------------------------------

# What a training state saved on its own has in its files' names, so that it may go to the folder of the model.
TRAINING_VARIANT = "training"
# Among what a rank holds: the states of its random generators.
_RANDOM = "random"


@dataclass
class ParallelFormat(SaveFormat):
    """A parallel checkpoint. Each rank that writes has a file of its weights, and one of its optimizer's state. Ranks
    of other pipelines than the first write the part of that state that only they keep. `once`: the first rank that
    holds a tensor writes it, no other, and plain transformers finds the weights as well. The files of a tensor-parallel
    model have no index."""

    training_state: TrainingState | None = None
    with_model: bool = True
    once: bool = False
    # What this rank writes: its weights, and its share of the training state.
    _place: SavingRank = field(default=SavingRank(), init=False)
    _parts: dict[str, Mapping[str, torch.Tensor]] = field(default_factory=dict, init=False)
    _random: torch.Tensor = field(init=False)
    _optimizer: OptimizerState = field(default_factory=OptimizerState, init=False)

    @property
    def must_be_equal(self) -> list[Any]:
        return [*super().must_be_equal, self.training_state is not None]

    def report(self, place: SavingRank, folder: str) -> SavingReport:
        self._place, holdings = place, dict[str, HeldTensor]()
        if self.training_state is not None:
            self._random, self._optimizer = collect_training_state(
                self.model, self.training_state, place.in_first_pipeline
            )
            self._parts[TRAINING] = self._optimizer.tensors
            holdings[_RANDOM] = HeldTensor(tuple(self._random.shape), "uint8")
        if self.with_model and place.in_first_pipeline:
            self._parts[MODEL] = of_run(self.model, held_state(self.model, self.options.state_dict))
            if place.is_leader:
                self._refuse_to_hide(os.path.dirname(folder))
                self.sides = write_side_files(self.model, folder)
        writes_unless = self.once or not place.in_first_pipeline
        candidates = [name for part in self._parts.values() for name in part] if writes_unless else []
        members, values = self._optimizer.members, self._optimizer.values
        settings = described_groups(self._optimizer.groups)
        return SavingReport(place, holdings, candidates, members=members, values=values, settings=settings)

    def plan(self, reports: Sequence[SavingReport], rank: int) -> list[FileSpec]:
        leader, files, parts = writers_of(reports)[0], list[FileSpec](), self._to_write(reports, rank)
        if self.training_state is not None:
            settings = [report.settings for report in reports]
            refuse_unlike_groups(settings)
            groups = completed_groups(self._optimizer.groups, settings)
            data = partial(common_content, self.training_state, groups, reports)
            files.append(FileSpec(common_file_name(self.options.variant), leader, part=TRAINING, data=data))
            # The leader has the states of all ranks' random generators in its file.
            self.given = {random_key(rank): self._random}
            random = {random_key(peer): Source(each.holdings[_RANDOM], (peer,)) for peer, each in enumerate(reports)}
            name = self._name_of(TRAINING, reports[leader].place)
            files.append(FileSpec(name, leader, random, parts[TRAINING], part=TRAINING))
        for part, tensors in parts.items():
            if part == MODEL or (tensors and rank != leader):
                files.append(FileSpec(self._name_of(part, self._place), rank, own=tensors, part=part))
        return files

    @property
    def _has_index(self) -> bool:
        return self.once and self._place.tensor_parallel_size == 1

    def _refuse_to_hide(self, directory: str) -> None:
        """Raise CheckpointError if there are weights, of any kind of file, that plain transformers could not read
        beside these any more, or would read in their place."""
        variant = self.options.variant
        is_of_a_run = os.path.lexists(os.path.join(directory, manifest_name(variant)))
        names = [weight_file_names(extension, variant, self.diffusers) for extension in EXTENSIONS]
        for name in chain(*names) if self._has_index else ():
            path = os.path.join(directory, name)
            is_index = name.endswith(".json")
            if os.path.lexists(path) and not (is_index and _leads_to_rank_files(path, variant, is_of_a_run)):
                raise CheckpointError(
                    f"{path} is of an ordinary checkpoint, and transformers could read only one of the two in this "
                    "folder: save to another one, or remove the weights in this one first"
                )

    def _name_of(self, part: str, place: SavingRank) -> str:
        ranks = place.tensor_parallel_rank, place.number
        return rank_file_name(STEMS[part], *ranks, self.options.extension, self.options.variant)

    def _to_write(self, reports: Sequence[SavingReport], rank: int) -> dict[str, Mapping[str, torch.Tensor]]:
        """The tensors and states that this rank writes: with `once` those that no rank before it does. Each
        tensor-parallel rank holds another part of what is sharded."""
        writers = writers_of(reports)
        if not self.once or rank not in writers:
            return self._parts
        first = first_of_tied(tied_groups(self.model))
        shards = {first.get(name, name) for name in shards_of(self.model)}

        def key(name: str, place: SavingRank) -> tuple[str, str, int]:
            parameter, _, state = name.partition(SEPARATOR)
            parameter = first.get(parameter, parameter)
            return parameter, state, place.tensor_parallel_rank if parameter in shards else 0

        before = [reports[writer] for writer in writers[: writers.index(rank)]]
        written = {key(name, report.place) for report in before for name in report.candidates}
        return {
            part: {name: tensor for name, tensor in tensors.items() if key(name, self._place) not in written}
            for part, tensors in self._parts.items()
        }

    def write(self, file: FileSpec, content: Content, folder: str, background: BackgroundWork) -> dict[str, Any]:
        path, place = os.path.join(folder, file.name), self._place
        # In the table of contents a pipeline rank is called a stage.
        entry = {"part": file.part, "stage": place.number, "tensor_parallel_rank": place.tensor_parallel_rank}
        if isinstance(content, bytes):
            write_bytes(path, content)
            return entry | {"size": len(content), "checksum": zlib.crc32(content)}
        tensors = to_cpu(content)
        # torch's format knows that two names are one tensor, so a .bin file is the whole state dict of its rank.
        if self.options.safe_serialization:
            first, stored = first_of_tied(tied_groups(self.model)), dict[tuple[str, int], str]()
            tensors = {
                n: tensor for n, tensor in tensors.items() if stored.setdefault((first.get(n, n), id(tensor)), n) == n
            }
        infos = write_tensors(path, tensors, self.options.save_function, background)
        return entry | {"size": os.path.getsize(path), "tensors": infos}

    def replacement(self, directory: str, folder: str, entries: Mapping[str, FileEntry]) -> Replacement:
        """Stage the table of contents, and how it becomes that of the checkpoint in `directory`."""
        manifest = Manifest(
            model_class=type(self.model).__name__,
            num_pipeline_ranks=self._place.num_pipeline_ranks,
            tensor_parallel_size=self._place.tensor_parallel_size,
            staging=os.path.basename(folder),
            tied=tied_groups(self.model),
            files=dict(entries),
            shards={name: (shard.dim, shard.blocks) for name, shard in shards_of(self.model).items()},
        )
        _warn_of_drift(manifest)
        options = self.options
        table, names_there = manifest_name(options.variant), sorted(os.listdir(directory))
        indices = {
            extension: weight_file_names(extension, options.variant, self.diffusers)[1] for extension in EXTENSIONS
        }
        starts, old = [table], list[str]()
        # The index of an ordinary checkpoint stays, as its shards do.
        for name in indices.values():
            if name in names_there and _leads_to_rank_files(os.path.join(directory, name), options.variant):
                old.append(name)
        write_bytes(os.path.join(folder, table), manifest.dump())
        if self._has_index:
            places = {name: file for file, entry in entries.items() if entry.part == MODEL for name in entry.tensors}
            index = indices[options.extension]
            write_index(folder, index, places)
            starts.append(index)
            old = [name for name in old if name != index]
        for name in names_there if table in names_there else ():
            is_old = name not in entries and is_rank_file(name, options.variant)
            if is_old and is_regular(os.path.join(directory, name)):
                old.append(name)
        return Replacement(self.sides, starts, entries, old=old)


def _leads_to_rank_files(index: str, variant: str | None, if_damaged: bool = False) -> bool:
    """Whether an index is that of a parallel checkpoint; `if_damaged` where it cannot be read."""
    try:
        return any(is_rank_file(name, variant) for name in read_index(index).values())
    except CheckpointError:
        return if_damaged


def _warn_of_drift(manifest: Manifest) -> None:
    """Log a warning if holders of one weight have different values: the first one's will be loaded everywhere."""
    first, values = first_of_tied(manifest.tied), dict[tuple[int, str], TensorInfo]()
    for entry in sorted(manifest.files.values(), key=lambda entry: entry.pipeline_rank):
        for name, info in entry.tensors.items() if entry.part == MODEL else ():
            if values.setdefault((entry.tensor_parallel_rank, first.get(name, name)), info) != info:
                logger.warning(
                    "%s on pipeline rank %d is not what an earlier rank holds, which will be loaded everywhere: did "
                    "every rank call optimizer.step()?",
                    *(name, entry.pipeline_rank),
                )
