"""Tensor parallelism: each rank of a stage's group holds a slice of the stage's large weights.

Knows no communication: what the slices need of each other goes through a `Region`, which the runtime gives its
collectives.
"""

from .apply import TensorParallel, give_slices, take_slices
from .plans import TensorParallelPlan, plan_of, register_tensor_parallel_plan
from .region import Collectives, Region
from .slicing import Slicing

__all__ = [
    "Collectives",
    "Region",
    "Slicing",
    "TensorParallel",
    "TensorParallelPlan",
    "give_slices",
    "plan_of",
    "register_tensor_parallel_plan",
    "take_slices",
]
