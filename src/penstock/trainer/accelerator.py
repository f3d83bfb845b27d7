"""An Accelerator for a pipelined model: each pipeline counts as one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.state import GradientState
from accelerate.utils import find_batch_size, recursively_apply
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel

from penstock.api.initialize import initialize
from penstock.config.configuration import Configuration
from penstock.model.pipeline_model import PipelineModel
from penstock.runtime.comm.gloo import wait_for_all
from penstock.runtime.engine import Engine
from penstock.runtime.optimizer import PipelineOptimizer


class OwnShares(IterableDataset[Any]):
    """This pipeline's batches of what `loader` reads of an iterable data set. Every rank reads all of it.

    They are those that accelerate's dispatcher sends to a process: as many batches as there are pipelines (with
    `split_batches` one) are cut into equal parts, the last ones filled up with the first samples. Nothing is sent, and
    each pipeline pads its own part.
    """

    def __init__(self, loader: DataLoader[Any], index: int, num_pipelines: int, at_once: int):
        self.loader, self._index, self._num_pipelines, self.at_once = loader, index, num_pipelines, at_once
        self._collate = loader.collate_fn
        if num_pipelines > 1:
            loader.collate_fn = list

    def __len__(self) -> int:
        return len(self.loader.dataset)  # type: ignore[arg-type]  # as any data set's: it may have no length

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.loader.dataset, "set_epoch"):
            self.loader.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        first: list[Any] = []
        while group := list(itertools.islice(batches, self.at_once)):
            if self._num_pipelines == 1:
                (share,) = group
                count = find_batch_size(share) or -1
            elif self.loader.drop_last and len(group) < self.at_once:
                return
            else:
                samples = list(itertools.chain(*group))
                count, size = len(samples), -(-len(samples) // self._num_pipelines)
                first = first or samples[: self._num_pipelines]
                while len(samples) < size * self._num_pipelines:
                    samples += first
                share = self._collate(samples[self._index * size : (self._index + 1) * size])
            # What is gathered of the last batches is cut to so many.
            GradientState().active_dataloader.remainder = count
            yield share


class StreamLoader(DataLoaderShard):  # type: ignore[misc]  # a library without types
    def __len__(self) -> int:
        shares: Any = self.dataset
        length: int = (len(shares.loader) + (0 if shares.loader.drop_last else shares.at_once - 1)) // shares.at_once
        return length


class PipelineAccelerator(Accelerator):  # type: ignore[misc]  # a library without types
    """Shares out data among pipelines, gives all ranks of a pipeline the same batches, and wraps no model."""

    engine: Engine
    configuration: Configuration | None
    # A plugin's, which clips in its own way and which accelerate does not know.
    optimizer: PipelineOptimizer | None = None

    @classmethod
    def take_over(cls, accelerator: Accelerator, model: PreTrainedModel) -> None:
        """Turn `accelerator` into one for `model`, which is parallelised."""
        accelerator.__class__ = cls
        accelerator.engine, accelerator.configuration = model.pipeline, model.configuration
        # Data would otherwise be read on the first rank and sent to all others.
        accelerator.dataloader_config.dispatch_batches = False

    @property
    def num_processes(self) -> int:
        """How many batches the pipelines take: accelerate divides data and counts samples by it."""
        return self.engine.layout.num_replicas

    @property
    def process_index(self) -> int:
        return self.engine.context.replica

    @property
    def first_ranks(self) -> list[int]:
        """Of the ranks that take each batch, the first."""
        layout = self.engine.layout
        return [min(layout.of_replica(replica)[0].ranks()) for replica in range(layout.num_replicas)]

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether gradients overflowed in the last step."""
        if self.optimizer is not None:
            return self.optimizer.step_was_skipped
        return bool(super().optimizer_step_was_skipped)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """The model unchanged: it is on its device already, and reduces its own gradients. A second model, which is
        evaluated only, is parallelised as the first one is, unless it is to be placed on the device of each rank."""
        if evaluation_mode and not device_placement and not isinstance(model, PipelineModel):
            model = initialize(model, self.configuration)
            model.pipeline.autocast = self.engine.autocast
            return model.eval()
        if device_placement:
            return model.to(self.device)
        if not any(model is known for known in self._models):
            self._models.append(model)
        return model

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """As accelerate's, over pipelines; its workers' random numbers are the same on all ranks of a pipeline."""
        seeding = data_loader.worker_init_fn
        if isinstance(seeding, functools.partial) and "rank" in seeding.keywords:
            data_loader.worker_init_fn = functools.partial(
                seeding.func, *seeding.args, **{**seeding.keywords, "rank": self.process_index}
            )
        if not isinstance(data_loader.dataset, IterableDataset) or data_loader.batch_size is None:
            loader: DataLoader[Any] = super().prepare_data_loader(data_loader, *args, **kwargs)
            return loader
        at_once = 1 if self.split_batches else self.num_processes
        shuffling = getattr(data_loader.dataset, "generator", None)
        prepared: DataLoader[Any] = StreamLoader(
            OwnShares(data_loader, self.process_index, self.num_processes, at_once),
            device=self.device if self.device_placement else None,
            batch_size=None,
            collate_fn=lambda batch: batch,
            pin_memory=data_loader.pin_memory,
            generator=torch.Generator(),  # the data set's loader alone draws from the user's random stream
            rng_types=None if shuffling is None else ["generator"],
            synchronized_generator=shuffling,
            _drop_last=data_loader.drop_last,
            _non_blocking=self.non_blocking,
        )
        data_loader.pin_memory = False
        self._dataloaders.append(prepared)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """The tensors of all pipelines, concatenated along the first dimension. They must have one shape everywhere."""
        if self.num_processes == 1:
            return tensor

        # Not accelerate's gather: in an elastic run accelerate knows of no other process.
        def of_each_pipeline(mine: torch.Tensor) -> torch.Tensor:
            mine = (mine[None] if mine.ndim == 0 else mine).contiguous()
            by_rank = [torch.empty_like(mine) for _ in range(self.engine.layout.world_size)]
            groups, board = self.engine.context.groups, self.engine.board
            group = groups.world_control if mine.device.type == "cpu" else groups.world
            with board.guard("gathering what the pipelines have", self.engine.context.everyone):
                work = dist.all_gather(by_rank, mine, group=group, async_op=True)
                wait_for_all(work, group, mine.device, board.check)
            return torch.cat([by_rank[rank] for rank in self.first_ranks])

        return recursively_apply(of_each_pipeline, tensor, error_on_other_type=True)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        if self.num_processes == 1:
            return tensor

        def padded(mine: torch.Tensor) -> torch.Tensor:
            if dim >= mine.ndim:
                return mine
            longest = int(self.gather(torch.tensor([mine.shape[dim]], device=mine.device)).max())
            rest = longest - mine.shape[dim]
            where = [0, 0] * (mine.ndim - 1 - dim % mine.ndim) + ([rest, 0] if pad_first else [0, rest])
            return torch.nn.functional.pad(mine, where, value=pad_index)

        return recursively_apply(padded, tensor, error_on_other_type=True)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:

        def over_pipelines(mine: torch.Tensor) -> torch.Tensor:
            total = self.gather(mine[None]).sum(0) * scale
            reduced: torch.Tensor = total / self.num_processes if reduction == "mean" else total
            return reduced

        return tensor if reduction == "none" else recursively_apply(over_pipelines, tensor)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the norm of the whole model's gradients, whatever `parameters`. Returns it as it was, shape ().

        With a loss scale it is that of the gradients without it, and not finite on any rank if it is not on one.
        """
        if self.optimizer is not None:
            return self.optimizer.clip_grad_by_norm(max_norm, norm_type)
        self.unscale_gradients()
        return self.engine.clip_grad_norm_(max_norm, norm_type)
