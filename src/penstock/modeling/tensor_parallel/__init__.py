"""Tensor parallelism: each rank of a stage's group holds a shard of the stage's large weights.

Knows no communication: what the shards need of each other goes through a `Region`, which the runtime gives its
collectives.
"""

from penstock.modeling.tensor_parallel.apply import TensorParallel, leave_shards, take_shards
from penstock.modeling.tensor_parallel.plans import TensorParallelPlan, plan_of, register_tensor_parallel_plan
from penstock.modeling.tensor_parallel.region import Collectives, Region
from penstock.modeling.tensor_parallel.shard import Sharding

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
