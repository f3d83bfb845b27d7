"""Every number that a user may give: what is none is refused with the argument's name and its value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest

from penstock import CheckpointManager, Configuration, Elastic, HeterogeneousParallelPlugin
from penstock.runtime.optimizer import LossScale

ELASTIC = {"elastic": Elastic("tcp://head:29400"), "global_batch_size": 4}
# What takes settings, with what it cannot be made without.
TAKE_SETTINGS: dict[type, dict[str, Any]] = {
    CheckpointManager: {"folder": "run", "model": None},
    Configuration: {},
    Elastic: {"store": "tcp://head:29400"},
    HeterogeneousParallelPlugin: ELASTIC,
    LossScale: {},
}


def no_numbers() -> Iterator[Any]:
    for kind, needed in TAKE_SETTINGS.items():
        for name, hint in get_type_hints(kind.__init__).items():
            accepted = get_args(hint) or (hint,)
            if int in accepted or float in accepted:
                wrong = {"1": str, math.nan: None, None: NoneType, True: bool}
                for value in (value for value, its_type in wrong.items() if its_type not in accepted):
                    yield pytest.param(kind, needed, name, value, id=f"{kind.__name__}-{name}-{value}")


@pytest.mark.parametrize(("kind", "needed", "name", "value"), [*no_numbers()])
def test_what_is_no_number_is_refused_with_its_name(kind: type, needed: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        kind(**{**needed, name: value})
    assert name in str(caught.value) and repr(value) in str(caught.value)
