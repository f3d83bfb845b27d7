"""The microbatches of a batch, given out to pipelines."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence


def split_microbatches(times: Sequence[Callable[[int], float]], total: int) -> list[int]:
    """How many of `total` microbatches each pipeline gets, so that the slowest pipeline is fastest.

    One at a time, to the pipeline whose time after it is least. That is optimal for any nondecreasing times: say the
    slowest pipeline k ends with n microbatches and time T. If n is 1, every split takes T or more. Else, when k got its
    n-th, one more would have brought every pipeline to at least T. A split faster than T thus gives nobody more than
    they had then, and k less: it does not get all microbatches out.

    Args:
        times: per pipeline, its time for a step with that many microbatches; nondecreasing.
        total: microbatches of the global batch.

    Raises:
        ValueError: fewer microbatches than pipelines.
    """
    if not times or total < len(times):
        raise ValueError(
            f"{total} microbatches cannot give {len(times)} pipelines at least 1 each: give at least {len(times)}"
        )
    counts = [1] * len(times)
    after_one_more = [(time(2), pipeline) for pipeline, time in enumerate(times)]
    heapq.heapify(after_one_more)
    for _ in range(total - len(times)):
        _, pipeline = after_one_more[0]
        counts[pipeline] += 1
        heapq.heapreplace(after_one_more, (times[pipeline](counts[pipeline] + 1), pipeline))
    return counts
