"""What happened to a run's members: one record for each change, and its line in the log."""

from __future__ import annotations

from dataclasses import dataclass, field

PHASES = ("detect", "agree", "plan", "form", "move", "redo")


@dataclass
class Change:
    """A change of a run's members, as one of them saw it.

    Attributes:
        generation: that it led to.
        cause: the failure, or why it was planned.
        lost, left, joined: numbers of members.
        pipelines: stages and microbatches of each, as `2x4`.
        restored: the checkpoint that the run went back to, empty if nothing was lost.
        step: updates made before it.
        at: when this member noticed, seconds since the epoch.
        seconds: of each phase. detect: from what first failed on this member to the beginning of the change. agree:
            until all members that are left had reported, and one decided. plan: that it took to choose the layout.
            form: process groups and stages. move: weights, optimizer state and objects. redo: what was repeated, until
            as much was computed as before.
        num_bytes: of weights and optimizer state that this member received.
    """

    generation: int
    cause: str
    lost: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    pipelines: tuple[str, ...] = ()
    restored: str = ""
    step: int = 0
    at: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    num_bytes: int = 0

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        names = {"lost": self.lost, "left": self.left, "joined": self.joined}
        who = "; ".join(
            f"member{'s' if len(members) > 1 else ''} {', '.join(map(str, members))} {what}"
            for what, members in names.items()
            if members
        )
        phases = ", ".join(f"{name} {self.seconds.get(name, 0.0):.2f}" for name in PHASES)
        back = f", back to {self.restored}" if self.restored else ""
        return (
            f"generation {self.generation} at step {self.step}: {who or self.cause}; now {' + '.join(self.pipelines)} "
            f"(stages x microbatches){back}; {self.total:.2f} s: {phases}"
        )
