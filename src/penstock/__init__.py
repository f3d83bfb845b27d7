"""Penstock: pipeline parallelism for Hugging Face models, exact to the unsplit model."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.api.booster import Booster as Booster
    from penstock.api.from_pretrained import from_config as from_config
    from penstock.api.from_pretrained import from_pretrained as from_pretrained
    from penstock.api.initialize import initialize as initialize
    from penstock.api.plugin import HeterogeneousParallelPlugin as HeterogeneousParallelPlugin
    from penstock.checking.verify import verify as verify
    from penstock.checkpoint.checkpoint_manager import CheckpointManager as CheckpointManager
    from penstock.checkpoint.training_checkpoints import Checkpoint as Checkpoint
    from penstock.checkpoint.training_checkpoints import finish_saving as finish_saving
    from penstock.checkpoint.training_checkpoints import load_checkpoint as load_checkpoint
    from penstock.checkpoint.training_checkpoints import save_checkpoint as save_checkpoint
    from penstock.checkpoint.untrusted import CheckpointError as CheckpointError
    from penstock.config.configuration import Configuration as Configuration
    from penstock.config.configuration import ConfigurationError as ConfigurationError
    from penstock.config.elastic import Elastic as Elastic
    from penstock.model.pipeline_model import PipelineModel as PipelineModel
    from penstock.modeling.pipeline_template import PipelineTemplate as PipelineTemplate
    from penstock.quantisation.packed_experts import PackedExpertsConfig as PackedExpertsConfig
    from penstock.runtime.failures.board import PipelineFailure as PipelineFailure
    from penstock.runtime.optimizer import PipelineOptimizer as PipelineOptimizer
    from penstock.tensor_parallel import TensorParallelPlan as TensorParallelPlan
    from penstock.tensor_parallel import register_tensor_parallel_plan as register_tensor_parallel_plan

from penstock.moved import MovedModules

__version__ = "0.4.0"
sys.meta_path.insert(0, MovedModules())

# The public names by the module that defines them, which is imported at a name's first use, because `penstock.schedule`
# and the command line shall start without torch and transformers.
_PUBLIC = {
    "api.booster": ("Booster",),
    "api.from_pretrained": ("from_config", "from_pretrained"),
    "api.initialize": ("initialize",),
    "api.plugin": ("HeterogeneousParallelPlugin",),
    "checking.verify": ("verify",),
    "checkpoint.checkpoint_manager": ("CheckpointManager",),
    "checkpoint.training_checkpoints": ("Checkpoint", "finish_saving", "load_checkpoint", "save_checkpoint"),
    "checkpoint.untrusted": ("CheckpointError",),
    "config.configuration": ("Configuration", "ConfigurationError"),
    "config.elastic": ("Elastic",),
    "model.pipeline_model": ("PipelineModel",),
    "modeling.pipeline_template": ("PipelineTemplate",),
    "quantisation.packed_experts": ("PackedExpertsConfig",),
    "runtime.failures.board": ("PipelineFailure",),
    "runtime.optimizer": ("PipelineOptimizer",),
    "tensor_parallel": ("TensorParallelPlan", "register_tensor_parallel_plan"),
}
_HOMES = {name: f"penstock.{module}" for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
