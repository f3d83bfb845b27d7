"""What a run tells about itself: the last step's figures, names in torch's profiler, timelines, the log."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rebalance import read_step
from torch.profiler import ProfilerActivity, profile

from penstock.schedule import build
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import parallelize

MICROBATCHES, SAMPLES, TOKENS = 3, 6, 9
SCHEDULE = "zb-h1"


@dataclass
class Told:
    """What one rank said of three steps, of which the last two are in the timeline and the last is profiled."""

    samples: int
    tokens: int
    tokens_per_second: float | None
    seconds: float
    words: str
    evaluation: list[str]
    step: list[str]
    generation: list[str]
    log: list[str]


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def observed(path: str) -> Told:
    """On a worker: two pipelines of two stages."""
    handler, logger = Kept(), logging.getLogger("penstock")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = parallelize(
            FAMILIES["gpt2"].build(),
            2,
            num_microbatches=MICROBATCHES,
            schedule=SCHEDULE,
            trace=path,
            trace_steps=[1, 2],
        )
        names: dict[str, list[str]] = {}

        def step() -> None:
            for output in model(**batch("causal", SAMPLES, TOKENS, seed=model.data_parallel_rank)):
                output.loss.backward()

        def evaluation() -> None:
            with torch.no_grad():
                model(**batch("causal", SAMPLES, TOKENS))

        def generation() -> None:
            model.generate(batch("causal", 2, 4)["input_ids"], max_new_tokens=3, do_sample=False)

        step()
        step()
        for run in (evaluation, generation, step):
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                run()
            names[run.__name__] = [e.name for e in profiler.events() if e.name.startswith("penstock: ")]
        last = model.pipeline.last_step
        return Told(
            last.num_samples,
            last.num_tokens,
            last.tokens_per_second,
            last.seconds,
            repr(last),
            log=handler.lines,
            **names,
        )
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


@functools.cache
def told(pool: Pool, folder: Path) -> list[Told]:
    return pool.run(4, observed, str(folder / "steps.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("observed")


def test_the_last_step_counts_samples_and_tokens_of_all_pipelines(pool: Pool, folder: Path) -> None:
    for each in told(pool, folder):
        assert (each.samples, each.tokens) == (2 * SAMPLES, 2 * SAMPLES * TOKENS)
        assert each.tokens_per_second == each.tokens / each.seconds


def test_the_last_step_reads_as_a_sentence(pool: Pool, folder: Path) -> None:
    for each in told(pool, folder):
        assert re.fullmatch(
            r"<step: loss [\d.]+ \([\d.]+ of it here\), [\d.e-]+ s, [\d,]+ tokens/s, [\d,.e+]+ samples/s, "
            r"3 microbatches, bubble [\d.]+%, [\d.e-]+ MB reduced, \d+% of the time hidden>",
            each.words,
        ), each.words


def test_a_profile_names_every_action_message_and_sum_of_a_step(pool: Pool, folder: Path) -> None:
    for rank, each in enumerate(told(pool, folder)):
        place = rank % 2
        counts = Counter(each.step)
        expected = Counter(
            f"penstock: {action.kind.value} stage {action.stage} microbatch {action.microbatch}"
            for action in build(SCHEDULE, 2, MICROBATCHES).actions[place]
        )
        down, up = ("send", "receive") if place == 0 else ("receive", "send")
        expected[f"penstock: {down} activations between stages 0 and 1"] = MICROBATCHES
        expected[f"penstock: {up} gradients between stages 0 and 1"] = MICROBATCHES
        # Which gradients there are is said until all have been seen: with the first microbatch here.
        expected[f"penstock: {up} presence of gradients between stages 0 and 1"] = 1
        expected[f"penstock: {up} losses between stages 0 and 1"] = MICROBATCHES
        reductions = {name: count for name, count in counts.items() if " of gradients over ranks " in name}
        assert counts - Counter(reductions) == expected
        # The tied embedding is on all ranks, everything else of this stage on two.
        both = f"{place}, {place + 2}"
        for words in ("reduce", "wait for the sum of"):
            over = {name.rpartition("ranks ")[2] for name in reductions if name.startswith(f"penstock: {words} ")}
            assert over == {both, "0, 1, 2, 3"}


def test_evaluation_and_generation_are_named_too(pool: Pool, folder: Path) -> None:
    for rank, each in enumerate(told(pool, folder)):
        stage = rank % 2
        forwards = [f"penstock: F stage {stage} microbatch {number}" for number in range(MICROBATCHES)]
        assert [name for name in each.evaluation if ": F " in name] == forwards
        assert [name for name in each.generation if ": F " in name] == [f"penstock: F stage {stage}"] * 3
        assert any("activations" in name for name in each.generation)


def test_the_timeline_covers_the_steps_asked_for_and_no_others(pool: Pool, folder: Path) -> None:
    told(pool, folder)
    records = json.loads((folder / "steps.json").read_text())["traceEvents"]
    events = [record for record in records if record["ph"] == "X"]
    actions = Counter((e["args"]["step"], e["cat"]) for e in events if e["cat"] in "FBW")
    assert actions == {(step, kind): 2 * MICROBATCHES for step in (1, 2) for kind in "FBW"}
    ends = [max(e["ts"] + e["dur"] for e in events if e["args"]["step"] == step) for step in (1, 2)]
    begins = [min(e["ts"] for e in events if e["args"]["step"] == step) for step in (1, 2)]
    assert begins[0] == 0 and ends[0] <= begins[1]
    assert records[0]["args"]["name"] == "steps 1 to 2 on 2 ranks, as run"
    # The planner takes it as it takes a step.
    schedule, _, measured = read_step(folder / "steps.json")
    assert [Counter(schedule.actions[rank]) for rank in range(2)] == [
        Counter(build(SCHEDULE, 2, MICROBATCHES).actions[rank]) for rank in range(2)
    ]
    assert measured * 1e6 <= max(end - begin for begin, end in zip(begins, ends, strict=True)) + 1


def test_rank_0_alone_says_once_what_is_in_use(pool: Pool, folder: Path) -> None:
    first, *others = told(pool, folder)
    head, *lines = first.log
    assert head == "GPT2LMHeadModel on 4 ranks: 2 pipelines"
    pipeline, *stages, alike = lines[:4]
    words = rf"pipeline 0: schedule {SCHEDULE}, 3 microbatches in a batch, slowest .* times the mean "
    words += r"for samples of (\d+) tokens"
    found = re.fullmatch(words, pipeline)
    assert found and int(found[1]) <= FAMILIES["gpt2"].build().config.n_positions
    assert alike == "pipeline 1: alike, ranks 2-3"
    shares = [float(re.search(r"on rank \d: ([\d.]+)% of the cost", line)[1]) for line in stages]
    assert len(shares) == 2 and sum(shares) == pytest.approx(100, abs=0.2)
    assert re.search(r"stage 1 on rank 1: .*lm_head$", stages[1])
    assert [each.log for each in others] == [[]] * 3


def shown(quiet: str) -> tuple[str, str, str, list[str]]:
    """What forming prints; and of the pipeline its repr, the error before a step, and its names."""
    os.environ["PENSTOCK_QUIET"] = quiet
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        model = parallelize(FAMILIES["gpt2"].build(), 2)
    with pytest.raises(RuntimeError) as early:
        print(model.pipeline.last_step)
    for output in model(**batch("causal", SAMPLES, TOKENS)):
        output.loss.backward()
    return printed.getvalue(), str(early.value), repr(model.pipeline), dir(model.pipeline)


def test_the_layout_is_printed_and_the_pipeline_says_what_it_is(pool: Pool) -> None:
    first, second = pool.run(2, shown, "0")
    assert first[0].startswith("GPT2LMHeadModel on 2 ranks: 1 pipeline\npipeline 0: schedule 1f1b, 8 microbatches")
    assert len(first[0].splitlines()) == 4 and second[0] == ""
    assert [one[0] for one in pool.run(2, shown, "1")] == ["", ""]
    for rank, (_, early, said, names) in enumerate((first, second)):
        assert early == "no training step has ended yet, so there is no last_step"
        assert f"stages, schedule 1f1b; on rank {rank} (cpu): stage {rank}: transformer." in said
        assert "; 1 training steps, the last <step: loss " in said and "\n" not in said
        assert {"last_step", "layout", "trace"} <= set(names) and len(names) < 15


def test_without_a_profiler_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of names is one question a step."""
    from penstock.runtime import report

    def refuse(text: str) -> Any:
        raise AssertionError(text)

    monkeypatch.setattr(report, "record_function", refuse)
    with report.label("reduce", "nothing"):
        pass
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(AssertionError, match="penstock: reduce nothing"):
        report.label("reduce", "nothing")
