"""Where the faces find the rooms above the core, and what of it not every run needs: imported when first used."""

from __future__ import annotations

import importlib
from typing import Any

from penstock.layout.layout import Layout

_ROOMS = {
    "HeterogeneousDataLoader": "penstock.data.loader",
    "ReplicaDataLoader": "penstock.data.loader",
    "check_schedule": "penstock.layout.schedules",
    "chosen_stages": "penstock.layout.chosen",
    "split_stages": "penstock.layout.chosen",
    "schedule_maker": "penstock.layout.schedules",
    "announce": "penstock.layout.announce",
    "unit_costs": "penstock.modeling.graph.costs",
    "evaluate": "penstock.runtime.evaluation",
    "copy_of": "penstock.runtime.reforming",
    "for_copy": "penstock.runtime.reforming",
    "own_or_named": "penstock.schedule.text",
    "summary": "penstock.schedule.text",
    "written_schedule": "penstock.schedule.text",
    "auto_pipeline_size": "penstock.planning.auto",
    "auto_pipelines": "penstock.planning.auto",
    "initialize_peft": "penstock.integrations.peft",
    "PipelineDiffusionModel": "penstock.integrations.diffusers",
    "diffusers_loading": "penstock.integrations.diffusers",
    "inputs_without_samples": "penstock.integrations.whole_inputs",
    "mark_packed": "penstock.integrations.packed_layers",
    "num_parameters_of_whole": "penstock.integrations.num_parameters",
    "model_checkpoints": "penstock.checkpoint.model_methods",
    "is_parallelized": "penstock.checkpoint.load",
    "save_by_own_method": "penstock.checkpoint.model_methods",
    "generate": "penstock.generation.generate",
    "evaluate_with_cache": "penstock.generation.generate",
    "TensorParallel": "penstock.tensor_parallel.apply",
    "dividing": "penstock.sharded_optimizer.updates",
    "Recorder": "penstock.pictures.recorder",
    "LayoutDescription": "penstock.pictures.describe",
    "describe_layout": "penstock.pictures.describe",
    "from_live_ranks": "penstock.elastic.moving",
    "check_elastic": "penstock.elastic.configure",
    "configure_elastic": "penstock.elastic.configure",
}


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
