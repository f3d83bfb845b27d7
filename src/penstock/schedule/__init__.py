"""What runs when: schedules as data, their generation, order of messages, validation, text form. Pure Python.

Simulation and drawing are in `penstock.simulation`; their names are found here too, when they are first used.
"""

import importlib
from typing import Any

# Public names by the module that defines them.
_PUBLIC = {
    "penstock.schedule.actions": ("Action", "Kind", "Schedule", "ScheduleError", "check_trains"),
    "penstock.schedule.registry": (
        "AUTO",
        "NamedSchedule",
        "build",
        "default_stages_per_rank",
        "live_microbatches",
        "named_schedule",
        "register_schedule",
        "schedule_names",
    ),
    "penstock.schedule.text": ("format_schedule", "load_schedule", "parse_schedule", "resolve_schedule"),
    "penstock.schedule.validation": ("validate",),
    "penstock.simulation.simulate": ("Costs", "Simulation", "divide_over_stages", "lower_bound", "simulate"),
    "penstock.simulation.timeline": ("EventKind", "TimedEvent", "chrome_trace", "gantt_svg", "write_timeline"),
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
