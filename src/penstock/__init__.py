"""Penstock: pipeline parallelism for Hugging Face models, exact to the unsplit model."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.booster import Booster
    from penstock.checking.verify import verify
    from penstock.checkpoint.checkpoint_manager import CheckpointManager
    from penstock.checkpoint.training_checkpoints import Checkpoint, finish_saving, load_checkpoint, save_checkpoint
    from penstock.checkpoint.untrusted import CheckpointError
    from penstock.config import Configuration, ConfigurationError
    from penstock.elastic.settings import Elastic
    from penstock.from_pretrained import from_config, from_pretrained
    from penstock.initialize import initialize
    from penstock.optimizer import PipelineOptimizer
    from penstock.pipeline_model import PipelineModel
    from penstock.pipeline_template import PipelineTemplate
    from penstock.plugin import HeterogeneousParallelPlugin
    from penstock.runtime.failures.board import PipelineFailure
    from penstock.tensor_parallel import TensorParallelPlan, register_tensor_parallel_plan

__version__ = "0.1.0"

__all__ = [
    "Booster",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "Configuration",
    "ConfigurationError",
    "Elastic",
    "HeterogeneousParallelPlugin",
    "PipelineFailure",
    "PipelineModel",
    "PipelineOptimizer",
    "PipelineTemplate",
    "TensorParallelPlan",
    "finish_saving",
    "from_config",
    "from_pretrained",
    "initialize",
    "load_checkpoint",
    "register_tensor_parallel_plan",
    "save_checkpoint",
    "verify",
]

# Public name: the module that defines it, imported at the name's first use, because `penstock.schedule` and the command
# line shall start without torch and transformers.
_HOMES = {
    "Booster": "penstock.booster",
    "Checkpoint": "penstock.checkpoint.training_checkpoints",
    "CheckpointError": "penstock.checkpoint.untrusted",
    "CheckpointManager": "penstock.checkpoint.checkpoint_manager",
    "Configuration": "penstock.config",
    "ConfigurationError": "penstock.config",
    "Elastic": "penstock.elastic.settings",
    "HeterogeneousParallelPlugin": "penstock.plugin",
    "PipelineFailure": "penstock.runtime.failures.board",
    "PipelineModel": "penstock.pipeline_model",
    "PipelineOptimizer": "penstock.optimizer",
    "PipelineTemplate": "penstock.pipeline_template",
    "TensorParallelPlan": "penstock.tensor_parallel",
    "finish_saving": "penstock.checkpoint.training_checkpoints",
    "from_config": "penstock.from_pretrained",
    "from_pretrained": "penstock.from_pretrained",
    "initialize": "penstock.initialize",
    "load_checkpoint": "penstock.checkpoint.training_checkpoints",
    "register_tensor_parallel_plan": "penstock.tensor_parallel",
    "save_checkpoint": "penstock.checkpoint.training_checkpoints",
    "verify": "penstock.checking.verify",
}


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets a submodule on its package: `penstock.initialize` shall stay the function.
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})

    def __reduce__(self) -> tuple[Any, ...]:
        # As modules are pickled by those who send functions to other processes, such as Ray.
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
