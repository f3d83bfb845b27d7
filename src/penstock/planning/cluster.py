"""The devices of a run: their classes, the nodes they sit in, and the links between them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property

from penstock.planning.memory import parse_bytes
from penstock.runtime.comm.devices import USABLE

# The search takes memory and time for each device.
MAX_DEVICES = 4096

# Dense operations per second in 16-bit floats, and bytes of memory, as the makers state them.
KNOWN_DEVICES: dict[str, tuple[float, float]] = {
    "h200": (989e12, 141e9),
    "h100": (989e12, 80e9),
    "h100-pcie": (756e12, 80e9),
    "a100": (312e12, 40e9),
    "a100-80gb": (312e12, 80e9),
    "a100-pcie": (312e12, 40e9),
    "l40s": (362e12, 48e9),
    "l4": (121e12, 24e9),
    "a10": (125e12, 24e9),
    "v100": (125e12, 16e9),
    "v100-32gb": (125e12, 32e9),
    "v100-pcie": (112e12, 16e9),
    "v100-pcie-32gb": (112e12, 32e9),
    "t4": (65e12, 16e9),
    # GeForce, with sums in 32 bits: cores x boost clock x 4, as in the white papers of GA102, AD102 and GB202.
    "5090": (210e12, 32e9),
    "5080": (113e12, 16e9),
    "5070ti": (88e12, 16e9),
    "5070": (62e12, 12e9),
    "5060ti": (47e12, 8e9),
    "5060ti-16gb": (47e12, 16e9),
    "5060": (38e12, 8e9),
    "5050": (26e12, 8e9),
    "4090": (165e12, 24e9),
    "4080super": (104e12, 16e9),
    "4080": (97e12, 16e9),
    "4070tisuper": (88e12, 16e9),
    "4070ti": (80e12, 12e9),
    "4070super": (71e12, 12e9),
    "4070": (58e12, 12e9),
    "4060ti": (44e12, 8e9),
    "4060ti-16gb": (44e12, 16e9),
    "4060": (30e12, 8e9),
    "3090ti": (80e12, 24e9),
    "3090": (71e12, 24e9),
    "3080ti": (68e12, 12e9),
    "3080-12gb": (61e12, 12e9),
    "3080": (60e12, 10e9),
    "3070ti": (43e12, 8e9),
    "3070": (41e12, 8e9),
    "3060ti": (32e12, 8e9),
    "3060": (25e12, 12e9),
    "3050": (18e12, 8e9),
}
_WITHOUT_BFLOAT16 = ("v100", "v100-32gb", "v100-pcie", "v100-pcie-32gb", "t4")


@dataclass(frozen=True)
class DeviceClass:
    name: str
    count: int
    speed: float = 1.0  # a stage takes (its time in the profile) / speed
    memory: float = math.inf  # bytes that a run may use on each

    @property
    def has_bfloat16(self) -> bool:
        """Whether it computes in bfloat16; taken for granted of a device that is not known."""
        return _plain(self.name) not in map(_plain, _WITHOUT_BFLOAT16)

    def __post_init__(self) -> None:
        if self.count < 1 or not self.speed > 0 or not self.memory > 0:
            raise ValueError(f"a device class needs a positive count, speed and memory, but is {self}")


@dataclass(frozen=True)
class Link:
    """A message of b bytes takes `latency + b / bandwidth` seconds."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def seconds(self, num_bytes: float) -> float:
        return self.latency + num_bytes / self.bandwidth


# Of devices in one node, PCI Express 4, and of nodes, 10 Gbit Ethernet, where nobody has measured them.
USUAL_INSIDE, USUAL_BETWEEN = Link(2e-5, 16e9), Link(5e-5, 1.25e9)


@dataclass(frozen=True)
class Cluster:
    """All devices, class by class; nodes take them in that order."""

    classes: tuple[DeviceClass, ...]
    node_sizes: tuple[int, ...] = ()  # devices of each node; empty is one node for all
    inside: Link = Link()  # between two devices of a node
    between: Link = Link()

    def __post_init__(self) -> None:
        if self.node_sizes and sum(self.node_sizes) != self.size:
            raise ValueError(
                f"the nodes have {' + '.join(map(str, self.node_sizes))} devices, but there are {self.size} devices"
                ": let both be the same number"
            )

    @property
    def size(self) -> int:
        return sum(device_class.count for device_class in self.classes)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(device_class.count for device_class in self.classes)

    @cached_property
    def class_of_device(self) -> tuple[int, ...]:
        return tuple(index for index, device_class in enumerate(self.classes) for _ in range(device_class.count))

    @cached_property
    def node_of_device(self) -> tuple[int, ...]:
        sizes = self.node_sizes or (self.size,)
        return tuple(node for node, size in enumerate(sizes) for _ in range(size))

    def kind_of(self, device: int) -> DeviceClass:
        return self.classes[self.class_of_device[device]]

    def link(self, first: int, second: int) -> Link:
        same = self.node_of_device[first] == self.node_of_device[second]
        return self.inside if same else self.between

    def link_among(self, num_devices: int) -> Link:
        """The link of so many devices that are still to be placed: `inside` if a node is large enough for them."""
        return self.inside if num_devices <= max(self.node_sizes, default=self.size) else self.between

    @property
    def links(self) -> tuple[Link, ...]:
        """All that there are."""
        return (self.inside, self.between) if len(self.node_sizes) > 1 else (self.inside,)


def _plain(name: str) -> str:
    """A name without what people write it with: `RTX-4070-Ti` is `4070ti`."""
    return re.sub(r"[-_.]|geforce|nvidia|rtx|tesla", "", name.lower())


_KNOWN = {_plain(name): figures for name, figures in KNOWN_DEVICES.items()}


def operations_of(name: str) -> float | None:
    """Operations per second of a known device."""
    return _KNOWN[_plain(name)][0] if _plain(name) in _KNOWN else None


def operations_of_card(name: str) -> float | None:
    """As `operations_of`, by the name that a driver gives: `NVIDIA A100-SXM4-40GB`. None if another word is in it,
    such as Laptop, as that is another device."""
    words = re.split(r"[\s-]+", name.lower())
    passed_over = r"nvidia|tesla|geforce|rtx|sxm\d|hbm\d\w?|\d+gb"
    return operations_of("".join(word for word in words if not re.fullmatch(passed_over, word)))


def parse_devices(
    text: str, memory: str | None = None, speed: str | None = None, measured_on: str | None = None
) -> tuple[DeviceClass, ...]:
    """Classes of devices from `7`, `a100:4,t4:3`.

    Args:
        memory: `24GB` for all, or `a100=40GB,t4=16GB`; by default nine tenths of a known device's, else no limit.
        speed: `a100=1,t4=0.2`: relative to the device of the profile; by default by the known devices' operations per
            second. A single class of which that is not known has the profile's device.
        measured_on: the profile's device, by the name that its driver gives. None if the profile is estimated: it is
            that of the fastest known device here, or of an A100 if there is none.
    """
    counts: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:([\w.-]+)\s*:)?\s*(\d+)\s*", part)
        if match is None or int(match[2]) < 1:
            raise ValueError(f"devices are written like 7 or a100:4,t4:3, but {part!r} in {text!r} is not")
        name = (match[1] or "device").lower()
        counts[name] = counts.get(name, 0) + int(match[2])
    if (total := sum(counts.values())) > MAX_DEVICES:
        raise ValueError(f"there are {total:,} devices in {text!r}, and the planner looks at {MAX_DEVICES:,} at most")
    known = {name: _KNOWN[_plain(name)] for name in counts if _plain(name) in _KNOWN}
    fastest = max(known, key=known.__getitem__, default=None)
    profiled = operations_of(fastest or "") if measured_on is None else operations_of_card(measured_on)
    limits = {name: USABLE * size for name, (_, size) in known.items()}
    memories, own_speeds = _per_class("memory", memory, counts), _per_class("speed", speed, counts)
    limits |= {name: parse_bytes(value) for name, value in memories.items()}
    speeds = {} if profiled is None else {name: operations / profiled for name, (operations, _) in known.items()}
    speeds |= {name: _positive(value) for name, value in own_speeds.items()}
    unknown = [name for name in counts if name not in speeds]
    unlimited = [name for name in unknown if name not in {"device", *limits}]
    if unknown and (len(counts) > 1 or unlimited):
        if unknown[0] in known:
            near = f"the profile was measured on {measured_on}, whose data sheet is not known"
        else:
            close = get_close_matches(unknown[0], KNOWN_DEVICES, n=3)
            near = f"nearest are {', '.join(close)}" if close else f"known are {', '.join(KNOWN_DEVICES)}"
        question = f"how fast is {unknown[0]}" if len(counts) > 1 else f"no known device is called {unknown[0]}"
        lacking = [_options("--speed", own_speeds, unknown, "0.5")] if len(counts) > 1 else []
        lacking += [_options("--memory", memories, unlimited, "24GB")] if unlimited else []
        raise ValueError(
            f"{question}; {near}. For another card add {' '.join(lacking)}, with its own numbers; speeds are relative "
            f"to {measured_on or fastest or 'each other'}"
        )
    return tuple(
        DeviceClass(name, count, speeds.get(name, 1.0), limits.get(name, math.inf)) for name, count in counts.items()
    )


def parse_nodes(text: str) -> tuple[int, ...]:
    """Devices of each node from `2x4` (two nodes of four) or `4,4,8`. Raises ValueError if it is not written so."""
    sizes: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d+)\s*[xX×])?\s*(\d+)\s*", part)
        if match is None or 0 in (int(match[1] or 1), int(match[2])):
            raise ValueError(f"nodes are written like 2x4 (two nodes of four devices) or 4,8, but {text!r} is not")
        sizes += [int(match[2])] * int(match[1] or 1)
    return tuple(sizes)


def _options(option: str, given: dict[str, str], lacking: list[str], example: str) -> str:
    """An option as it was given, with an example for what is lacking."""
    return f"{option} " + ",".join(
        f"{name}={value}" for name, value in {**given, **dict.fromkeys(lacking, example)}.items()
    )


def _per_class(what: str, text: str | None, names: dict[str, int]) -> dict[str, str]:
    if text is None:
        return {}
    if "=" not in text:
        return dict.fromkeys(names, text)
    values = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name.strip().lower() not in names:
            raise ValueError(f"{what} is given for {name.strip()!r}, but the devices are {', '.join(names)}")
        values[name.strip().lower()] = value
    return values


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"a speed is a positive number, but is {text!r}")
    return value
