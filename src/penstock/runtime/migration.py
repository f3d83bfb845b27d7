"""What moves between ranks when the layout of an elastic run changes: a type for `elastic/`, which moves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from penstock.runtime.engine import Engine


@dataclass
class Migration:
    """What a change of the layout finds on this rank, and moves: one object from its beginning to its end, over
    re-formations that fail. Values are parameters and buffers, by unsplit name.

    Attributes:
        had: the values that this rank has. What it receives meanwhile is added, so that it counts in another attempt.
        lacking: names of what it holds newly, and has no values of yet.
        elsewhere: names of what it has but does not own: with a sharded optimizer its newest value and its state are on
            other ranks.
    """

    had: dict[str, torch.Tensor] = field(default_factory=dict)
    lacking: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, engine: Engine) -> Migration:
        """That of an engine that stands, or was dissolved."""
        migration = cls()
        migration.take_stock(engine)
        return migration

    def take_stock(self, engine: Engine) -> None:
        """Begin with what the engine holds now, all of which has its values."""
        self.had, self.lacking, self.elsewhere = engine.values_here(), set(), engine.owned_elsewhere()

    def arrived(self, name: str, tensor: torch.Tensor, with_state: bool) -> None:
        """A value has come, and its optimizer's state if `with_state`."""
        self.had[name] = tensor
        (self.elsewhere.discard if with_state else self.elsewhere.add)(name)


# Fills in what a rank holds newly: given the engine, these parameters and buffers by their unsplit names, and what the
# rank has of the time before.
FillValues = Callable[[Engine, Mapping[str, torch.Tensor], Migration], None]
