"""Figures of a reference model that are computed once, before training, for each sample of a data set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer


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
