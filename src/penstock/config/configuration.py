"""The schema of `initialize()`'s configuration: a dict, or the path of a JSON file that holds one."""

from __future__ import annotations

import datetime
import difflib
import json
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from penstock.runtime.failures.position import PATIENCE_SECONDS
from penstock.schedule.registry import AUTO, schedule_names

SECTION = "model_parallelism"
# Keys that had other names until release 0.4.
RENAMED = {"micro_batch_size": "microbatch_size"}


class ConfigurationError(ValueError):
    """A configuration that cannot be used. An error about a value names its key, the value and the possible ones."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What `initialize()` was asked for, checked. The fields are the keys of the section "model_parallelism".

    Attributes:
        enable: False leaves the model as it is.
        pipeline_parallel_size: ranks in a pipeline, at least 1, or "auto": as many as the planner predicts to be
            fastest; see docs/planning.md. A number is checked against the number of ranks and of the
            model's units where those are known.
        tensor_parallel_size: ranks that share a stage, each with a slice of its weights; it must divide the model's
            attention heads, layer widths and vocabulary.
        context_parallel_size: pipelines that share every sequence, each with a part of its tokens; see
            docs/long_context.md.
        microbatch_size: samples in a microbatch, or None.
        num_microbatches: microbatches in a batch, or None: as many as a schedule of your own is written for, otherwise
            4 for each rank, or one for each sample if these are fewer. At most one of the two may be given.
        batch_dim: for inputs whose samples are not along the first dimension, by name, the dimension that has them, or
            None for an input without samples, which goes whole to every microbatch.
        loss_chunk_tokens: in training the head and the loss of a language model run over so many tokens at a time, and
            again in the backward, so that logits of more never exist; None for all tokens at once.
        schedule: "auto", which puts weight gradients off where that pays (see docs/schedules.md), another name that
            `penstock.schedule.build` knows, or a schedule of your own: the path of a .csv file, or a list of rows, one
            for each rank, such as "0F0,0B0"; see `penstock.schedule.text`.
        stages: for each stage the names of its units, or None to balance them by cost. A module that holds several
            units stands for all of them.
        split_points: instead of `stages`: the units with which the second, the third, ... stage begins.
        sharded_optimizer: the state of the optimizer is divided among the ranks that hold the same parameters. That of
            each parameter is kept by one of them, or by so many if this is a number, which sends the others the new
            weight; see docs/memory.md.
        patience: seconds that a rank waits for others before it logs what it waits for and where the others are, and
            ends the run if they have made different calls, so that the wait can never end.
        timeout: seconds that a transfer between ranks may take before it is an error on every rank; None for that of
            torch's default process group.
        trace: file for the timeline of the latest step, or None. It ends in .svg (a chart) or .json (for
            ui.perfetto.dev).
        trace_steps: the first and the last training step, counted from 0, that the timeline covers in place of the
            latest one; no others are recorded.

    Raises:
        ConfigurationError: a value of the wrong type or outside its range.
    """

    enable: bool = True
    pipeline_parallel_size: int | Literal["auto"] = 1
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    microbatch_size: int | None = None
    num_microbatches: int | None = None
    schedule: str | Sequence[str] = AUTO
    batch_dim: Mapping[str, int | None] | None = None
    loss_chunk_tokens: int | None = None
    stages: Sequence[Sequence[str]] | None = None
    split_points: Sequence[str] | None = None
    sharded_optimizer: bool | int = False
    patience: float = PATIENCE_SECONDS
    timeout: float | None = None
    trace: str | None = None
    trace_steps: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for key in ("schedule", "trace"):
            if isinstance(path := getattr(self, key), os.PathLike):
                object.__setattr__(self, key, os.fspath(path))
        for key in _ALLOWED:
            check_value(key, getattr(self, key), f"{SECTION}.")
            object.__setattr__(self, key, _plain(getattr(self, key)))
        object.__setattr__(self, "schedule", _plain(self.schedule))
        known = (*schedule_names(), AUTO)
        if not _is_own_schedule(self.schedule) and self.schedule not in known:
            names = ", ".join(f'"{name}"' for name in known)
            hint = _did_you_mean(self.schedule, known)
            raise _wrong(f"{SECTION}.schedule", self.schedule, f"one of {names}, a .csv file or rows", hint)
        if self.microbatch_size is not None and self.num_microbatches is not None:
            raise ConfigurationError(
                f"{SECTION}.microbatch_size ({self.microbatch_size}) and {SECTION}.num_microbatches "
                f"({self.num_microbatches}) say the same thing in two ways: give only one of them"
            )
        if self.stages is not None and self.split_points is not None:
            raise ConfigurationError(f"{SECTION}.stages and {SECTION}.split_points say the same thing: give only one")
        if self.pipeline_parallel_size == "auto" and (self.stages or self.split_points):
            key = "stages" if self.stages else "split_points"
            raise ConfigurationError(
                f'{SECTION}.{key} needs a number of stages, but {SECTION}.pipeline_parallel_size is "auto"'
            )
        size_key = f"{SECTION}.tensor_parallel_size"
        check_whole_head(f"{SECTION}.loss_chunk_tokens", self.loss_chunk_tokens, size_key, self.tensor_parallel_size)
        if self.trace_steps is not None and self.trace is None:
            raise ConfigurationError(f"{SECTION}.trace_steps needs {SECTION}.trace, the file for the timeline")

    @property
    def micro_batch_size(self) -> int | None:
        """`microbatch_size`, under its old name."""
        _warn_of_old_name("micro_batch_size")
        return self.microbatch_size

    @property
    def time_limit(self) -> datetime.timedelta | None:
        """`timeout` as a timedelta, or None."""
        return None if self.timeout is None else datetime.timedelta(seconds=self.timeout)

    @classmethod
    def from_any(
        cls, config: Configuration | Mapping[str, Any] | str | os.PathLike[str] | None = None, **keys: Any
    ) -> Configuration:
        """The configuration in a dict, in a JSON file (whole-line `//` comments are allowed), or already read.

        A dict, or a file, holds the section "model_parallelism", or is that section.

        Args:
            keys: further keys of the section; None stands for one that is not given.

        Raises:
            ConfigurationError: there is no such file, it is not JSON, a key is unknown, missing or given twice, or
                a value is impossible. The message begins with the file's name if there is one.
            TypeError: `config` is none of these.
        """
        keys = {name: value for name, value in keys.items() if value is not None}
        if isinstance(config, Configuration):
            if not keys:
                return config
            required = "pipeline_parallel_size"
            given = vars(config).items()
            config = {name: value for name, value in given if name == required or value != getattr(cls, name)}
        if isinstance(config, Mapping) or (config is None and keys):
            return cls._from_mapping(config or {}, keys)
        if isinstance(config, str | os.PathLike):
            path = Path(config)
            try:
                return cls._from_mapping(_read_json(path), keys)
            except ConfigurationError as error:
                raise ConfigurationError(f"{path}: {error}") from error.__cause__
        instead = ": give one, or keys such as pipeline_parallel_size=2" * (config is None)
        raise TypeError(f"config must be a dict or the path of a JSON file, got {type(config).__name__}{instead}")

    @classmethod
    def _from_mapping(cls, config: Mapping[str, Any], keys: Mapping[str, Any]) -> Configuration:
        known = [field.name for field in fields(cls)]
        config = _renamed(config)
        _check_keys(config, (SECTION, *known), "the configuration")
        section = config.get(SECTION, config)
        if not isinstance(section, Mapping):
            raise ConfigurationError(f"{SECTION} must be a dict, got {section!r} ({type(section).__name__})")
        if section is not config and len(config) > 1:
            beside = next(name for name in config if name != SECTION)
            raise ConfigurationError(f"key {beside!r} stands beside {SECTION}: put it inside, with the other keys")
        section, keys = _renamed(section), _renamed(keys)
        _check_keys(section, known, SECTION)
        _check_keys(keys, known, "the arguments")
        if twice := [name for name in keys if name in section]:
            raise ConfigurationError(f"{twice[0]} is given as an argument and as {SECTION}.{twice[0]}: give it once")
        section = {**section, **keys}
        configuration = cls(**section)
        if configuration.enable and "pipeline_parallel_size" not in section:
            raise ConfigurationError(
                f"{SECTION}.pipeline_parallel_size is missing: give the number of ranks in a pipeline"
            )
        return configuration


def check_value(key: str, value: Any, section: str = "") -> None:
    """Raise ConfigurationError unless a key of the configuration, other than the schedule, may have this value."""
    is_allowed, expected = _ALLOWED[key]
    # What is null by default may be null.
    if not (value is None and getattr(Configuration, key) is None) and not is_allowed(value):
        raise _wrong(f"{section}{key}", value, expected)


def check_whole_head(key: str, loss_chunk_tokens: int | None, size_key: str, size: int) -> None:
    """Raise ConfigurationError for a loss in chunks of a head that tensor parallelism shards."""
    if loss_chunk_tokens is not None and size > 1:
        raise ConfigurationError(
            f"{key} is for whole heads, and {size_key} {size} shards them, and the loss: leave one of the two out"
        )


def take_keys(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that are keys of the configuration; they are taken out."""
    keys = (*(field.name for field in fields(Configuration)), *RENAMED)
    return {key: arguments.pop(key) for key in keys if key in arguments}


def _renamed(section: Mapping[str, Any]) -> dict[str, Any]:
    """A section with the keys of today."""
    for old in RENAMED.keys() & section.keys():
        _warn_of_old_name(old)
        if RENAMED[old] in section:
            raise ConfigurationError(f"{old} is the old name of {RENAMED[old]}, which is given too: leave it out")
    return {RENAMED.get(key, key): value for key, value in section.items()}


def _warn_of_old_name(old: str) -> None:
    # A DeprecationWarning is shown for a line of the user's script only, and a key may stand in a file.
    warnings.warn(f"{old} is {RENAMED[old]} since 0.4: write that", FutureWarning, stacklevel=3)


def _is_integer(value: object) -> bool:
    return type(value) is not bool and isinstance(value, Integral)


def _is_positive_integer(value: Any) -> bool:
    return _is_integer(value) and value > 0


# Seconds: some thirty years, which torch and gloo can count.
LONGEST = 1e9


def _is_positive_number(value: Any) -> bool:
    if type(value) is bool or not isinstance(value, Real):
        return False
    try:
        return 0 < float(value) <= LONGEST
    except OverflowError:
        return False


def _is_range(value: object) -> bool:
    return isinstance(value, list | tuple) and [*map(_is_integer, value)] == [True, True] and 0 <= value[0] <= value[1]


def _are_names(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(name, str) for name in value)


def _are_dims(value: object) -> bool:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    return all(dim is None or (_is_integer(dim) and dim >= 0) for dim in value.values())


def _plain(value: Any) -> Any:
    """Lists as tuples, and numpy's numbers as Python's, as a JSON file takes no others."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if _is_integer(value):
        return int(value)
    return float(value) if type(value) is not bool and isinstance(value, Real) else value


# What a value must be, and how an error says this, for each key but the schedule.
_ALLOWED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "enable": (lambda value: isinstance(value, bool), "true or false"),
    "pipeline_parallel_size": (
        lambda value: _is_positive_integer(value) or value == "auto",
        'a positive integer or "auto"',
    ),
    "tensor_parallel_size": (_is_positive_integer, "a positive integer"),
    "context_parallel_size": (_is_positive_integer, "a positive integer"),
    "microbatch_size": (_is_positive_integer, "a positive integer or null"),
    "num_microbatches": (_is_positive_integer, "a positive integer or null"),
    "batch_dim": (_are_dims, "a dict with a dimension, counted from 0, or null for each input that it names"),
    "loss_chunk_tokens": (_is_positive_integer, "a positive integer or null"),
    "stages": (
        lambda value: isinstance(value, list | tuple) and len(value) > 0 and all(map(_are_names, value)),
        "a list with a list of names for each stage, none of them empty",
    ),
    "split_points": (_are_names, "a list of names, not empty"),
    "sharded_optimizer": (
        lambda value: isinstance(value, bool) or _is_positive_integer(value),
        "true, false or the number of ranks that keep each state",
    ),
    "patience": (_is_positive_number, "a positive number of seconds"),
    "timeout": (_is_positive_number, "a positive number of seconds, or null"),
    "trace": (
        lambda value: isinstance(value, str) and value.endswith((".svg", ".json")),
        "the path of an .svg or .json file, or null",
    ),
    "trace_steps": (_is_range, "the first and the last step, such as [10, 12], or null"),
}


def _is_own_schedule(schedule: object) -> bool:
    """Whether this may be a schedule that the user wrote; its content is checked where the number of ranks is known."""
    if isinstance(schedule, list | tuple):
        return bool(schedule) and all(isinstance(row, str) or _are_names(row) for row in schedule)
    return isinstance(schedule, str) and schedule.endswith(".csv")


def _wrong(key: str, value: object, expected: str, hint: str = "") -> ConfigurationError:
    return ConfigurationError(f"{key} must be {expected}, got {value!r} ({type(value).__name__}){hint}")


def _did_you_mean(word: object, known: Collection[str]) -> str:
    close = difflib.get_close_matches(str(word).lower(), known, n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""


def _check_keys(mapping: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for key in mapping:
        if key not in known:
            names = ", ".join(known)
            raise ConfigurationError(f"unknown key {key!r} in {where}: known are {names}{_did_you_mean(key, known)}")


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigurationError(f"cannot read the configuration file: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"the configuration file is not UTF-8 text: {error}") from error
    # A JSON string never spans lines, so a line that begins with // is a comment. It stays as an empty line, so that
    # the line numbers in error messages are those of the file.
    lines = ["" if line.lstrip().startswith("//") else line for line in text.splitlines()]
    try:
        config = json.loads("\n".join(lines), object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"the configuration must be a JSON object, got {type(config).__name__}")
    return config


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigurationError(f"key {key!r} is given {keys.count(key)} times")
    return dict(pairs)
