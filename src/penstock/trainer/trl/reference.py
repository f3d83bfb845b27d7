"""The log-probabilities of a reference model: of each batch before its step, or of all samples before training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader
from transformers import Trainer

from penstock.trainer.own_loss import OwnLoss


class AgainstReference(OwnLoss):
    """For a trainer whose loss compares the model with a reference: the model without its LoRA, or a second one over
    the same stages. The reference's figures are computed before the step, as if they were precomputed."""

    precomputed_attributes: ClassVar[Mapping[str, Any]] = {"precompute_ref_logps": True}

    def reference(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What the reference gives for a batch, by TRL's names: each a number for each sample, or pair."""
        raise NotImplementedError

    @contextmanager
    def while_made(self) -> Iterator[None]:
        self.trainer._precompute_ref_logps = self._precomputed
        with super().while_made():
            yield

    def _precomputed(self, dataset: Any, name: str, batch_size: int) -> Any:
        """In place of the trainer's own method, which refuses data sets without a length."""
        if not hasattr(dataset, "__len__"):
            return type(self.trainer)._precompute_ref_logps(self.trainer, dataset, name, batch_size)
        return with_columns(self.trainer, dataset, batch_size, self.reference)

    def add_precomputed(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        has_figures = any(name.startswith("ref_") for name in inputs)
        return inputs if has_figures else {**inputs, **self.reference(inputs)}


def with_columns(
    trainer: Trainer, dataset: Any, batch_size: int, compute: Callable[[Any], Mapping[str, torch.Tensor]]
) -> Any:
    """The data set with what `compute` gives for batches of it, a number for each sample under each name. Every rank
    calls this. TRL keeps the numbers in a file by a hash of the weights: a rank has some of these, and a disk perhaps
    of its own, so that ranks would not agree whether the file is there. Here they are computed in each run."""
    from datasets import Dataset, concatenate_datasets

    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        collate_fn=trainer.data_collator,
        num_workers=trainer.args.dataloader_num_workers,
        pin_memory=trainer.args.dataloader_pin_memory,
        shuffle=False,
    )
    columns: dict[str, list[float]] = defaultdict(list)
    for batch in trainer.accelerator.prepare(loader):
        for name, values in trainer.accelerator.gather_for_metrics(dict(compute(batch))).items():
            columns[name] += values.tolist()
    return concatenate_datasets([dataset, Dataset.from_dict(columns)], axis=1)
