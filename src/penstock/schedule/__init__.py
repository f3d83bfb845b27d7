"""What runs when: schedules as data, their generation, validation, simulation and drawing. Pure Python."""

from penstock.schedule.actions import Action, Kind, Schedule
from penstock.schedule.bounds import lower_bound
from penstock.schedule.costs import Costs, divide_over_stages
from penstock.schedule.events import EventKind, TimedEvent
from penstock.schedule.gantt import gantt_svg
from penstock.schedule.generators import DEFAULT_SCHEDULE, build, default_stages_per_rank, schedule_names
from penstock.schedule.simulate import Simulation, simulate
from penstock.schedule.text import format_schedule, load_schedule, parse_schedule, resolve_schedule
from penstock.schedule.timeline import chrome_trace, write_timeline
from penstock.schedule.validate import ScheduleError, check_trains, validate

__all__ = [
    "DEFAULT_SCHEDULE",
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
