"""Where the faces find the rooms above the core, and what of it not every run needs: imported when first used."""

from __future__ import annotations

import importlib
from typing import Any

from penstock.layout.layout import Layout

_OFFERED = {
    "data.loader": ("HeterogeneousDataLoader", "ReplicaDataLoader"),
    "layout.schedules": ("check_schedule", "schedule_maker"),
    "layout.chosen": ("chosen_stages", "split_stages"),
    "layout.announce": ("announce",),
    "modeling.graph.costs": ("unit_costs",),
    "runtime.evaluation": ("evaluate",),
    "runtime.reforming": ("copy_of", "for_copy"),
    "schedule.text": ("own_or_named", "summary", "written_schedule"),
    "planning.auto": ("auto_pipeline_size", "auto_pipelines"),
    "integrations.peft": ("initialize_peft",),
    "integrations.diffusers": ("PipelineDiffusionModel", "diffusers_loading"),
    "integrations.whole_inputs": ("inputs_without_samples",),
    "integrations.packed_layers": ("mark_packed",),
    "integrations.num_parameters": ("num_parameters_of_whole",),
    "checkpoint.model_methods": ("model_checkpoints", "save_by_own_method"),
    "checkpoint.load": ("is_parallelized",),
    "generation.generate": ("generate", "evaluate_with_cache"),
    "tensor_parallel.apply": ("TensorParallel",),
    "sharded_optimizer.updates": ("dividing",),
    "pictures.recorder": ("Recorder",),
    "pictures.describe": ("LayoutDescription", "describe_layout"),
    "elastic.moving": ("from_live_ranks",),
    "elastic.configure": ("check_elastic", "configure_elastic"),
}
_ROOMS = {name: f"penstock.{module}" for module, names in _OFFERED.items() for name in names}


def sharding_of(layout: Layout) -> Any:
    """What makes the sharding of a model for a layout; None for one without tensor parallelism."""
    return room("TensorParallel") if layout.tensor_parallel_size > 1 else None


def owners_of(copies: int) -> Any:
    """What divides the updates of parameters among so many of their holders; None for 0: all make them."""
    return room("dividing")(copies) if copies else None


def room(name: str) -> Any:
    """What a room offers to the faces under a name of the table; a module of the room, if it has nothing so named."""
    module = importlib.import_module(_ROOMS[name])
    return getattr(module, name, module)
