"""Many runs in one table: which runs, how they are merged, compared, written and drawn."""

import io
import json
import statistics
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds.figures import RankFigures, Sample, assemble, summary
from kinds.measure import Clock, Stopwatch
from kinds.options import World, read_options
from kinds.report import comparison, tables_of, write_plots
from kinds.result_files import read_runs
from kinds.suite import Entry, combine, compare_losses, default_modes, entries_of, run_suite
from rich.console import Console
from typer.testing import CliRunner

from penstock.cli import app
from penstock.layout.pipelines import parse_pipelines
from penstock.planning.memory import MemoryEstimate


def result(mode: str = "ddp", seconds: tuple[float, ...] = (0.1, 0.2, 0.4), slowdown: float = 1.0) -> dict[str, Any]:
    """A run's result on two ranks, of which the second takes twice as long."""
    world = World(2, 2, 0, 0, "cpu", 2)
    options = read_options(["--mode", mode, "--batch_size", "8"], world)
    ranks = [
        RankFigures(
            samples=[
                Sample(second * factor * slowdown, {"forward": second, "backward": 2 * second}, factor / 4, 1.0)
                for second in seconds
            ],
            losses=[3.0, 2.0, 1.0, 0.5],
            peak_memory=1000 * factor,
            memory_before=10,
            matmul_peak=1e9,
            parameters=7,
        )
        for factor in (1, 2)
    ]
    return json.loads(json.dumps(assemble(options, world, MemoryEstimate(1, 2, 3, 4), ranks)))


def suite(**runs: dict[str, Any]) -> dict[str, Any]:
    return {"runs": runs, "failures": {}, "devices": 2, "losses": compare_losses(runs)}


def test_figures_are_per_device_and_of_the_slowest_rank() -> None:
    content = result()
    figures = content["figures"]
    assert figures["seconds"] == 0.4 and (figures["seconds_least"], figures["seconds_most"]) == (0.2, 0.8)
    assert figures["samples_per_second_per_device"] == pytest.approx(8 / 0.4 / 2)
    assert figures["tokens_per_second_per_device"] == pytest.approx(8 * 128 / 0.4 / 2)
    assert figures["peak_memory_bytes"] == 2000 and figures["pipeline_efficiency"] == pytest.approx(0.375)
    assert figures["mfu"] == pytest.approx(figures["model_flops_per_step"] / 0.4 / 2 / 1e9)
    assert (figures["forward_seconds"], figures["backward_seconds"], figures["optimizer_seconds"]) == (0.2, 0.4, 0.0)
    assert content["losses"] == [6.0, 4.0, 2.0, 1.0]  # the ranks' parts, added up
    assert content["options"]["config"]["n_layer"] == 4 and content["environment"]["versions"]["torch"]
    assert "ddp: GPTTiny" in summary(content) and "400 ms a step (200 to 800" in summary(content)


def test_rounds_are_merged_sample_by_sample() -> None:
    fast, slow = result(), result(slowdown=3.0)
    merged = combine([fast, slow])
    samples = fast["step_seconds"] + slow["step_seconds"]
    assert merged["step_seconds"] == samples and merged["figures"]["seconds"] == statistics.median(samples)
    speed = 8 / statistics.median(samples) / 2
    assert merged["figures"]["samples_per_second_per_device"] == pytest.approx(speed)
    assert merged["figures"]["tokens_per_second_per_device"] == pytest.approx(speed * 128)
    assert combine([fast]) == fast


@pytest.mark.parametrize("bad", [1.001, float("nan")])
def test_losses_that_differ_are_seen(bad: float) -> None:
    first, second = result(), result()
    assert compare_losses({"a": first, "b": second})["agree"]
    second["losses"][2] *= bad
    found = compare_losses({"a": first, "b": second})
    assert not found["agree"] and found["between"] == ("a", "b")


def test_modes_become_the_trainers_arguments() -> None:
    entries = entries_of(["ddp", "pdp", "pp:zb-h1=1x4,2x8"], 3)
    assert [entry.processes for entry in entries] == [3, 1, 3]
    assert entries[1].arguments == ("--mode", "pdp", "--ndevice-per-proc", "3")
    assert entries[2].arguments == ("--mode", "pp", "--schedule", "zb-h1", "--pipelines", "1x4,2x8")
    assert entries[2].num_microbatches == 12
    for wrong in ("ddp=1x2", "dp", "pp="):
        with pytest.raises(ValueError, match="mode"):
            entries_of([wrong], 2)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 7, 8])
def test_default_modes_use_every_device(devices: int) -> None:
    modes = default_modes(devices)
    assert modes[:4] == ["ddp", "fsdp", "pdp", "pp"] and len(modes) == (5 if devices >= 3 else 4)
    for mode in modes[4:]:
        assert sum(ranks for ranks, _ in parse_pipelines(mode.removeprefix("pp="))) == devices


def test_plots_show_every_run(tmp_path: Path) -> None:
    svg, png = write_plots(suite(ddp=result(), fsdp=result("fsdp")), tmp_path)
    ElementTree.parse(svg)
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000
    with pytest.raises(ValueError, match="no run to draw"):
        write_plots(suite(), tmp_path)


def test_compare_shows_ratios_and_what_else_differs(tmp_path: Path) -> None:
    slower = result(slowdown=4.0)
    slower["options"]["chunks"] = 2
    for name, content in (("a", suite(ddp=result(), pp=result())), ("b", suite(ddp=slower))):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    shown = CliRunner().invoke(
        app,
        ["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")],
        env={"COLUMNS": "160"},
    )
    assert shown.exit_code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.output.splitlines() if "│" in line]
    cells = {row[1]: row for row in rows}
    assert cells["ms/step"] == ["ddp", "ms/step", "400", "1600", "4.000"]
    assert cells["tokens/s/device"][4] == "0.250" and cells["peak MB"][4] == "1.000"
    assert "ddp: chunks is 1 in a, 2 in b" in shown.output and "only in a: pp" in shown.output


def test_a_single_run_can_be_compared_and_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(result()))
    assert list(read_runs(tmp_path / "run.json")) == ["ddp"]
    for text in ("{}", "[1]", "not JSON"):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match=r"other\.json is no"):
            read_runs(tmp_path / "other.json")
    with pytest.raises(ValueError, match="no mode in common"):
        comparison({"ddp": result()}, {"pp": result(), "fsdp": result()})
    table, _ = comparison({"ddp": result()}, {"pp": result("pp", slowdown=2.0)})
    assert next(iter(table.columns[0]._cells)) == "ddp and pp" and str(list(table.columns[4].cells)[2]) == "2.000"
    missing = CliRunner().invoke(app, ["bench", "--compare", "absent.json", "absent.json"])
    assert missing.exit_code == 1 and "absent.json: No such file" in missing.stderr


def test_bench_refuses_what_it_cannot_run_before_it_runs_anything(tmp_path: Path) -> None:
    for arguments, message in (
        (["--mode", "dpp"], "unknown mode 'dpp'"),
        (["--batchsize", "8"], "unrecognized arguments: --batchsize 8; did you mean --batch-size?"),
        (["--mode", "pp", "--dtype", "fp8"], "unknown dtype 'fp8': known are fp32, bf16, fp16"),
    ):
        refused = CliRunner().invoke(app, ["bench", *arguments, "--devices", "2", "-o", str(tmp_path / "out")])
        assert refused.exit_code == 1 and refused.stderr.startswith("error: ") and message in refused.stderr
        assert not (tmp_path / "out").exists()


def test_options_that_one_mode_refuses_are_refused_before_the_others_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def run_entry(entry: Entry, *_: object) -> dict[str, Any]:
        started.append(entry.name)
        return result(entry.name)

    monkeypatch.setattr("kinds.suite.run_entry", run_entry)
    found = run_suite(entries_of(["ddp", "pp"], 2), 2, ["--model", "ResNet18"], say=lambda text: None)
    assert started == ["ddp"] and list(found["runs"]) == ["ddp"]
    assert "ResNet18 has no meaning with --mode pp" in found["failures"]["pp"]


def test_the_tables_fit_80_columns() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80)
    for table in tables_of(suite(ddp=result(), **{"pp:interleaved-1f1b=1x4,2x8": result("pp")})):
        console.print(table)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    assert sum("200 to 800" in line for line in lines) == 2


def test_watches_count_what_is_marked_and_nothing_else() -> None:
    watch = Stopwatch(torch.device("cpu"))
    clock = Clock([torch.device("cpu")] * 2)
    clock.start()
    with clock.phase("forward"), watch.running():
        torch.randn(300, 300) @ torch.randn(300, 300)
    with clock.phase("backward"):
        pass
    seconds, phases = clock.stop()
    assert 0 < watch.take() <= phases["forward"] <= seconds and phases["backward"] < phases["forward"]
    assert watch.take() == 0.0
