"""What a model costs, unit by unit, measured or estimated: the planner's input, kept as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

from penstock.layout.partition import split_into
from penstock.layout.template import end_modules
from penstock.planning.cluster import Link
from penstock.planning.memory import HeldBytes

FORMAT = "penstock profile 1"


@dataclass(frozen=True)
class UnitCost(HeldBytes):
    """One unit and one microbatch: its seconds on the device that the profile is of, and what it holds."""

    name: str
    forward: float
    backward: float
    weight: float  # of the backward's gradients, those that can be put off
    kept_checkpointed: float = 0.0  # as `kept` with gradient checkpointing: a block's input; `kept` if not recomputed
    crossing: float = 0.0  # bytes that the next stage receives if this unit is a stage's last
    joined: bool = False  # no stage may end with this unit
    sizes: tuple[float, ...] = ()  # bytes of each trained parameter; `gradients` together
    # Seconds of messages within the forward and the backward, which take as long on a faster device; see
    # `share_sequences`.
    forward_messages: float = 0.0
    backward_messages: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(sums([self]))

    def checkpointed(self) -> UnitCost:
        """With gradient checkpointing: the backward runs the forward again, and its activations exist only then."""
        extra = self.kept - self.kept_checkpointed
        if extra <= 0:
            return self
        return replace(
            self, backward=self.backward + self.forward,
            backward_messages=self.backward_messages + self.forward_messages,
            kept=self.kept_checkpointed, working=self.working + extra,
            deferred=self.kept if self.deferred is None else self.deferred,
            splitting=None if self.splitting is None else self.splitting + extra, forwarding=None,
        )  # fmt: skip


@dataclass(frozen=True)
class Profile:
    model: str  # its name
    units: tuple[UnitCost, ...]  # in forward order
    measured: bool = False  # else the seconds are estimated from operations and bytes
    about: Mapping[str, str | int | float] = field(default_factory=dict)  # microbatch size, length, dtype, device, ...
    inside: Link | None = None  # these were measured
    between: Link | None = None

    def __post_init__(self) -> None:
        if not self.units:
            raise ValueError("a profile needs at least 1 unit")
        for unit in self.units:
            numbers = [getattr(unit, part.name) for part in fields(UnitCost) if part.type == "float"]
            if not all(isinstance(number, int | float) and 0 <= number < math.inf for number in numbers):
                raise ValueError(f"the profile of {self.model} has a number that is negative or not finite: {unit}")

    @property
    def measured_on(self) -> str | None:
        """The device that it was measured on, by the name that its driver gives; None if it was estimated."""
        return str(self.about.get("card", self.about.get("device", "a device"))) if self.measured else None

    @cached_property
    def parts(self) -> tuple[tuple[UnitCost, ...], ...]:
        """The units, as one part those at an end of the model, and those without a boundary between them."""
        return self._joined(self.units)

    @cached_property
    def recomputed_parts(self) -> tuple[tuple[UnitCost, ...], ...]:
        """As `parts`, with gradient checkpointing."""
        return self._joined([unit.checkpointed() for unit in self.units])

    @staticmethod
    def _joined(units: Sequence[UnitCost]) -> tuple[tuple[UnitCost, ...], ...]:
        first, last = end_modules([unit.name for unit in units])
        parts: list[tuple[UnitCost, ...]] = []
        for index, unit in enumerate(units):
            at_an_end = 0 < index < len(first) or index > len(units) - len(last) > 0
            if parts and (at_an_end or units[index - 1].joined):
                parts[-1] = (*parts[-1], unit)
            else:
                parts.append((unit,))
        return tuple(parts)

    def write(self, path: str | Path) -> Path:
        path = Path(path)
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str | Path) -> Profile:
        """Raises ValueError if the file is none."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT:
                raise ValueError("another format")
            units = tuple(
                UnitCost(
                    **unit | {"sizes": tuple(unit.get("sizes", ())), "tied": tuple(map(tuple, unit.get("tied", ())))}
                )
                for unit in content.pop("units")
            )
            inside, between = (Link(**link) if (link := content.pop(name)) else None for name in ("inside", "between"))
            return cls(units=units, inside=inside, between=between, **content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no profile that `penstock profile` wrote: {error}") from error


def stages_of(parts: Sequence[Sequence[UnitCost]], sizes: Sequence[int]) -> tuple[tuple[UnitCost, ...], ...]:
    return tuple(tuple(chain.from_iterable(run)) for run in split_into(parts, sizes))


def sums(units: Sequence[UnitCost], speed: float = 1.0) -> tuple[float, float, float]:
    """The seconds of a microbatch in F, B and W of some units together, on a device of this speed."""
    forward, backward = sum(u.forward_messages for u in units), sum(u.backward_messages for u in units)
    return (
        sum(u.forward for u in units) / speed + forward,
        sum(u.backward for u in units) / speed + backward,
        sum(u.weight for u in units) / speed,
    )


def seconds_of(stages: Iterable[Sequence[UnitCost]], speed: float = 1.0) -> list[float]:
    """The seconds that a microbatch takes in F, B and W, for each stage or part."""
    return [sum(sums(units, speed)) for units in stages]


# Of a stage's step in a pipeline, bytes that no unit counts: losses, positions and the like.
SMALL_VALUES = 4096.0


def held_by_stages(stages: Sequence[Sequence[UnitCost]]) -> list[HeldBytes]:
    """What the units of each stage hold together, and its output for each microbatch until the gradient comes back."""
    held_by_stage = []
    received = 0.0
    for number, units in enumerate(stages):
        held, sent = HeldBytes.summed(units), units[-1].crossing if number < len(stages) - 1 else 0.0
        # What was received is held, though its first unit may not keep it.
        small = SMALL_VALUES if received or sent else 0.0
        kept, working = max(held.kept, received) + sent, held.working + small
        splitting, forwarding = (None if size is None else size + small for size in (held.splitting, held.forwarding))
        stage = replace(held, kept=kept, working=working, splitting=splitting, forwarding=forwarding)
        held_by_stage.append(replace(stage, received=received, sent=sent))
        received = sent
    return held_by_stage
