"""Saving a model from all ranks at once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .comm import Comm, together
from .errors import CheckpointError
from .manifest import FileEntry, Manifest
from .merge import merged_operations, write_merged
from .merge_plan import Holding, MergePlan, describe_holdings, plan_merge
from .options import SaveOptions
from .rank_files import Place, parallel_operations, warn_of_drift, write_model_file, write_training_files
from .side_files import refuse_unsupported, write_side_files
from .staging import commit, discard, prepare
from .tensors import held_state, shards_of, tensor_parallel_place, tied_groups
from .training_state import RankTrainingState, TrainingState, collect_training_state, common_content

# What a training state saved on its own has in its files' names.
TRAINING_VARIANT = "training"


def save_parallelized(
    model: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    *,
    stage: int,
    num_stages: int,
    world_comm: Comm,
    pipeline_comm: Comm,
    is_writer: bool,
    tensor_parallel_rank: int = 0,
    tensor_parallel_size: int = 1,
    merge_checkpoints: bool = False,
    training_state: TrainingState | None = None,
    **save_pretrained_kwargs: Any,
) -> None:
    """Save a split model. Every rank calls this, with the same arguments but for those that say where it stands.

    Without merging, each rank of one pipeline writes what it holds to `pytorch_model_tp_<t>_pp_<p>.bin`, and
    `parallel_checkpoint.json` says what is where. With merging, the folder is what `save_pretrained` would write,
    loadable by plain transformers; a rank gathers no more than one shard at a time.

    Atomic: see `staging`. If anything fails on any rank, every rank raises and the previous checkpoint is intact.

    Args:
        save_directory: on a file system that all ranks share.
        stage: this rank's place along its pipeline; a rank may hold several stages of the model.
        num_stages: ranks along the pipeline.
        world_comm: all ranks.
        pipeline_comm: the ranks of this rank's pipeline, in order of `stage` and then of `tensor_parallel_rank`.
        tensor_parallel_rank, tensor_parallel_size: this rank's place among those that hold slices of the same stage.
        is_writer: whether this rank's pipeline is the one that writes; replicas hold the same weights and only wait.
        merge_checkpoints: write one ordinary checkpoint.
        training_state: saved in the same atomic step (not when merging).
        save_pretrained_kwargs: see `SaveOptions`.

    Raises:
        TypeError, ValueError: an argument cannot be honoured.
        CheckpointError: some rank could not write; names the rank and the path.
    """
    options = SaveOptions.parse(save_pretrained_kwargs)
    refuse_unsupported(model)
    if merge_checkpoints and training_state is not None:
        raise ValueError("a merged checkpoint has no place for training_state; save it without merge_checkpoints")
    _check_slices(model, tensor_parallel_rank, tensor_parallel_size)
    place = Place(stage, num_stages, tensor_parallel_rank, tensor_parallel_size, is_writer)
    directory = os.path.abspath(save_directory)
    _Save(model, directory, place, world_comm, pipeline_comm, merge_checkpoints, training_state, options).run()


def save_training_state(
    model: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    training_state: TrainingState,
    *,
    stage: int,
    num_stages: int,
    world_comm: Comm,
    pipeline_comm: Comm,
    is_writer: bool,
    tensor_parallel_rank: int = 0,
    tensor_parallel_size: int = 1,
) -> None:
    """Save a training state without the model's weights, for `load_training_state(..., variant=TRAINING_VARIANT)`.

    Its files bear the variant in their names, so it may go to the folder of the model. Else as `save_parallelized`.
    """
    _check_slices(model, tensor_parallel_rank, tensor_parallel_size)
    place = Place(stage, num_stages, tensor_parallel_rank, tensor_parallel_size, is_writer)
    directory, options = os.path.abspath(save_directory), SaveOptions(variant=TRAINING_VARIANT)
    _Save(model, directory, place, world_comm, pipeline_comm, False, training_state, options, with_model=False).run()


def _check_slices(model: PreTrainedModel, tensor_parallel_rank: int, tensor_parallel_size: int) -> None:
    """Files must not say something else than what the model holds."""
    place = tensor_parallel_place(model)
    if place != (tensor_parallel_rank, tensor_parallel_size):
        raise ValueError(
            f"the model holds slice {place[0]} of {place[1]} of its weights, but is to be saved with "
            f"tensor_parallel_rank {tensor_parallel_rank} of tensor_parallel_size {tensor_parallel_size}"
        )


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others before the writing starts."""

    place: Place
    sides: list[str]
    holdings: dict[str, Holding]
    training: dict[str, Any] | None


class _Save:
    """One save on one rank. Each step ends with an exchange, so a fault anywhere ends it everywhere."""

    def __init__(
        self,
        model: PreTrainedModel,
        directory: str,
        place: Place,
        world: Comm,
        pipeline: Comm,
        merge: bool,
        training_state: TrainingState | None,
        options: SaveOptions,
        with_model: bool = True,
    ) -> None:
        self._model, self._directory, self._place, self._options = model, directory, place, options
        self._world, self._pipeline = world, pipeline
        self._merge, self._training_state, self._with_model = merge, training_state, with_model
        self._call = (directory, merge, training_state is not None, options.safe_serialization, options.variant)
        self._state: dict[str, torch.Tensor] = {}
        self._training: RankTrainingState | None = None
        self._plan: MergePlan | None = None

    def run(self) -> None:
        doing = f"save to {self._directory}"
        intact = f"the checkpoint that was in {self._directory} before, if any, is intact"
        prepared = together(self._world, doing, "preparing the folder", self._prepare, unchanged=intact)
        staging = next(name for _, name in prepared if name is not None)
        folder = os.path.join(self._directory, staging)
        try:
            calls = [call for call, _ in prepared]
            reports = together(
                self._world, doing, "comparing what ranks hold", lambda: self._describe(folder, calls), unchanged=intact
            )
            written = together(
                self._world, doing, "writing the files", lambda: self._write(folder, reports), unchanged=intact
            )
            together(
                self._world,
                doing,
                "putting the files in place",
                lambda: self._commit(staging, reports, written),
                unchanged=f"{self._directory} holds a whole checkpoint: the previous one, or already this one",
            )
        except CheckpointError:
            # After the exchange nobody writes any more.
            if self._place.is_leader:
                discard(self._directory, staging)
            raise

    def _prepare(self) -> tuple[Any, str | None]:
        return self._call, prepare(self._directory) if self._place.is_leader else None

    def _describe(self, folder: str, calls: list[Any]) -> _Report:
        for rank, call in enumerate(calls):
            if call != self._call:
                raise CheckpointError(f"was asked for {self._call}, but rank {rank} for {call}")
        sides: list[str] = []
        if self._training_state is not None:
            self._training = collect_training_state(self._model, self._training_state)
        if self._place.is_writer and not os.path.isdir(folder):
            raise CheckpointError(f"{folder} is not visible here; all ranks must share the file system")
        if self._place.is_writer and self._with_model:
            self._state = held_state(self._model, self._options.state_dict)
            sides = write_side_files(self._model, folder) if self._place.is_leader else []
        holdings = describe_holdings(self._model, self._state) if self._merge else {}
        return _Report(self._place, sides, holdings, None if self._training is None else self._training.report)

    def _write(self, folder: str, reports: list[_Report]) -> dict[str, FileEntry]:
        if not self._place.is_writer:
            return {}
        writers = [report for report in reports if report.place.is_writer]
        writers.sort(key=lambda report: (report.place.stage, report.place.tensor_parallel_rank))
        if self._merge:
            self._plan = plan_merge(self._model, [report.holdings for report in writers], self._options)
            write_merged(self._model, self._state, self._plan, folder, self._options, self._pipeline)
            return {}
        files = write_model_file(self._state, folder, self._place, self._options) if self._with_model else {}
        if self._training is not None and self._training_state is not None:
            common = None
            if self._place.is_leader:
                every = [report.training or {} for report in reports]
                common = common_content(self._training_state, every, [report.training or {} for report in writers])
            files |= write_training_files(self._training.tensors, common, folder, self._place, self._options)
        return files

    def _commit(self, staging: str, reports: list[_Report], written: list[dict[str, FileEntry]]) -> None:
        if not self._place.is_leader:
            return
        folder = os.path.join(self._directory, staging)
        sides = [name for report in reports for name in report.sides]
        if self._plan is not None:
            operations = merged_operations(self._directory, folder, self._plan, sides, self._options)
        else:
            manifest = Manifest(
                model_class=type(self._model).__name__,
                num_stages=self._place.num_stages,
                tensor_parallel_size=self._place.tensor_parallel_size,
                staging=staging,
                tied=tied_groups(self._model),
                files={name: entry for files in written for name, entry in files.items()},
                shards={name: (shard.dim, shard.blocks) for name, shard in shards_of(self._model).items()},
            )
            warn_of_drift(manifest)
            operations = parallel_operations(self._directory, folder, manifest, sides, self._options)
        commit(self._directory, staging, operations)
