"""Tensor parallelism: each rank of a stage's group holds a shard of the stage's large weights.

What the shards need of each other goes through a `Region`.
"""

from penstock.tensor_parallel.plans import TensorParallelPlan, register_tensor_parallel_plan

__all__ = ["TensorParallelPlan", "register_tensor_parallel_plan"]
