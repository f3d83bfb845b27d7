"""The command line: its figures against closed formulas, its files, and mistakes that end with one line."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner, Result

import penstock
from penstock import PipelineTemplate
from penstock.cli import app
from penstock.schedule import build, schedule_names
from penstock.schedule.text import format_schedule


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def rows(result: Result) -> dict[str, list[str]]:
    """The table's cells by schedule."""
    assert result.exit_code == 0, result.output
    lines = [line.split("│")[1:-1] for line in result.output.splitlines() if line.startswith("│")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_version_is_the_packages() -> None:
    assert run("--version").output.strip() == penstock.__version__


@pytest.mark.parametrize(("command", "option"), [("simulate", "--ranks"), ("draw", "--output"), ("check", "--stages")])
def test_help_explains_the_options_and_shows_an_example(command: str, option: str) -> None:
    text = run(command, "--help").output
    assert option in text and "Example: penstock" in text


def small_gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=32))


def test_check_shows_units_cuts_ties_and_the_spread_over_stages() -> None:
    result = run("check", "test_cli:small_gpt2", "--stages", 2)
    assert result.exit_code == 0, result.output
    model = small_gpt2()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert f"GPT2LMHeadModel: {num_parameters:,} parameters" in result.output
    for unit in PipelineTemplate.get_modules(model):
        assert unit in result.output
    assert "| transformer.h.0 float32[2, 8, 16]" in result.output
    assert "tied: transformer.wte.weight = lm_head.weight" in result.output
    assert "stage 0: transformer.wte to " in result.output and " to lm_head, " in result.output


@pytest.mark.parametrize("make", ["folder", "test_cli:GPT2LMHeadModel", "GPT2LMHeadModel"])
def test_check_takes_folders_and_classes(make: str, tmp_path: Path) -> None:
    if make == "folder":
        small_gpt2().config.save_pretrained(tmp_path)
        config = GPT2Config.from_pretrained(tmp_path)
        config.architectures = ["GPT2LMHeadModel"]
        config.save_pretrained(tmp_path)
    result = run("check", tmp_path if make == "folder" else make)
    num_layers = 3 if make == "folder" else GPT2Config().n_layer
    assert result.exit_code == 0 and result.output.count("GPT2Block") == num_layers


def test_check_says_why_not_with_status_1() -> None:
    result = run("check", "ReformerForMaskedLM")
    assert result.exit_code == 1 and "cannot be split: " in result.output


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 8), (3, 2)])
def test_simulate_gives_the_closed_formula_of_1f1b(ranks: int, microbatches: int) -> None:
    seconds, best, bubble, *_ = rows(run("simulate", "1f1b", "-p", ranks, "-m", microbatches))["1f1b"]
    forward, backward = 1.0, 2.0
    assert float(seconds) == (microbatches + ranks - 1) * (forward + backward)
    # With an optimizer barrier no order beats m t + (p - 1) F.
    assert float(best) == microbatches * (forward + backward) + (ranks - 1) * forward
    assert bubble == f"{(ranks - 1) / (microbatches + ranks - 1):.1%}"


def test_simulate_compares_all_schedules_on_the_same_work() -> None:
    table = rows(run("simulate"))
    assert tuple(table) == schedule_names()
    assert table["gpipe"][-1] == "8 each" and table["1f1b"][-1] == "4 3 2 1"


def test_costs_may_differ_between_ranks() -> None:
    slow = rows(run("simulate", "gpipe", "-p", 2, "-m", 1, "--forward", "1,3", "--backward", 2, "--weight", "0,5"))
    assert float(slow["gpipe"][0]) == 1 + 3 + (2 + 5) + 2
    late = rows(run("simulate", "gpipe", "-p", 2, "-m", 1, "--latency", 0.5, "--bandwidth", 8, "--message-bytes", 2))
    assert float(late["gpipe"][0]) == 6 + 2 * (0.5 + 2 / 8)


def test_a_schedule_in_a_file_is_simulated_with_its_own_numbers(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(format_schedule(build("1f1b", 3, 5)))
    table = rows(run("simulate", file, "1f1b"))
    assert table["mine"] == table["1f1b"] and float(table["mine"][0]) == (5 + 3 - 1) * 3


def test_many_ranks_are_summed_up() -> None:
    assert rows(run("simulate", "1f1b", "-p", 16, "-m", 32))["1f1b"][-1] == "1 to 16"


def test_draw_writes_a_picture_and_a_trace_with_every_action(tmp_path: Path) -> None:
    picture, trace = tmp_path / "picture.svg", tmp_path / "trace.json"
    assert str(picture) in run("draw", "1f1b", "-p", 2, "-m", 3, "-o", picture).output.replace("\n", "")
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert run("draw", "1f1b", "-p", 2, "-m", 3, "-o", trace).exit_code == 0
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert sum(event["cat"] in "FB" for event in events) == 2 * 2 * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "GPT2LMHeadModle"], "transformers has no class GPT2LMHeadModle; did you mean GPT2LMHeadModel?"),
        (["check", "test_cli:absent"], "module test_cli has no 'absent'"),
        (["check", "absent_module:name"], "No module named 'absent_module'"),
        (["check", "test_cli:Path"], "is no model, model class, configuration, or checkpoint"),
        (["check", "/absent/folder"], "/absent/folder"),
        (["simulate", "1f2b"], "unknown schedule '1f2b': known are gpipe, 1f1b"),
        (["simulate", "-p", "0"], "a pipeline has at least 1 rank, but num_ranks is 0"),
        (["simulate", "-m", "-1"], "a step has at least 1 microbatch, but num_microbatches is -1"),
        (["simulate", "--forward", "1,x"], "--forward must be one number, or one per rank with commas, but is '1,x'"),
        (["simulate", "-p", "3", "--weight", "1,2"], "--weight has 2 numbers, but the pipeline has 3 ranks"),
        (["simulate", "--latency", "-1"], "latency must not be negative"),
        (["simulate", "--bandwidth", "0"], "bandwidth must be above 0"),
        (["simulate", "absent.csv"], "absent.csv: No such file or directory"),
        (["draw", "1f1b", "-o", "picture.png"], "picture.png"),
        (["draw", "1f1b", "-o", "/absent/picture.svg"], "/absent/picture.svg: No such file or directory"),
        (["draw", "zb-v", "--stages-per-rank", "3"], "schedule 'zb-v' has 2 stages per rank"),
    ],
)
def test_mistakes_end_with_one_line_and_status_1(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert result.stderr.count("\n") == 1


def test_defects_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object) -> None:
        raise AttributeError("a defect")

    monkeypatch.setattr("penstock.cli.schedules.simulate_schedule", defect)
    assert isinstance(run("simulate").exception, AttributeError)
