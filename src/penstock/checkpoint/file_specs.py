"""What a save consists of: files, each of tensors from the ranks that hold them, written by one rank.

`SaveOptions` says what `save_pretrained`'s arguments mean for it.

A `SaveFormat` says what this rank holds, which files there will be, and how one of them is written.
`save.Save` does the rest in the same way for all kinds. What a method of the model's own class writes does not go
through it (`model_methods.save_by_own_method`), nor does the state of one object (`training_state.save_object`).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import CONFIG_NAME

from penstock.checkpoint.files import BackgroundWork, SaveFunction, writing
from penstock.checkpoint.manifest import MODEL, FileEntry, check_variant
from penstock.checkpoint.model_state import held_state
from penstock.checkpoint.ranks import CheckpointRanks, SavingRank
from penstock.checkpoint.staging import Replacement
from penstock.checkpoint.tensors import DTYPES, dtype_name
from penstock.checkpoint.untrusted import CheckpointError, Count, typed
from penstock.modeling.instrumentation import known_of
from penstock.modeling.libraries import of_diffusers
from penstock.modeling.sharding import Sharding
from penstock.modeling.weights.whole import packed_weights, whole_shape

Result = TypeVar("Result")


@dataclass(frozen=True)
class HeldTensor:
    """The shape and dtype that a tensor which a rank holds has in the unsplit model."""

    shape: tuple[Count, ...]
    dtype: Annotated[str, DTYPES]
    is_parameter: bool = False


@dataclass(frozen=True)
class SavingReport:
    """What a rank tells the others before the writing starts.

    Attributes:
        holdings: the tensors that it can give.
        candidates: names of tensors of which the first rank that has them writes each. Where every rank of the first
            pipeline writes its own, those that only the other pipelines' ranks keep.
        wanted: on the leader, the names of those that are saved, if not all are.
        metadata: what a library that packs weights has to say of those of this rank.
        members, values: of its optimizer, see `OptimizerState`.
        settings: of its optimizer's groups, see `described_groups`.
    """

    place: SavingRank
    holdings: dict[str, HeldTensor] = field(default_factory=dict)
    candidates: list[str] = field(default_factory=list)
    wanted: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    members: list[list[str]] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)


def writers_of(reports: Sequence[SavingReport]) -> list[int]:
    """The ranks that write, in order of pipeline rank, then of tensor-parallel rank; so the first is the leader. Last
    come those of other pipelines."""
    writers = [rank for rank, report in enumerate(reports) if report.place.in_first_pipeline or report.candidates]
    order = attrgetter("number", "tensor_parallel_rank")
    return sorted(writers, key=lambda rank: order(reports[rank].place))


@dataclass(frozen=True)
class Source:
    """Where a tensor comes from: one rank; or, if it is sharded, the ranks that have its shards, in order."""

    holding: HeldTensor
    ranks: Sequence[int]
    sharding: Sharding | None = None

    def empty(self) -> torch.Tensor:
        """Memory for what one of the ranks has."""
        whole = self.holding.shape
        shape = whole if self.sharding is None else self.sharding.shape(whole, len(self.ranks))
        return torch.empty(shape, dtype=DTYPES[self.holding.dtype])


@dataclass(frozen=True)
class FileSpec:
    """One file of a save, or several that another library writes.

    Attributes:
        writer: the rank that writes it.
        inputs: the tensors that ranks give to the writer for it, in this order.
        own: tensors of the writer's that are in it besides.
        outputs: its tensors' names, where they are not those of what it is made of.
        part: see `FileEntry`.
        data: gives the content of a file that is no file of tensors.
    """

    name: str
    writer: int
    inputs: Mapping[str, Source] = field(default_factory=dict)
    own: Mapping[str, torch.Tensor] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    part: str = MODEL
    data: Callable[[], bytes] | None = None


Content = dict[str, torch.Tensor] | bytes


@dataclass
class SaveFormat:
    """What a save writes, and into which files. `given`: what this rank holds, by name. `sides`: names of the small
    files beside the weights."""

    model: nn.Module
    options: SaveOptions
    given: Mapping[str, torch.Tensor] = field(default_factory=dict, init=False)
    sides: Sequence[str] = field(default=(), init=False)

    @property
    def diffusers(self) -> bool:
        """Whether the files of weights have diffusers' names."""
        return of_diffusers(type(self.model))

    @property
    def must_be_equal(self) -> list[Any]:
        """What must be the same on all ranks: all options by which each of them plans for itself."""
        options = self.options
        split_by = str(options.max_shard_size), bool(options.save_original_format)
        return [type(self).__name__, options.safe_serialization, options.variant, *split_by]

    def report(self, place: SavingRank, folder: str) -> SavingReport:
        """Look at what this rank holds. A subclass may let the leader write small files to `folder`."""
        if place.in_first_pipeline:
            self.given = held_state(self.model, self.options.state_dict)
        return SavingReport(place, holdings=describe_holdings(self.model, self.given))

    def get(self, name: str) -> torch.Tensor:
        """What this rank holds under a name, on the CPU."""
        return self.given[name].cpu().contiguous()

    def plan(self, reports: Sequence[SavingReport], rank: int) -> list[FileSpec]:
        """The files in which this rank has a part, in an order that is the same on all ranks."""
        raise NotImplementedError

    def write(self, file: FileSpec, content: Content, folder: str, background: BackgroundWork) -> dict[str, Any] | None:
        """Write a file. Returns what a `FileEntry` says of it, complete once `background` is left; None if the folder
        has no table of contents."""
        raise NotImplementedError

    def replacement(self, directory: str, folder: str, entries: Mapping[str, FileEntry]) -> Replacement:
        """On the leader: how what was written to `folder` becomes the checkpoint in `directory`."""
        raise NotImplementedError


def describe_holdings(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, HeldTensor]:
    """What this rank can contribute, or its tensor-parallel group together."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: HeldTensor(whole_shape(model, name, tensor), dtype_name(tensor.dtype), name in parameters)
        for name, tensor in state.items()
    }


def first_holders(
    reports: Sequence[SavingReport], sharded: Mapping[str, Sharding] | None = None, names: Collection[str] = ()
) -> dict[str, Source]:
    """Each tensor, or each of `names`, and the first rank that holds it; of a `sharded` one the first tensor-parallel
    group."""
    writers, sharded = writers_of(reports), sharded or {}
    size = reports[writers[0]].place.tensor_parallel_size
    first = {name: place for place in reversed(range(len(writers))) for name in reports[writers[place]].holdings}
    return {
        name: Source(
            reports[writers[first[name]]].holdings[name],
            writers[first[name] : first[name] + (size if name in sharded else 1)],
            sharded.get(name),
        )
        for name in names or first
    }


def tell_reports(
    ranks: CheckpointRanks, what: str, report: Callable[[], SavingReport], unchanged: str = ""
) -> list[SavingReport]:
    """Make a report on every rank; returns every rank's. See `CheckpointRanks.together`."""
    by_rank = ranks.together(f"comparing what ranks hold, to {what}", lambda: asdict(report()), unchanged)
    return [typed(SavingReport, report, f"what rank {rank} says") for rank, report in enumerate(by_rank)]


def each_file(
    save_format: SaveFormat,
    reports: Sequence[SavingReport],
    ranks: CheckpointRanks,
    do: Callable[[FileSpec, Content], object],
) -> None:
    """Gather the content of each planned file on the rank that writes it, one at a time, and call `do` with it there.

    Transfers happen in one order on all ranks, so they cannot deadlock. A rank that fails, for example out of host
    memory, says so in place of each further one, so that no other waits for it, and raises at the end."""
    failures: list[Exception] = []

    def attempt(work: Callable[..., Result], *arguments: Any) -> Result | None:
        if failures:
            return None
        try:
            return work(*arguments)
        except Exception as error:
            failures.append(error)
            return None

    def write(file: FileSpec, gathered: dict[str, torch.Tensor]) -> None:
        do(file, {**file.own, **gathered} if file.data is None else file.data())

    for file in save_format.plan(reports, ranks.rank):
        gathered: dict[str, torch.Tensor] = {}
        for name, source in file.inputs.items():
            parts: list[torch.Tensor] = []
            part = whole = None  # so that one tensor is in memory at a time
            for rank in source.ranks:
                if ranks.rank not in (rank, file.writer):
                    continue
                part = attempt(partial(save_format.get, name) if ranks.rank == rank else source.empty)
                if ranks.rank != file.writer:
                    ranks.send(part, file.writer, f"giving {name} for {file.name}")
                elif rank != file.writer:
                    part = ranks.receive(part, rank, f"gathering {name} for {file.name}")
                if part is not None:
                    parts.append(part)
            if ranks.rank == file.writer and len(parts) == len(source.ranks):
                whole = parts[0] if source.sharding is None else attempt(source.sharding.join, parts)
                if whole is not None:
                    gathered[name] = whole
        if ranks.rank == file.writer and gathered.keys() == file.inputs.keys():
            attempt(write, file, gathered)
    if failures:
        raise failures[0]


@dataclass(frozen=True)
class SaveOptions:
    """What `save_pretrained`'s arguments mean here. `state_dict`: this rank's part, under the unsplit names. Per-rank
    files are never split by `max_shard_size`, and always have the model's own names and shapes; merged ones with
    `save_original_format` those of the original checkpoint format, which transformers converts when it loads."""

    state_dict: Mapping[str, torch.Tensor] | None = None
    save_function: SaveFunction | None = None
    safe_serialization: bool = False
    variant: str | None = None
    max_shard_size: int | str = "50GB"
    save_original_format: bool = True

    @classmethod
    def parse(cls, arguments: Mapping[str, Any]) -> SaveOptions:
        """Read the keyword arguments of a call. Raises TypeError for an unknown argument, ValueError for a value that
        cannot be honoured."""
        values = {name: value for name, value in arguments.items() if name not in _WITHOUT_EFFECT}
        if values.pop("push_to_hub", False):
            raise ValueError(
                "push_to_hub does not work on a parallelised model: leave it out, and then upload the folder of "
                "save_pretrained from one rank (huggingface_hub.upload_folder)"
            )
        if values.pop("distributed_checkpoint", False):
            raise ValueError(
                "distributed_checkpoint does not work on a parallelised model: leave it out; save_parallelized writes "
                "a file for each rank"
            )
        if unknown := sorted(values.keys() - cls.__dataclass_fields__.keys()):
            raise TypeError(
                f"the save of a parallelised model got unexpected arguments: {', '.join(unknown)}"
                f"; it takes {', '.join(cls.__dataclass_fields__)}"
            )
        options = cls(**values)
        if options.save_function is not None and options.safe_serialization:
            raise ValueError(
                "save_function writes .bin files and cannot be combined with safe_serialization=True"
                ": leave one of the two out"
            )
        check_variant(options.variant)
        return options

    @property
    def extension(self) -> str:
        return ".safetensors" if self.safe_serialization else ".bin"


# The layout decides who writes, nothing is uploaded, and adapters are saved elsewhere, with all that they were given.
_WITHOUT_EFFECT = frozenset({"is_main_process", "token", "save_peft_format"})


def refuse_unsupported(model: nn.Module, merged: SaveOptions | None) -> None:
    """Raise CheckpointError, with what to do, if the model is quantised and cannot be saved in this way.

    `merged` says how it is written into one folder, which is all that can be done with packed weights; None for other
    kinds of saves."""
    quantizer, diffusers = getattr(model, "hf_quantizer", None), of_diffusers(type(model))
    torchao = quantizer is not None and quantizer.quantization_config.quant_method == "torchao"
    kept = (quantizer is None or (not diffusers and quantizer.is_serializable())) and all(
        packed.is_saved for module in model.modules() if (packed := known_of(module).packed) is not None
    )
    fits = merged is not None and (merged.safe_serialization or not torchao)
    if (packed_weights(model) or torchao) and not (fits and kept):
        raise CheckpointError(
            f"cannot save the packed weights of a quantised {type(model).__name__}"
            + (" so: use save_pretrained, with files of safetensors" if kept else ": this kind is not saved")
            + f"; adapters are saved by {'save_lora_adapter' if diffusers else 'save_pretrained'}, and the state of a "
            "run by penstock.save_checkpoint"
        )


def write_side_files(model: nn.Module, directory: str) -> list[str]:
    """Write the configuration, the generation configuration and custom code, as `save_pretrained` would.

    Returns the names of the files, not flushed to disk; none for a module of one's own.
    """
    place, before = os.path.join(directory, CONFIG_NAME), set(os.listdir(directory))
    if of_diffusers(type(model)):
        with writing(place, "the configuration"):
            cast(Any, model).save_config(directory)
        return [CONFIG_NAME]
    if not isinstance(model, PreTrainedModel):
        return []
    with writing(place, "the configurations"):
        config = copy.deepcopy(model.config)
        config.dtype = dtype_name(model.dtype)
        config.architectures = [type(model).__name__]
        if model.is_remote_code():
            custom_object_save(model, directory, config=config)
        config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
        return sorted(set(os.listdir(directory)) - before)
