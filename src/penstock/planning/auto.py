"""The planner's choice for the run's ranks: `pipelines="auto"` and `"pipeline_parallel_size": "auto"`."""

from __future__ import annotations

import math
import os
from dataclasses import replace

from transformers import PreTrainedModel

from penstock.modeling.pipeline_template import PipelineTemplate
from penstock.planning.cluster import USUAL_INSIDE, Cluster, DeviceClass
from penstock.planning.context_parallel import share_sequences
from penstock.planning.plan import Job
from penstock.planning.planner import Infeasible, equal_pipelines, explain, make_plans, with_equal_pipelines
from penstock.planning.profile import Profile
from penstock.planning.profiling import profile_model

# A step has so many microbatches on each pipeline where nobody says how many.
DEFAULT_MICROBATCHES = 8


def auto_pipelines(
    model: PreTrainedModel,
    num_devices: int,
    num_microbatches: int,
    microbatch_size: int,
    schedule: str,
    memory: float | None = None,
    profile: str | os.PathLike[str] | None = None,
    copies: int = 1,
    loss_chunk_tokens: int | None = None,
    context_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
) -> tuple[list[PipelineTemplate], list[int]]:
    """Templates of the best pipelines that use all of `num_devices` equal devices, and their microbatches.

    Args:
        num_devices: processes, or groups of `tensor_parallel_size` processes, each of which a plan takes for one.
        memory: bytes of each device that the run may use; None is no limit.
        profile: the file that says what the units cost; None estimates it.
        loss_chunk_tokens, context_parallel_size, tensor_parallel_size: as in the configuration.
    """
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int):
        raise TypeError(
            'with pipelines "auto" num_microbatches is the number of microbatches over all pipelines, got '
            f"{num_microbatches!r}"
        )
    profiled = (
        profile_model(model, microbatch_size, loss_chunk_tokens=loss_chunk_tokens)
        if profile is None
        else Profile.read(os.fspath(profile))
    )
    whole_sequences = _job(profiled, num_devices, num_microbatches, schedule, memory, copies)
    job = _in_parts(whole_sequences, context_parallel_size, tensor_parallel_size)
    plans, _ = with_equal_pipelines(make_plans(job, 16), job)
    best = next((plan for plan in plans if len(plan.devices) == job.cluster.size), None)
    if best is None:
        raise Infeasible(
            f"no plan uses all {num_devices * tensor_parallel_size} processes: the best uses "
            f"{len(plans[0].devices) * context_parallel_size * tensor_parallel_size}; start as many, or ask for more "
            "microbatches"
        )
    name = type(model).__name__
    templates = [PipelineTemplate(name, pipeline.stage_names) for pipeline in best.pipelines]
    return templates, [pipeline.schedule.num_microbatches for pipeline in best.pipelines]


def auto_pipeline_size(
    model: PreTrainedModel,
    num_devices: int,
    num_microbatches: int | None,
    microbatch_size: int,
    schedule: str,
    memory: float | None = None,
    loss_chunk_tokens: int | None = None,
    context_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
) -> int:
    """The number of ranks of equal pipelines with which a sample takes least: a divisor of `num_devices`, or of as many
    groups as these make if they share sequences. See `auto_pipelines` for the arguments."""
    each = num_microbatches or DEFAULT_MICROBATCHES
    profile = profile_model(model, microbatch_size, loss_chunk_tokens=loss_chunk_tokens)
    whole_sequences = _job(profile, num_devices, each, schedule, memory, 1)
    job = _in_parts(whole_sequences, context_parallel_size, tensor_parallel_size)
    best, size, num_groups = math.inf, 0, job.cluster.size
    for ranks in (divisor for divisor in range(1, num_groups + 1) if num_groups % divisor == 0):
        pipelines = num_groups // ranks
        plan = equal_pipelines(replace(job, num_microbatches=each * pipelines, copies=pipelines), schedule, ranks)
        if plan is not None and plan.seconds / pipelines < best:
            best, size = plan.seconds / pipelines, ranks
    if not size:
        raise explain(job)
    return size


def _in_parts(whole_sequences: Job, context_parallel_size: int, tensor_parallel_size: int) -> Job:
    job = share_sequences(whole_sequences, context_parallel_size)
    if job is None:
        multiple = context_parallel_size * tensor_parallel_size
        of_tensors = "" if tensor_parallel_size == 1 else f" times tensor_parallel_size {tensor_parallel_size}"
        raise Infeasible(
            f"no plan: {whole_sequences.cluster.size * tensor_parallel_size} processes are no multiple of "
            f"context_parallel_size {context_parallel_size}{of_tensors}: start a multiple of {multiple}"
        )
    return job


def _job(
    profile: Profile, num_devices: int, num_microbatches: int, schedule: str, memory: float | None, copies: int
) -> Job:
    devices = DeviceClass("device", num_devices, memory=math.inf if memory is None else memory)
    cluster = Cluster((devices,), inside=profile.inside or USUAL_INSIDE)
    return Job(profile, cluster, num_microbatches, copies, schedules=(schedule,))
