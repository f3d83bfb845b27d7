"""The named schedules that there are, and which of them "auto" means."""

from __future__ import annotations

from typing import Any

# What `initialize` and the plugin settle by the model, see `settle`; where no model is at hand it is 1F1B.
AUTO = "auto"


def settle(name: Any, deferring_pays: bool) -> Any:
    """The schedule to run where a user asked for `name`, or for one written out, with one stage on each rank.

    ZB-H1 has the messages of 1F1B, forwards and backwards in the same order, and holds no more microbatches than its
    first rank. It is faster where weight gradients are worth putting off.
    """
    return ("zb-h1" if deferring_pays else "1f1b") if name == AUTO else name


def predicted_steps(name: str, num_ranks: int, num_microbatches: int) -> float:
    """The time of a step under one of the schedules that "auto" chooses from, over that of a microbatch on a rank, if
    F = B = W and there are as many microbatches as ranks; see `zb_h1` and `zb_v`."""
    return num_microbatches + (num_ranks - 1) * {"1f1b": 1.0, "zb-h1": 1 / 3, "zb-v": 1 / 6}[name]


# How many stages each rank holds.
_STAGES_PER_RANK = {
    "gpipe": 1,
    AUTO: 1,
    "1f1b": 1,
    "zb-h1": 1,
    "zb-h2": 1,
    "interleaved-1f1b": 2,
    "zb-v": 2,
    "v-half": 2,
}


def schedule_names() -> tuple[str, ...]:
    """The schedules that there are. `build` accepts "auto", too."""
    return tuple(name for name in _STAGES_PER_RANK if name != AUTO)


def default_stages_per_rank(name: str) -> int:
    """Stages that each rank holds under `name` unless told otherwise. Raises ValueError for an unknown name."""
    if name not in _STAGES_PER_RANK:
        raise ValueError(f"unknown schedule {name!r}: known are {', '.join(schedule_names())}")
    return _STAGES_PER_RANK[name]
