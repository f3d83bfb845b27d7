"""From `import penstock` to the end of the first step of GPT-2 small on two ranks, by phase.

    git worktree add /tmp/before d513f18
    python benchmarks/studies/start_up.py /tmp/before --rounds 9

Processor seconds of the slower rank, other checkouts in turn. Both start with torch, transformers and the model's own
module imported and the model built, which no library for it saves. Of the first step, what it took more than the third.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from measure import Comparison, interleave, median_of
from processes import free_port
from two_commits import commit_of

HERE = Path(__file__).resolve().parents[2]
BYTECODE = Path(tempfile.gettempdir()) / "penstock_start_up"
PHASES = (
    "import",
    "units and costs",
    "splitting",
    "forming, and the rest of initialize()",
    "following the forward",
    "the rest of the first step",
)
# Where a phase's function may be called, in one checkout or another; what it is called is looked up there.
TIMED = {
    "units and costs": (
        ("penstock.api.builder", "_find"), ("penstock.form", "_find"),
        ("penstock.initialize", "list_units"), ("penstock.initialize", "unit_costs"),
    ),
    "splitting": (("penstock.modeling.stage.split.SplitModel", "__init__"),),
    "following the forward": (("penstock.modeling.graph.forwards.Forwards", "follow"),),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="*", help="checkouts of other commits")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(one_rank()))
        return
    checkouts = {commit_of(one): one.resolve() for one in (*options.before, HERE)}
    for one in checkouts.values():
        start(one)  # compiles the modules, as an installation does
    results = interleave({name: partial(start, one) for name, one in checkouts.items()}, options.rounds)
    columns = ("processor seconds", *results)
    title = "Start-up: GPT-2 small on two ranks, from the import to the end of the first step"
    table = Comparison("start_up", title, columns, {"rounds": options.rounds}, results)
    for phase in (*PHASES, "ours in all", "clock, in all"):
        figures = {name: median_of(runs, phase) for name, runs in results.items()}
        table.add(phase, [f"{figure:.3f}" for figure in figures.values()], **figures)
    table.write("The clock starts with the import, and counts that of other programs on the machine, too.")


def start(checkout: Path) -> dict[str, Any]:
    """Two ranks; for each phase the larger figure of the two."""
    port, answers = str(free_port()), []
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            environment = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(checkout / "src"),
                "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(BYTECODE),
            }  # fmt: skip
            log = stack.enter_context(tempfile.TemporaryFile())
            command = [sys.executable, str(Path(__file__).resolve()), "--rank"]
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True))
        for process in ranks:
            said = process.communicate(timeout=300)[0]
            if process.returncode:
                raise RuntimeError(f"a rank ended with {process.returncode}")
            answers.append(json.loads(said.splitlines()[-1]))
    return {phase: max(answer[phase] for answer in answers) for phase in answers[0]}


def one_rank() -> dict[str, float]:
    import torch
    import torch.distributed
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))
    ids = torch.randint(0, 50257, (2, 16))
    with contextlib.redirect_stdout(sys.stderr):
        return phases(model, ids)


def phases(model: Any, ids: Any) -> dict[str, float]:
    seconds, spent = Counter[str](), Counter[str]()
    began = time.perf_counter()

    @contextlib.contextmanager
    def timed(phase: str) -> Iterator[None]:
        start, inner = time.process_time(), spent.total()
        yield
        # What a phase within this one took is not its own.
        own = time.process_time() - start - (spent.total() - inner)
        spent[phase] += own

    with timed("import"):
        import penstock

        initialize = penstock.initialize  # imported when it is first used
    for phase, places in TIMED.items():
        for place, name in places:
            with contextlib.suppress(ImportError, AttributeError):
                wrap(place, name, timed, phase)
    with timed("forming, and the rest of initialize()"):
        model = initialize(model, {"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 2}})
    with timed("the rest of the first step"):
        step(model, ids)
    clock = time.perf_counter() - began
    step(model, ids)
    with timed("a later step"):
        step(model, ids)
    spent["the rest of the first step"] -= spent.pop("a later step")
    seconds.update(spent)
    return {**seconds, "ours in all": seconds.total(), "clock, in all": clock}


def wrap(place: str, name: str, timed: Any, phase: str) -> None:
    """Time what is called `name` in a module, or in a class of one."""
    try:
        owner: Any = importlib.import_module(place)
    except ImportError:
        module, _, kind = place.rpartition(".")
        owner = getattr(importlib.import_module(module), kind)
    function = getattr(owner, name)

    @functools.wraps(function)
    def timing(*args: Any, **kwargs: Any) -> Any:
        with timed(phase):
            return function(*args, **kwargs)

    setattr(owner, name, timing)


def step(model: Any, ids: Any) -> None:
    for out in model(input_ids=ids, labels=ids):
        out.loss.backward()


if __name__ == "__main__":
    main()
