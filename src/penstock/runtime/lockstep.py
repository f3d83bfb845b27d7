"""Code that every rank of a pipeline runs alike, such as generate(): shared random state, decisions and errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from .engine import Pipeline
from .failure import PipelineFailure
from .random_state import adopt_random_state, set_random_state


class Lockstep:
    """What keeps the ranks of one pipeline together while each of them runs the same Python code.

    Every rank calls every method alike, inside `section`.

    Attributes:
        ranks: the global ranks, in pipeline order; all that share a stage's weights too.
        position: how many exchanges this rank has begun in the section.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        place = pipeline.place
        self.ranks = pipeline.layout.pipelines[place.pipeline].ranks()
        self.position = 0
        self._board = pipeline.board
        self._groups = pipeline.groups
        self._device = pipeline.device
        self._num_sections = 0

    @contextmanager
    def section(self) -> Iterator[None]:
        """The code to run. All ranks draw the first rank's random numbers in it; an error on one becomes one on all.

        An error that every rank meets at the same point (a wrong argument, say) is only raised: nothing is under way,
        and the pipeline stays usable. A rank whose random state was not the first rank's has its own again afterwards.
        """
        self._board.check()
        self.position = 0
        self._num_sections += 1
        try:
            with self._board.position.call("generation", world=False, detail=self), self._one_random_state():
                yield
        except PipelineFailure:
            raise
        except BaseException as error:
            # An exchange that failed has closed the pipeline already.
            if self._board.failed is None and not (isinstance(error, Exception) and self._all_stopped_here()):
                self._board.abort(f"{type(error).__name__}: {error}")
            raise

    @property
    def progress(self) -> int:
        """See `position.Inside`."""
        return self.position

    @property
    def place(self) -> str:
        """See `position.Inside`."""
        return f"at exchange {self.position}"

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around communication: an error in here is an error on every rank, as the others wait for this one."""
        self.position += 1
        with self._board.guard("exchanging values in generation", self.ranks):
            yield

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's `numbers` (up to 63 bits each, equally many on every rank), in pipeline order."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        every = [torch.empty_like(mine) for _ in self.ranks]
        with self.exchange(), self._board.guard("comparing arguments", self.ranks):
            dist.all_gather(every, mine, group=self._groups.crew_control)
        return [theirs.tolist() for theirs in every]

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Which of `flags` (bool, any shape) are set on at least one rank."""
        if len(self.ranks) == 1:
            return flags
        numbers = flags.to(self._device, torch.uint8, copy=True)
        with self.exchange(), self._board.guard("agreeing when to stop", self.ranks):
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._groups.crew)
        return numbers.to(flags.device, torch.bool)

    def _all_stopped_here(self) -> bool:
        return self._board.agree(f"lockstep/{self._num_sections}", str(self.position), self.ranks, patience=0.0)

    @contextmanager
    def _one_random_state(self) -> Iterator[None]:
        if len(self.ranks) == 1:
            yield
            return
        with self.exchange(), self._board.guard("sharing the random state", self.ranks):
            own = adopt_random_state(self.ranks[0], self._groups.crew_control, self._device)
        try:
            yield
        finally:
            if own is not None:
                set_random_state(own, self._device)
