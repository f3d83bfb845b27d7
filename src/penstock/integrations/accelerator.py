"""An Accelerator for a pipelined model: each pipeline counts as one process."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from penstock.optimizer import PipelineOptimizer
from penstock.runtime.engine import Engine


class PipelineAccelerator(Accelerator):
    """Shares out data among pipelines, gives all ranks of a pipeline the same batches, and wraps no model.

    Made from an ordinary accelerator with `take_over`.
    """

    engine: Engine
    # With a plugin, which clips in its own way, and accelerate does not know this optimizer.
    optimizer: PipelineOptimizer | None = None

    @classmethod
    def take_over(cls, accelerator: Accelerator, model: PreTrainedModel) -> None:
        """Turn `accelerator` into one for `model`, which is parallelised."""
        accelerator.__class__ = cls
        accelerator.engine = model.pipeline
        # A loader of an iterable data set would otherwise read on the first rank and deal out to all ranks.
        accelerator.dataloader_config.dispatch_batches = False

    @property
    def num_processes(self) -> int:
        """The number of pipelines."""
        return len(self.engine.layout.pipelines)

    @property
    def process_index(self) -> int:
        """The index of this rank's pipeline."""
        return self.engine.place.pipeline

    @property
    def first_ranks(self) -> list[int]:
        """A rank of each pipeline."""
        return [min(pipeline.ranks()) for pipeline in self.engine.layout.pipelines]

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether gradients overflowed in the last step."""
        if self.optimizer is not None:
            return self.optimizer.step_was_skipped
        return bool(super().optimizer_step_was_skipped)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """The model unchanged: it is on its device already, and reduces its own gradients."""
        if not any(model is known for known in self._models):
            self._models.append(model)
        return model

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **kwargs: Any) -> DataLoader:
        """As accelerate's, over pipelines; its workers' random numbers are the same on all ranks of a pipeline."""
        seeding = data_loader.worker_init_fn
        if isinstance(seeding, functools.partial) and "rank" in seeding.keywords:
            data_loader.worker_init_fn = functools.partial(
                seeding.func, *seeding.args, **{**seeding.keywords, "rank": self.process_index}
            )
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """The tensors of all pipelines, concatenated along the first dimension. They have the same shape everywhere."""
        if self.num_processes == 1:
            return tensor

        # Not accelerate's gather: in an elastic run accelerate knows of no other process.
        def of_each_pipeline(mine: torch.Tensor) -> torch.Tensor:
            mine = (mine[None] if mine.ndim == 0 else mine).contiguous()
            every = [torch.empty_like(mine) for _ in range(self.engine.layout.world_size)]
            groups, board = self.engine.groups, self.engine.board
            group = groups.world_control if mine.device.type == "cpu" else groups.world
            with board.guard("gathering what the pipelines have", self.engine.context.everyone):
                dist.all_gather(every, mine, group=group)
            return torch.cat([every[rank] for rank in self.first_ranks])

        return recursively_apply(of_each_pipeline, tensor, error_on_other_type=True)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad to the longest of all pipelines."""
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
        """The sum or mean over pipelines."""

        def over_pipelines(mine: torch.Tensor) -> torch.Tensor:
            total = self.gather(mine[None]).sum(0) * scale
            return total / self.num_processes if reduction == "mean" else total

        return tensor if reduction == "none" else recursively_apply(over_pipelines, tensor)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the norm of the whole model's gradients, whatever `parameters`. Returns it as it was, shape ().

        With a loss scale it is that of the gradients without it, and not finite on any rank if it is not on one.
        """
        if self.optimizer is not None:
            return self.optimizer.clip_grad_by_norm(max_norm, norm_type)
        self.unscale_gradients()
        return self.engine.clip_grad_norm_(max_norm, norm_type)
