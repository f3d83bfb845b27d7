"""The files of a parallel checkpoint: those that each rank writes, their table of contents, and their places."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock.modeling.weights.whole import shards_of

from .files import Behind, write_bytes, write_tensors
from .manifest import (
    MODEL,
    SEPARATOR,
    STAGED_INDEX,
    STAGED_MANIFEST,
    STEMS,
    TRAINING,
    FileEntry,
    Manifest,
    common_file_name,
    is_rank_file,
    manifest_name,
    rank_file_name,
    weight_file_names,
)
from .optimizer_state import OptimizerState
from .plan import (
    Content,
    FilePlan,
    Folder,
    Holding,
    SavingRank,
    SavingReport,
    Source,
    TrainingReport,
    write_side_files,
    writers_of,
)
from .staging import Replacement, write_index
from .tensors import TensorInfo, first_of_tied, held_state, of_run, tied_groups, to_cpu
from .training_state import TrainingState, collect_training_state, common_content, random_key
from .untrusted import is_regular, kind_of

logger = logging.getLogger(__name__)

# What a training state saved on its own has in its files' names, so that it may go to the folder of the model.
TRAINING_VARIANT = "training"


@dataclass
class RankFiles(Folder):
    """A parallel checkpoint: each rank that writes has a file of its weights, and one of its optimizer's state. Of that
    ranks of other pipelines write what only they keep. `once`: what several ranks hold is written by the first of them
    only, and plain transformers shall find the weights as well. A tensor-parallel model's files have no index."""

    training_state: TrainingState | None = None
    with_model: bool = True
    once: bool = False
    # What this rank holds: its weights, and its share of the training state.
    _place: SavingRank = field(default=SavingRank(0, 1), init=False)
    _parts: dict[str, Mapping[str, torch.Tensor]] = field(default_factory=dict, init=False)
    _training: tuple[TrainingReport, torch.Tensor, OptimizerState] | None = field(default=None, init=False)

    @property
    def call(self) -> list[Any]:
        return [*super().call, self.training_state is not None]

    def report(self, place: SavingRank, folder: str) -> SavingReport:
        self._place = place
        if self.training_state is not None:
            self._training = collect_training_state(self.model, self.training_state, place.pipeline, place.is_writer)
            self._parts[TRAINING] = self._training[2].tensors
        if self.with_model and place.is_writer:
            self._parts[MODEL] = of_run(self.model, held_state(self.model, self.options.state_dict))
            if place.is_leader:
                self.sides = write_side_files(self.model, folder)
        wanted = self.once or not place.is_writer
        names = [name for part in self._parts.values() for name in part] if wanted else []
        return SavingReport(place, names, training=self._training and self._training[0])

    def plan(self, reports: Sequence[SavingReport], rank: int) -> list[FilePlan]:
        writers, files = writers_of(reports), list[FilePlan]()
        own = self._names_to_write(reports, writers) if self.once else None
        parts = {
            part: tensors if own is None else {name: tensor for name, tensor in tensors.items() if name in own}
            for part, tensors in self._parts.items()
            if rank in writers
        }
        every = [report.training for report in reports if report.training is not None]
        if self.training_state is not None and self._training is not None:
            # The rank that leads has the states of all ranks' random generators in its file.
            leader, state, groups = writers[0], self.training_state, self._training[2].groups
            pipeline = [every[writer] for writer in writers]
            self.given = {random_key(rank): self._training[1]}
            random = {
                random_key(one): Source(Holding((report.random,), "uint8"), (one,)) for one, report in enumerate(every)
            }
            files.append(
                FilePlan(
                    common_file_name(self.options.variant),
                    leader,
                    part=TRAINING,
                    data=lambda: common_content(state, groups, every, pipeline),
                )
            )
            files.append(self._file(TRAINING, reports, leader, random, parts.get(TRAINING, {})))
            if rank in writers[1:] and parts[TRAINING]:
                files.append(self._file(TRAINING, reports, rank, {}, parts[TRAINING]))
        if MODEL in self._parts:
            files.append(self._file(MODEL, reports, rank, {}, parts[MODEL]))
        return files

    def _file(
        self,
        part: str,
        reports: Sequence[SavingReport],
        writer: int,
        inputs: Mapping[str, Source],
        own: Mapping[str, torch.Tensor],
    ) -> FilePlan:
        place = reports[writer].place
        ranks = place.tensor_parallel_rank, place.number
        name = rank_file_name(STEMS[part], *ranks, self.options.extension, self.options.variant)
        return FilePlan(name, writer, inputs, own, part=part)

    def _names_to_write(self, reports: Sequence[SavingReport], writers: Sequence[int]) -> set[str]:
        """Of the tensors and states that this rank has to write, those that no rank before it writes.

        Of what is sharded, each tensor-parallel rank holds another part.
        """
        first = first_of_tied(tied_groups(self.model))
        shards = {first.get(name, name) for name in shards_of(self.model)}

        def key(name: str) -> tuple[str, str]:
            parameter, _, state = name.partition(SEPARATOR)
            return first.get(parameter, parameter), state

        whole, sharded = set[tuple[str, str]](), set[tuple[str, str]]()
        for report in (reports[writer] for writer in writers):
            if report.place == self._place:
                written = {True: sharded, False: whole}
                return {name for name in report.names if key(name) not in written[key(name)[0] in shards]}
            keys = {key(name) for name in report.names}
            whole |= keys
            sharded |= keys if report.place.tensor_parallel_rank == self._place.tensor_parallel_rank else set()
        return set()

    def write(self, file: FilePlan, content: Content, folder: str, behind: Behind) -> Callable[[], FileEntry]:
        path, ranks = os.path.join(folder, file.name), (self._place.number, self._place.tensor_parallel_rank)
        if isinstance(content, bytes):
            write_bytes(path, content)
            common = FileEntry(TRAINING, *ranks, len(content), checksum=zlib.crc32(content))
            return lambda: common
        tensors = to_cpu(content)
        first: dict[int, str] = {}
        stored = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
        aliases = {name: stored_name for name, stored_name in stored.items() if stored_name != name}
        unique = {name: tensor for name, tensor in tensors.items() if name not in aliases}
        # torch's format knows that two names are one tensor, so a .bin file is the whole state dict of its rank.
        written = unique if self.options.safe_serialization else tensors
        sums = write_tensors(path, written, self.options.save_function, behind)
        # Without the tensors, which shall not stay in memory.
        unsummed = {name: TensorInfo.of(tensor, 0) for name, tensor in unique.items()}

        def entry() -> FileEntry:
            infos = {name: replace(info, checksum=sums[name]) for name, info in unsummed.items()}
            return FileEntry(file.part, *ranks, os.path.getsize(path), infos, aliases)

        return entry

    def replacement(self, directory: str, folder: str, entries: Mapping[str, FileEntry]) -> Replacement:
        """Stage the table of contents, and how it becomes that of the checkpoint in `directory`."""
        manifest = Manifest(
            model_class=type(self.model).__name__,
            num_stages=self._place.num_pipeline_ranks,
            tensor_parallel_size=self._place.tensor_parallel_size,
            staging=os.path.basename(folder),
            tied=tied_groups(self.model),
            files=dict(entries),
            shards={name: (shard.dim, shard.blocks) for name, shard in shards_of(self.model).items()},
        )
        _warn_of_drift(manifest)
        options = self.options
        table = manifest_name(options.variant)
        _, index = weight_file_names(options.extension, options.variant, self.diffusers)
        write_bytes(os.path.join(folder, STAGED_MANIFEST), manifest.dump())
        starts, old = {table: STAGED_MANIFEST}, list[str]()
        if self.once and manifest.tensor_parallel_size == 1:
            write_index(folder, {n: file for file, one in entries.items() if one.part == MODEL for n in one.tensors})
            starts[index] = STAGED_INDEX
        elif kind_of(os.path.join(directory, index)) is not None and not options.variant:
            old.append(index)
        if kind_of(os.path.join(directory, table)) is not None:
            names = (name for name in os.listdir(directory) if is_rank_file(name, options.variant))
            old += sorted(name for name in names if name not in entries and is_regular(os.path.join(directory, name)))
        return Replacement(self.sides, starts, entries, old=old)


def _warn_of_drift(manifest: Manifest) -> None:
    """Log a warning if holders of one weight have different values: the first one's will be loaded everywhere."""
    values: dict[tuple[int, str], TensorInfo] = {}
    first = first_of_tied(manifest.tied)
    for entry in sorted(manifest.files.values(), key=lambda entry: entry.stage):
        for name, info in entry.tensors.items() if entry.part == MODEL else ():
            key = (entry.tensor_parallel_rank, first.get(name, name))
            if values.setdefault(key, info) != info:
                logger.warning("stage %d holds other values of %s than an earlier stage", entry.stage, name)
