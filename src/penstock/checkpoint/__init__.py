"""Saving and loading models, and the training around them, from all ranks of any layout."""

from .adapters import AdapterFolder
from .comm import Comm, GroupComm, OnceLost, SoloComm
from .load import from_parallelized, is_parallelized, load_ordinary
from .save import TRAINING_VARIANT, SavingRank, save_adapter, save_parallelized, save_training_state
from .training_state import TrainingState, load_object, load_training_state, restore_object, save_object
from .untrusted import CheckpointError

__all__ = [
    "TRAINING_VARIANT",
    "AdapterFolder",
    "CheckpointError",
    "Comm",
    "GroupComm",
    "OnceLost",
    "SavingRank",
    "SoloComm",
    "TrainingState",
    "from_parallelized",
    "is_parallelized",
    "load_object",
    "load_ordinary",
    "load_training_state",
    "restore_object",
    "save_adapter",
    "save_object",
    "save_parallelized",
    "save_training_state",
]
