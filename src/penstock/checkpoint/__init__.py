"""Saving and loading models, and the training around them, from all ranks of any layout."""

from .adapters import AdapterFolder
from .background import HostMemory, PendingSave
from .comm import CheckpointRanks
from .folder import find_checkpoints, remove_older, step_folder
from .load import WeightsLoad, from_parallelized, is_parallelized
from .ordinary import load_ordinary
from .plain_objects import load_object, restore_object, save_object, state_of
from .plan import SavingRank
from .rank_files import TRAINING_VARIANT
from .save import save_checkpoint, save_parallelized
from .training_state import Run, TrainingState, TrainingStateLoad, load_training_state
from .untrusted import CheckpointError

__all__ = [
    "TRAINING_VARIANT",
    "AdapterFolder",
    "CheckpointError",
    "CheckpointRanks",
    "HostMemory",
    "PendingSave",
    "Run",
    "SavingRank",
    "TrainingState",
    "TrainingStateLoad",
    "WeightsLoad",
    "find_checkpoints",
    "from_parallelized",
    "is_parallelized",
    "load_object",
    "load_ordinary",
    "load_training_state",
    "remove_older",
    "restore_object",
    "save_checkpoint",
    "save_object",
    "save_parallelized",
    "state_of",
    "step_folder",
]
