"""Tensor parallelism: each rank of a stage's group holds a shard of the stage's large weights.

What the shards need of each other goes through a `Region`.
"""

from penstock.modeling.weights.whole import Sharding, leave_shards, take_shards
from penstock.tensor_parallel.apply import TensorParallel
from penstock.tensor_parallel.plans import TensorParallelPlan, plan_of, register_tensor_parallel_plan
from penstock.tensor_parallel.region import Collectives, Region

__all__ = [
    "Collectives",
    "Region",
    "Sharding",
    "TensorParallel",
    "TensorParallelPlan",
    "leave_shards",
    "plan_of",
    "register_tensor_parallel_plan",
    "take_shards",
]
