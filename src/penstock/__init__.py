"""Penstock: pipeline parallelism for Hugging Face models, exact to the unsplit model."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.booster import Booster as Booster
    from penstock.checking.verify import verify as verify
    from penstock.checkpoint.checkpoint_manager import CheckpointManager as CheckpointManager
    from penstock.checkpoint.training_checkpoints import Checkpoint as Checkpoint
    from penstock.checkpoint.training_checkpoints import finish_saving as finish_saving
    from penstock.checkpoint.training_checkpoints import load_checkpoint as load_checkpoint
    from penstock.checkpoint.training_checkpoints import save_checkpoint as save_checkpoint
    from penstock.checkpoint.untrusted import CheckpointError as CheckpointError
    from penstock.config import Configuration as Configuration
    from penstock.config import ConfigurationError as ConfigurationError
    from penstock.elastic.settings import Elastic as Elastic
    from penstock.from_pretrained import from_config as from_config
    from penstock.from_pretrained import from_pretrained as from_pretrained
    from penstock.initialize import initialize as initialize
    from penstock.optimizer import PipelineOptimizer as PipelineOptimizer
    from penstock.pipeline_model import PipelineModel as PipelineModel
    from penstock.pipeline_template import PipelineTemplate as PipelineTemplate
    from penstock.plugin import HeterogeneousParallelPlugin as HeterogeneousParallelPlugin
    from penstock.runtime.failures.board import PipelineFailure as PipelineFailure
    from penstock.tensor_parallel import TensorParallelPlan as TensorParallelPlan
    from penstock.tensor_parallel import register_tensor_parallel_plan as register_tensor_parallel_plan

__version__ = "0.3.0"

# The public names by the module that defines them, which is imported at a name's first use, because `penstock.schedule`
# and the command line shall start without torch and transformers.
_PUBLIC = {
    "booster": ("Booster",),
    "checking.verify": ("verify",),
    "checkpoint.checkpoint_manager": ("CheckpointManager",),
    "checkpoint.training_checkpoints": ("Checkpoint", "finish_saving", "load_checkpoint", "save_checkpoint"),
    "checkpoint.untrusted": ("CheckpointError",),
    "config": ("Configuration", "ConfigurationError"),
    "elastic.settings": ("Elastic",),
    "from_pretrained": ("from_config", "from_pretrained"),
    "initialize": ("initialize",),
    "optimizer": ("PipelineOptimizer",),
    "pipeline_model": ("PipelineModel",),
    "pipeline_template": ("PipelineTemplate",),
    "plugin": ("HeterogeneousParallelPlugin",),
    "runtime.failures.board": ("PipelineFailure",),
    "tensor_parallel": ("TensorParallelPlan", "register_tensor_parallel_plan"),
}
_HOMES = {name: f"penstock.{module}" for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_HOMES)


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
