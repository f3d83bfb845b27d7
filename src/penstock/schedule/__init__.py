"""What runs when: schedules as data, their generation, order of messages, validation, text form. Pure Python.

Simulation and drawing are in `penstock.pictures`; their names are found here too, when they are first used.
"""

import importlib
from typing import Any

__all__ = [
    "AUTO",
    "Action",
    "Costs",
    "EventKind",
    "Kind",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "TimedEvent",
    "build",
    "check_trains",
    "chrome_trace",
    "default_stages_per_rank",
    "divide_over_stages",
    "format_schedule",
    "gantt_svg",
    "load_schedule",
    "lower_bound",
    "parse_schedule",
    "resolve_schedule",
    "schedule_names",
    "simulate",
    "validate",
    "write_timeline",
]

# Public name: the module that defines it.
_HOMES = {
    "Action": "penstock.schedule.actions",
    "Kind": "penstock.schedule.actions",
    "Schedule": "penstock.schedule.actions",
    "AUTO": "penstock.schedule.generators",
    "build": "penstock.schedule.generators",
    "default_stages_per_rank": "penstock.schedule.generators",
    "schedule_names": "penstock.schedule.generators",
    "format_schedule": "penstock.schedule.text",
    "load_schedule": "penstock.schedule.text",
    "parse_schedule": "penstock.schedule.text",
    "resolve_schedule": "penstock.schedule.text",
    "ScheduleError": "penstock.schedule.actions",
    "check_trains": "penstock.schedule.actions",
    "validate": "penstock.schedule.validation",
    "Costs": "penstock.pictures.simulate",
    "EventKind": "penstock.pictures.timeline",
    "Simulation": "penstock.pictures.simulate",
    "TimedEvent": "penstock.pictures.timeline",
    "chrome_trace": "penstock.pictures.timeline",
    "divide_over_stages": "penstock.pictures.simulate",
    "gantt_svg": "penstock.pictures.timeline",
    "lower_bound": "penstock.pictures.simulate",
    "simulate": "penstock.pictures.simulate",
    "write_timeline": "penstock.pictures.timeline",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
