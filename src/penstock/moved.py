"""Modules that had other names until release 0.4: they are found under the old one too, with a warning, until 0.5."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_NAMES = {
    "booster": "api.booster",
    "elastic.settings": "config.elastic",
    "optimizer": "runtime.optimizer",
    "pictures": "simulation",
    "pictures.describe": "simulation.describe",
    "pictures.simulate": "simulation.simulate",
    "pictures.timeline": "simulation.timeline",
    "pipeline_model": "model.pipeline_model",
    "pipeline_template": "modeling.pipeline_template",
    "plugin": "api.plugin",
}
PLACES = {f"penstock.{old}": f"penstock.{new}" for old, new in _NAMES.items()}


class MovedModules(MetaPathFinder, Loader):
    """Gives the module of today for an old name. Stands first among the finders: others would find what is in a package
    of an old name a second time."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in PLACES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        place = PLACES[spec.name]
        warnings.warn(f"{spec.name} is {place} since 0.4: import that", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(place)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run under its own name. The import system has put the old name's specification on it."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
