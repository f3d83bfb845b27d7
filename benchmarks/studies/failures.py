"""How long a failure on one rank takes to end the others, and whether they name it.

    export PYTHONPATH=src:.:benchmarks/studies
    python benchmarks/studies/failures.py              # every fault, three times each: the table of docs/reliability.md
    python benchmarks/studies/failures.py --only generat --repeats 10

Each run is processes of their own over gloo on this machine. The clock runs from the moment of the fault to the moment
the last surviving rank has raised its error.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.support.ended import End, fault_now, kill_self, run_ranks
from tests.support.families import FAMILIES, batch
from tests.support.training import parallelize, run_step

ROUNDS = 10_000


class Fault(NamedTuple):
    """A fault that `victim` of `num_ranks` ranks has, in pipelines of `stages`.

    `by_hand`: without a launcher, so that the job's store dies with rank 0.
    """

    what: str
    run: Callable[..., None]
    num_ranks: int
    stages: int
    victim: int
    by_hand: bool = False


def _is(victim: int) -> bool:
    return int(os.environ["RANK"]) == victim


def killed_in_training(stages: int, victim: int) -> None:
    model = parallelize(FAMILIES["gpt2"].build(), stages, num_microbatches=4)
    for step in range(ROUNDS):
        for number, output in enumerate(model(**batch("causal", 8))):
            if step == 2 and number == 1 and _is(victim):
                kill_self()
            output.loss.backward()


def killed_in_initialize(stages: int, victim: int) -> None:
    model = FAMILIES["gpt2"].build()
    if _is(victim):
        torch.distributed.new_group = lambda *args, **kwargs: kill_self()
    parallelize(model, stages, num_microbatches=4)


def killed_in_evaluation(stages: int, victim: int) -> None:
    model = parallelize(FAMILIES["gpt2"].build(), stages, num_microbatches=4)
    for number in range(ROUNDS):
        with torch.no_grad():
            model(**batch("causal", 8))
        if number == 3 and _is(victim):
            kill_self()


def killed_in_generation(stages: int, victim: int) -> None:
    model = parallelize(FAMILIES["gpt2"].build(), stages, num_microbatches=4)
    for number in range(ROUNDS):
        model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=3, do_sample=False)
        if number == 3 and _is(victim):
            kill_self()


def killed_before_a_save(stages: int, victim: int) -> None:
    model = parallelize(FAMILIES["gpt2"].build(), stages, num_microbatches=4)
    with tempfile.TemporaryDirectory() as folder:
        run_step(model, batch("causal", 8))
        if _is(victim):
            time.sleep(0.5)
            kill_self()
        model.save_parallelized(folder)


def killed_while_others_compute(stages: int, victim: int) -> None:
    """The others are in their own code, or wait for one that is: nobody waits for the victim."""
    model = parallelize(FAMILIES["gpt2"].build(), stages, num_microbatches=4)
    run_step(model, batch("causal", 8))
    if _is(victim):
        time.sleep(0.5)
        kill_self()
    until = time.monotonic() + 30
    while int(os.environ["RANK"]) == 1 and model.pipeline.board.failed is None and time.monotonic() < until:
        time.sleep(0.01)
    run_step(model, batch("causal", 8))


def error_in_own_code(stages: int, victim: int) -> None:
    model = parallelize(FAMILIES["gpt2"].build(), stages, num_microbatches=4)
    for step in range(ROUNDS):
        if step == 2 and _is(victim):
            fault_now()
            raise ZeroDivisionError("a mistake")
        run_step(model, batch("causal", 8))


def error_in_the_model(stages: int, victim: int) -> None:
    model = parallelize(FAMILIES["gpt2"].build(), stages, num_microbatches=4)
    run_step(model, batch("causal", 8))
    if _is(victim):

        def fail(*args: Any) -> None:
            fault_now()
            raise ZeroDivisionError("a mistake")

        for module in model.modules():
            if type(module).__name__ == "GPT2MLP":
                module.register_forward_pre_hook(fail)
    run_step(model, batch("causal", 8))


FAULTS = [
    Fault("killed in a training step", killed_in_training, 3, 3, 1),
    Fault("killed in a training step, no launcher", killed_in_training, 3, 3, 0, True),
    Fault("killed in a training step, of two pipelines", killed_in_training, 4, 2, 3),
    Fault("killed in initialize(), no launcher", killed_in_initialize, 3, 3, 1, True),
    Fault("killed in initialize(), no launcher", killed_in_initialize, 3, 3, 0, True),
    Fault("killed in an evaluation loop, of two pipelines", killed_in_evaluation, 4, 2, 3),
    Fault("killed in a generation loop, of two pipelines", killed_in_generation, 4, 2, 3),
    Fault("killed while the others save", killed_before_a_save, 3, 3, 1),
    Fault("killed while nobody waits for it", killed_while_others_compute, 3, 3, 2),
    Fault("error in the program's own code", error_in_own_code, 3, 3, 1),
    Fault("error in the program's own code, no launcher", error_in_own_code, 3, 3, 0, True),
    Fault("error in the model's forward", error_in_the_model, 3, 3, 1),
]


def measure(fault: Fault) -> tuple[bool, float]:
    """Whether all survivors named the victim, and how many seconds the last of them took."""
    ends: list[End] = run_ranks(fault.num_ranks, fault.run, fault.stages, fault.victim, by_hand=fault.by_hand)
    victim = ends.pop(fault.victim)
    named = all(end.kind == "PipelineFailure" and f"rank {fault.victim} " in end.text for end in ends)
    return named, max(end.at for end in ends) - (victim.fault_at or victim.at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="faults with these words in them")
    arguments = parser.parse_args()
    print("| fault | ranks | victim | all others ended, naming it | seconds, median (worst) |\n|---|---|---|---|---|")
    for fault in FAULTS:
        if arguments.only in fault.what:
            found = [measure(fault) for _ in range(arguments.repeats)]
            seconds = sorted(took for _, took in found)
            good = sum(named for named, _ in found)
            print(
                f"| {fault.what} | {fault.num_ranks} | {fault.victim} | {good} of {len(found)} | "
                f"{seconds[len(seconds) // 2]:.1f} ({seconds[-1]:.1f}) |",
                flush=True,
            )


if __name__ == "__main__":
    # What the ranks are sent is pickled under this module's imported name.
    importlib.import_module("failures").main()
