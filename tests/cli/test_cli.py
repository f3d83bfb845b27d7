"""The command line: its figures against closed formulas, its files, and mistakes that end with one line."""

import ast
import json
import logging
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import CausalLMOutput
from typer.testing import CliRunner, Result

import penstock
from penstock import PipelineTemplate
from penstock.checking.check import Report, UnitReport
from penstock.cli import app
from penstock.cli.models import waiting
from penstock.config.configuration import Configuration
from penstock.layout.announce import compact
from penstock.modeling.graph.crossing import BoundaryReport, BoundaryValue
from penstock.schedule import build, schedule_names
from penstock.schedule.text import format_schedule
from tests.support.launch import run_python
from tests.support.pool import Pool
from tests.support.training import parallelize

COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands]  # type: ignore[union-attr]


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


def small_mamba() -> MambaForCausalLM:
    return MambaForCausalLM(MambaConfig(num_hidden_layers=2, hidden_size=16, state_size=4, vocab_size=32))


def small_t5(layers: int = 4) -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(num_layers=layers, num_decoder_layers=layers, d_model=16, d_kv=8, d_ff=32, num_heads=2, vocab_size=32)
    )


def smallest_t5() -> T5ForConditionalGeneration:
    return small_t5(1)


def small_mixtral() -> MixtralForCausalLM:
    config = MixtralConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, num_local_experts=4,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def small_gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=32))


def test_check_shows_units_cuts_ties_and_the_spread_over_stages() -> None:
    result = run("check", "tests.cli.test_cli:small_gpt2", "--stages", 2)
    assert result.exit_code == 0, result.output
    model = small_gpt2()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert f"GPT2LMHeadModel: {num_parameters:,} parameters" in result.output
    shown = [line.split()[0] for line in result.output.splitlines() if line.startswith("  ") and "|" not in line]
    assert shown == compact(PipelineTemplate.get_modules(model)).split(", ")
    block = sum(parameter.numel() for parameter in model.transformer.h[0].parameters())
    assert f"transformer.h.0-2  GPT2Block  {f'3 x {block:,}':>18}" in result.output
    assert "| each transformer.h.N float32[2, 8, 16]" in result.output
    assert "tied: transformer.wte.weight = lm_head.weight" in result.output
    assert "stage 0: transformer.wte to " in result.output and " to lm_head, " in result.output


@pytest.mark.parametrize("make", ["folder", "tests.cli.test_cli:GPT2LMHeadModel", "GPT2LMHeadModel"])
def test_check_takes_folders_and_classes(make: str, tmp_path: Path) -> None:
    if make == "folder":
        small_gpt2().config.save_pretrained(tmp_path)
        config = GPT2Config.from_pretrained(tmp_path)
        config.architectures = ["GPT2LMHeadModel"]
        config.save_pretrained(tmp_path)
    result = run("check", tmp_path if make == "folder" else make)
    num_layers = 3 if make == "folder" else GPT2Config().n_layer
    assert result.exit_code == 0 and f"transformer.h.0-{num_layers - 1}  GPT2Block" in result.output


NET = """
import torch
from torch import nn
from tests.checking.test_check import ByHand, Two, WithDummies

class Wide(Two):
    def __init__(self, width):
        super().__init__(width)

def pair():
    return {"left": torch.zeros(6, 4), "right": torch.zeros(6, 4), "target": torch.zeros(6)}
"""


def test_one_option_gives_a_models_inputs_to_all_commands(tmp_path: Path) -> None:
    """Also those that only a criterion takes; a class of one's own is made without arguments."""
    script = tmp_path / "net_of_a_test.py"
    script.write_text(NET)
    for name in ("ByHand", "WithDummies"):
        assert run("check", f"{script}:{name}").exit_code == 0
    alone = run("check", f"{script}:Two")
    assert alone.exit_code == 1 and "needs inputs" in alone.output and "Auto policy" not in alone.output
    assert "does not make a model: TypeError" in run("check", f"{script}:Wide").stderr
    given = ("--inputs", f"{script}:pair")
    checked = run("check", f"{script}:Two", *given)
    assert checked.exit_code == 0 and "left[6, 4], right[6, 4]" in checked.output
    for command in ("fit", "plan"):  # with microbatches of as many samples
        planned = run(command, f"{script}:Two", *given)
        assert planned.exit_code == 0 and '"microbatch_size": 6' in planned.output, planned.output


def test_check_says_why_not_with_status_1() -> None:
    result = run("check", "ReformerModelWithLMHead")
    assert result.exit_code == 1 and "cannot be split: " in result.output
    data = json.loads(run("check", "ReformerModelWithLMHead", "--json").output)
    assert not data["splittable"] and data["reason"] and data["units"] == []


def test_check_joins_only_units_that_are_equal_in_all_that_is_shown() -> None:
    """T5's first block has the position bias, and after the last one nothing but the hidden state crosses."""
    lines = run("check", "tests.cli.test_cli:small_t5").output.splitlines()
    units = [line.split()[0] for line in lines if line.startswith("  ") and "T5Block" in line]
    assert units == [f"{half}.block.{which}" for half in ("encoder", "decoder") for which in ("0", "1-2", "3")]
    assert "    | each encoder.block.N float32[3, 5, 16]; encoder.block.N output 1" in lines


def test_checks_json_has_all_that_the_text_shows() -> None:
    data = json.loads(run("check", "tests.cli.test_cli:small_gpt2", "--stages", 2, "--json").output)
    model = small_gpt2()
    modules = PipelineTemplate.get_modules(model)
    assert [unit["name"] for unit in data["units"]] == modules and data["splittable"]
    assert [boundary["after"] for boundary in data["boundaries"]] == modules[:-1]
    crossing = {"value": "transformer.h.0", "dtype": "float32", "shape": [2, 8, 16], "bytes": 4 * 2 * 8 * 16}
    assert data["boundaries"][2]["crossing"] == [crossing]
    assert data["tied"] == [["transformer.wte.weight", "lm_head.weight"]]
    assert [unit for stage in data["stages"] for unit in stage["units"]] == modules
    sizes = [sum(parameter.numel() for parameter in model.get_submodule(unit).parameters()) for unit in modules]
    assert sum(stage["parameters"] for stage in data["stages"]) == sum(sizes)


def test_simulates_json_has_the_tables_figures() -> None:
    table, data = (
        rows(run("simulate", "-p", 3, "-m", 6)),
        json.loads(run("simulate", "-p", 3, "-m", 6, "--json").output),
    )
    assert [line["schedule"] for line in data] == list(table)
    for line in data:
        seconds, best, bubble, *_ = table[line["schedule"]]
        assert (f"{line['seconds']:.6g}", f"{line['seconds_at_best']:.6g}", f"{line['bubble']:.1%}") == (
            seconds,
            best,
            bubble,
        )
        assert len(line["bubble_of_each_rank"]) == len(line["held_by_each_rank"]) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "ReformerForMaskedLM"],
        ["simulate", "-p", "8", "-m", "12", "--forward", "1,2,3,4,5,6,7,8"],
        ["--help"],
        *([command, "--help"] for command in COMMANDS),
    ],
    ids=" ".join,
)
def test_everything_fits_80_columns(arguments: list[str]) -> None:
    assert len(lines_of(*arguments)) > 1


def lines_of(*arguments: str) -> list[str]:
    """What a command prints, of which no line is longer than 80 characters, but for a single word such as a path."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    lines = result.output.splitlines()
    assert not [line for line in lines if len(line) > 80 and len(line.split()) > 1]
    return lines


LONG = "modality_specific_projection_layers_of_the_encoder"


class LongNames(GPT2LMHeadModel):
    """The blocks of a GPT-2 under another name."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        blocks = self.transformer.h
        del self.transformer.h
        setattr(self.transformer, LONG, blocks)
        self.tie_weights()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> CausalLMOutput:
        hidden = self.transformer.wte(input_ids)
        for block in getattr(self.transformer, LONG):
            hidden = block(hidden)
        logits = self.lm_head(self.transformer.ln_f(hidden))
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def long_names() -> LongNames:
    return LongNames(GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=32))


def save_long_names(folder: str) -> None:
    penstock.save_checkpoint(folder, model=parallelize(long_names(), 2))
    # A class of one's own cannot be merged by the command, which has to find it.
    plain = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=32))
    penstock.save_checkpoint(f"{folder}-plain", model=parallelize(plain, 2))


@pytest.mark.slow
def test_every_command_fits_80_columns_with_long_names(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.run(2, save_long_names, str(tmp_path / "saved"))
    monkeypatch.chdir(tmp_path)
    model = ["tests.cli.test_cli:long_names"]
    runs = {
        "check": [*model, "--stages", "2"],
        "verify": [*model, "--steps", "1", "--microbatches", "2"],
        "describe": [*model, "--pipelines", "1x2,2x6", "--schedule", "interleaved-1f1b"],
        "profile": [*model, "-o", "profile.json", "--length", "8"],
        "plan": [*model, "--devices", "a100:3,t4:2", "--speed", "a100=9,t4=2", "--profile", "profile.json"],
        "fit": [*model, "--devices", "3090:2", "--length", "8", "--lora-rank", "4"],
        "simulate": ["-p", "7", "-m", "9", "--activation-bytes", ",".join(["123456789"] * 6 + ["1.5e9"])],
        "draw": ["zb-h1", "-p", "12", "-m", "24", "-o", "step.svg"],
        "inspect": ["saved", "--parameters"],
        "merge": ["saved-plain", "merged", "--max-shard-size", "8KB"],
    }
    # The store prints one line, and stays; the tables of bench have a test in tests/benchmarks/test_table.py.
    assert {*runs, "store", "bench"} == set(COMMANDS)
    assert any(LONG in line for line in lines_of("check", *runs["check"]))
    for command, arguments in runs.items():
        assert not any("error" in line for line in lines_of(command, *arguments)), command
    # A merge prints every file, and replaces nothing unasked.
    again = run("merge", *runs["merge"])
    assert again.exit_code == 1 and "merged exists: name another folder, or give --overwrite" in again.stderr
    printed = run("merge", *runs["merge"], "--overwrite").output.replace("\n", " ")
    assert "config.json" in printed and all(path.name in printed for path in (tmp_path / "merged").iterdir())
    assert "merged is an ordinary checkpoint of transformers" in run("inspect", "merged").stderr


def test_long_names_take_a_line_of_their_own() -> None:
    name, kind = "model.language_model.text_and_vision.decoder.layers", "Qwen2VLVisionTransformerBlock"
    units = [UnitReport(f"{name}.{number}", kind, 20_000_000_000, 1.0) for number in range(80)]
    boundaries = [BoundaryReport(unit.name, (BoundaryValue(unit.name, (2, 8, 8192), torch.float32),)) for unit in units]
    head = UnitReport("lm_head", "Linear", 1, 1.0)
    lines = Report("Long", 1, units=(*units, head), boundaries=tuple(boundaries)).render().splitlines()
    assert f"  {name}.0-79" in lines and max(map(len, lines)) <= 80
    assert any(kind in line and "80 x 20,000,000,000" in line and "80 x 1.00" in line for line in lines)


def test_the_old_names_of_options_are_known() -> None:
    arguments = ["plan", "tests.cli.test_cli:small_gpt2", "--devices", "1", "--json"]
    old, new, other = (
        run(*arguments, *words).output
        for words in (
            ("--global-batch", "8", "--microbatch", "2"),
            ("--global-batch-size", "8", "--microbatch-size", "2"),
            ("--global-batch-size", "16", "--microbatch-size", "4"),
        )
    )
    assert old == new != other


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 8), (3, 2)])
def test_simulate_gives_the_closed_formula_of_1f1b(ranks: int, microbatches: int) -> None:
    seconds, best, bubble, *_ = rows(run("simulate", "1f1b", "-p", ranks, "-m", microbatches))["1f1b"]
    forward, backward = 1.0, 2.0
    assert float(seconds) == (microbatches + ranks - 1) * (forward + backward)
    # With an optimizer barrier no order beats m t + (p - 1) F.
    assert float(best) == microbatches * (forward + backward) + (ranks - 1) * forward
    assert bubble == f"{(ranks - 1) / (microbatches + ranks - 1):.1%}"


def test_options_are_never_cut() -> None:
    for command in typer.main.get_command(app).commands.values():  # type: ignore[attr-defined]
        text = CliRunner().invoke(app, [command.name, "--help"], env={"COLUMNS": "80"}).output
        shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
        names = [name for parameter in shown for name in parameter.opts if name.startswith("--")]
        assert names and all(name in text for name in names) and "…" not in text


@pytest.mark.slow
def test_the_package_is_a_command_and_a_hub_that_cannot_be_reached_is_an_error_at_once() -> None:
    """The endpoint is a port where nobody listens; the library alone asks it five times over half a minute."""
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    result = run_python("-m", "penstock", "check", "Nobody/GPT2", environment=environment, fresh=True)
    assert result.returncode == 1
    # And nothing else: no attempts, no notes of what transformers imports.
    assert result.stderr.startswith("error: We couldn't connect to 'http://127.0.0.1:9'"), result.stderr


@pytest.mark.parametrize("notebook", [False, True])
def test_a_spinner_turns_in_terminals_but_not_in_the_output_of_a_cell(
    notebook: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    if notebook:
        monkeypatch.setenv("JPY_PARENT_PID", "1")
    with waiting("planning"):
        pass
    written = capsys.readouterr()
    assert written.out == "" and ("planning ..." in written.err) != notebook


def test_plans_that_look_the_same_say_in_what_they_differ() -> None:
    plans = rows(run("plan", "GPT2LMHeadModel", "--devices", "l4:2,t4:2", "--schedule", "1f1b", "--most", 5))
    alike = [name for name in plans if name.startswith("2 of 2x8: ")]
    assert len(alike) == 2 and alike[0] != alike[1]


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
    assert "relative time" in picture.read_text() and " s<" not in picture.read_text()
    run("draw", "1f1b", "-p", 2, "-m", 3, "-o", picture, "--forward", "2")
    assert "time (s)" in picture.read_text()
    assert run("draw", "1f1b", "-p", 2, "-m", 3, "-o", trace).exit_code == 0
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert sum(event["cat"] in "FB" for event in events) == 2 * 2 * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "GPT2LMHeadModle"], "transformers has no class GPT2LMHeadModle; did you mean GPT2LMHeadModel?"),
        (["check", "tests.cli.test_cli:absent"], "module tests.cli.test_cli has no 'absent'"),
        (["check", "absent_module:name"], "No module named 'absent_module'"),
        (["check", "tests.cli.test_cli:Path"], "is no model, model class, configuration, or checkpoint"),
        (["check", "/absent/folder"], "/absent/folder"),
        (
            ["plan", "tests.cli.test_cli:small_gpt2", "--devices", "h100x:2"],
            "called h100x; nearest are h100, v100, h200",
        ),
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
def test_mistakes_end_with_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    # As the console script does, before or after diffusers is imported.
    monkeypatch.setenv("DIFFUSERS_VERBOSITY", "error")
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert result.stderr.count("\n") == 1


def test_defects_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object) -> None:
        raise AttributeError("a defect")

    monkeypatch.setattr("penstock.cli.schedules.simulate_schedule", defect)
    assert isinstance(run("simulate").exception, AttributeError)


@pytest.mark.parametrize("devices", ["1000000", "99999999999999999999", "a100:3000,t4:3000"])
def test_more_devices_than_can_be_planned_are_refused_at_once(devices: str) -> None:
    result = run("plan", "tests.cli.test_cli:small_gpt2", "--devices", devices)
    assert result.exit_code == 1 and "the planner looks at 4,096 at most" in f"{result.output}{result.exception}"


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    result = run("inspect", tmp_path / "nowhere")
    assert result.exit_code == 1 and "nowhere is no directory" in f"{result.output}{result.exception}"
    for path in (str(tmp_path / "nowhere"), "./nowhere"):
        with pytest.raises(FileNotFoundError, match="nowhere is no directory: there is no model to load"):
            penstock.from_pretrained(path, config={"model_parallelism": {"pipeline_parallel_size": 1}})


def test_fit_gives_a_verdict_a_table_and_a_configuration(tmp_path: Path) -> None:
    arguments = ("fit", "tests.cli.test_cli:small_gpt2", "--length", 16, "--lora-rank", 4, "--devices", 2)
    result = run(*arguments, "--memory", "1GB", "--all", "--plot", tmp_path / "memory.svg")
    verdict, *lines = result.output.splitlines()
    assert verdict.startswith("It fits: ") and (tmp_path / "memory.svg").exists()
    rows = [line for line in lines if line.split() and line.split()[-1] not in ("fits", "tok/s") and " yes " in line]
    # 7 ways, each with recomputed activations, the loss in chunks, both and neither; and all in two parts, too.
    assert len(rows) == 28 + 28
    section = json.loads(next(line for line in lines if line.startswith("{")))
    assert Configuration.from_any(section).microbatch_size == 1
    shorter = run(*arguments, "--memory", "1GB").output.splitlines()
    assert shorter[0] == verdict and sum(" yes " in line for line in shorter) == 7  # the best of each way
    assert run(*arguments, "--memory", "1KB").output.startswith("It does not fit in any of these ways. Nearest is nf4")
    assert "The fullest device, in kB." in " ".join(result.output.split()) and "bf16" in result.output
    # These do not compute in bfloat16.
    for name in ("t4", "v100-32gb"):
        older = run(*arguments[:-2], "--devices", f"{name}:2").output
        assert "LoRA 4" in older and "bf16" not in older and "torch.bfloat16" not in older
        assert f"no bfloat16 on {name}" in " ".join(older.split())
    other = run(*arguments[:-2], "--devices", "2080ti:2", "--memory", "1GB").output
    assert "bfloat16 taken for granted on 2080ti" in " ".join(other.split())
    pairs = run("fit", "tests.checking.test_check:Two", "--inputs", "tests.cli.test_cli:small_gpt2", "--dpo")
    assert pairs.exit_code == 1 and "--dpo is of pairs of sequences: give their --length" in pairs.stderr


@pytest.mark.slow
def test_fit_for_dpo_counts_pairs_and_the_reference() -> None:
    """The reference has the weights once more, unless it is the base of the adapters."""
    arguments = ("fit", "tests.cli.test_cli:small_gpt2", "--length", 16, "--lora-rank", 4)

    def weights_and_activations(*more: object) -> dict[str, list[float]]:
        rows = [line[15:].replace("chunk", "").replace("ckpt", "").replace("both", "").split() for line in lines(*more)]
        names = [line[:15].strip() for line in lines(*more)]
        return {name: [float(row[0]), float(row[3])] for name, row in zip(names, rows, strict=True)}

    def lines(*more: object) -> list[str]:
        return [line for line in run(*arguments, *more).output.splitlines() if " yes " in line]

    alone, of_pairs = weights_and_activations(), weights_and_activations("--dpo")
    assert alone.keys() == of_pairs.keys() and "float32" in alone and "LoRA 4" in alone
    for name, (weights, activations) in of_pairs.items():
        assert weights == pytest.approx(alone[name][0] * (1 if "LoRA" in name else 2), abs=0.02), name
        assert activations == pytest.approx(2 * alone[name][1], rel=0.05), name
    assert '"microbatch_size": 1}' in run(*arguments, "--dpo").output, "pairs"
    assert "2 parts" in run(*arguments, "--devices", 2, "--all").output
    assert "2 parts" not in run(*arguments, "--devices", 2, "--all", "--dpo").output  # which its trainer would refuse


def test_fit_takes_adapters_on_models_whose_code_reads_the_weights_of_layers() -> None:
    arguments = ("--length", 4, "--lora-rank", 4, "--devices", 2)
    result = run("fit", "tests.cli.test_cli:smallest_t5", *arguments)
    assert result.exit_code == 0 and "nf4, LoRA 4" in result.output, result.output
    assert "parts" not in result.output  # a run would refuse an encoder and a decoder
    refused = run("fit", "tests.cli.test_cli:small_mamba", *arguments)
    assert refused.exit_code == 1 and isinstance(refused.exception, SystemExit)
    assert "nf4, LoRA 4: this MambaForCausalLM computes with the weights of linear layers itself" in refused.output


def test_experts_are_planned_in_float32() -> None:
    """Of a grouped product on the meta device torch knows bfloat16 only."""
    result = run("plan", "tests.cli.test_cli:small_mixtral", "--length", 16, "--devices", 2, "--json")
    assert result.exit_code == 0, result.output
    weights = sum(parameter.nbytes for parameter in small_mixtral().parameters())
    assert all(max(pipeline["bytes of each rank"]) > weights for pipeline in json.loads(result.output)[0]["pipelines"])


def test_a_model_of_ones_own_has_the_type_that_is_asked_for(tmp_path: Path) -> None:
    def needed(*more: object) -> float:
        (plan,) = json.loads(run("plan", *SMALL, "--json", *more).output)
        return max(plan["pipelines"][0]["bytes of each rank"])

    assert needed() == needed("--dtype", "fp32")
    assert needed("--dtype", "bf16") == pytest.approx(needed() / 2, rel=0.1)
    for asked, expected in (((), "float32"), (("--dtype", "float64"), "float64")):
        assert run("profile", *SMALL, *asked, "-o", tmp_path / "profile.json").exit_code == 0
        assert json.loads((tmp_path / "profile.json").read_text())["about"]["dtype"] == expected


def test_recomputation_is_chosen_where_it_makes_the_job_fit() -> None:
    arguments = ("plan", "tests.cli.test_cli:small_gpt2", "--length", 16, "--global-batch-size", 32, "--json")

    def needed(how: str) -> float:
        plans = json.loads(run(*arguments, "--checkpointing", how).output)
        return min(max(max(one["bytes of each rank"]) for one in plan["pipelines"]) for plan in plans)

    kept, recomputed = needed("none"), needed("all")
    assert recomputed < kept and needed("auto") == kept  # it is faster
    between = ("--memory", str((recomputed + kept) / 2))
    assert run(*arguments, *between, "--checkpointing", "none").exit_code == 1
    assert run(*arguments, *between, "--checkpointing", "auto").exit_code == 0
    said = run(*arguments[:-1], *between, "--checkpointing", "auto").output
    assert "It fits with recomputed activations only. Without, no plan: " in said.replace("\n", " ")


def test_a_sharded_optimizer_and_a_packed_base_make_jobs_fit() -> None:
    arguments = ("plan", "tests.cli.test_cli:small_gpt2", "--devices", 2, "--length", 16, "--global-batch-size", 8)
    arguments = (*arguments, "--copies", 2)

    def needed(*more: object) -> float:
        plans = json.loads(run(*arguments, "--json", *more).output)
        return min(max(max(one["bytes of each rank"]) for one in plan["pipelines"]) for plan in plans)

    whole, sharded = needed(), needed("--sharded-optimizer")
    adapted, packed = needed("--lora-rank", 2), needed("--lora-rank", 2, "--quantization", "nf4")
    assert packed < adapted < sharded < whole
    limit = ("--memory", str((whole + sharded) / 2))
    assert run(*arguments, *limit).exit_code == 1
    said = run(*arguments, *limit, "--sharded-optimizer").output.replace("\n", " ")
    assert "It fits with a sharded optimizer only. Without, no plan: " in said
    for more, why in (
        (["--quantization", "nf4"], "--quantization needs --lora-rank"),
        (["--quantization", "nf3", "--lora-rank", 2], "quantization must be one of nf4, fp4, nf4-double, int8"),
    ):
        result = run(*arguments, *more)
        assert result.exit_code == 1 and why in result.stderr


OWN = """
import torch
from tests.checking.test_check import Two

def pair():
    return {"left": torch.zeros(6, 4), "right": torch.zeros(6, 4)}
"""
SMALL = ("tests.cli.test_cli:small_gpt2", "--length", "8")
SHARDED = ("--devices", "2", "--copies", "2", "--sharded-optimizer")
UNKNOWN = ("plan", *SMALL, "--devices", "mine:1,3090:1")
# A mistake, what is said, and the options that this asks for; None leaves one out.
ADVICE: list[tuple[tuple[str, ...], str, dict[str, str | None]]] = [
    (
        UNKNOWN,
        "For another card add --speed mine=0.5 --memory mine=24GB",
        {"--speed": "mine=0.5", "--memory": "mine=24GB"},
    ),
    (("fit", *UNKNOWN[1:]), "--speed mine=0.5 --memory", {"--speed": "mine=0.5", "--memory": "mine=24GB"}),
    (
        ("fit", *UNKNOWN[1:], "--memory", "3090=20GB", "--speed", "3090=1"),
        "--speed 3090=1,mine=0.5 --memory 3090=20GB,mine=24GB",
        {"--speed": "3090=1,mine=0.5", "--memory": "3090=20GB,mine=24GB"},
    ),
    (
        ("plan", *SMALL, "--profile", "{profile}", "--devices", "a100:1,t4:1"),
        "how fast is a100; the profile was measured on cpu, whose data sheet is not known. For another card add "
        "--speed a100=0.5,t4=0.5",
        {"--speed": "a100=0.5,t4=0.5"},
    ),
    (("fit", *SMALL, "--devices", "mine:2"), "add --memory mine=24GB", {"--memory": "mine=24GB"}),
    (("fit", *SMALL, "--devices", "2"), "limit of memory (--memory 24GB)", {"--memory": "24GB"}),
    (("fit", *SMALL, "--devices", "3090:2"), "(--all shows more)", {"--all": ""}),
    (
        ("fit", "GPT2LMHeadModel", "--length", "8", "--memory", "600MB"),
        "adapters may fit (--lora-rank 16)",
        {"--lora-rank": "16"},
    ),
    (("plan", *SMALL, "--global-batch-size", "10"), "give --global-batch-size 12", {"--global-batch-size": "12"}),
    (("plan", *SMALL, "--dtype", "b16"), "give --dtype bf16", {"--dtype": "bf16"}),
    (("plan", *SMALL, "--quantization", "nf4"), "--quantization needs --lora-rank 16", {"--lora-rank": "16"}),
    (("plan", *SMALL, "--checkpointing", "some"), "give --checkpointing none or", {"--checkpointing": "none"}),
    (("plan", *SMALL, "--memory", "{between}"), "It fits with --checkpointing all", {"--checkpointing": "all"}),
    (
        ("plan", *SMALL, *SHARDED, "--memory", "{with both}"),
        "It fits with --checkpointing all",
        {"--checkpointing": "all"},
    ),
    (
        ("plan", *SMALL, "--profile", "{profile}", "--quantization", "nf4", "--loss-chunk-tokens", "4"),
        "give --quantization, --lora-rank, --inputs and --loss-chunk-tokens to an estimate, without --profile, or the",
        {"--profile": None, "--lora-rank": "16"},
    ),
    (
        ("plan", "GPT2Model", "--length", "8", "--profile", "{profile}"),
        "is of GPT2LMHeadModel, and not of GPT2Model: leave --profile out",
        {"--profile": None},
    ),
    *(
        (("plan", SMALL[0], "--profile", "{profile}", option, other), f"give {option} {measured}", {option: measured})
        for option, other, measured in (
            ("--length", "128", "8"),
            ("--dtype", "bf16", "float32"),
            ("--optimizer", "sgd", "adam"),
        )
    ),
    (
        ("plan", *SMALL, "--profile", "{profile}", "--microbatch-size", "3"),
        "give --microbatch-size 1",
        {"--microbatch-size": "1"},
    ),
    (
        ("fit", "{own}:Two", "--inputs", "{own}:pair", "--microbatch-size", "4"),
        "--inputs are those of a microbatch, but none of them has 4 samples: leave --microbatch-size out, or give "
        "--microbatch-size 6",
        {"--microbatch-size": "6"},
    ),
    (
        ("simulate", "--stages-per-rank", "4"),
        "--stages-per-rank 4 is of a schedule by name: give interleaved-1f1b too",
        {"interleaved-1f1b": ""},
    ),
    (("plan", "{own}:Two"), "in a command as --inputs SCRIPT.py:NAME", {"--inputs": "{own}:pair"}),
    (("check", "{own}:Two"), "followed (--inputs SCRIPT.py:NAME)", {"--inputs": "{own}:pair"}),
    (("inspect", "{saved}"), "more (--parameters shows all)", {"--parameters": ""}),
    (("merge", "{saved}-plain", "{full}"), "name another folder, or give --overwrite", {"--overwrite": ""}),
]
# What runs processes has tests in tests/checking/test_verify.py.
ELSEWHERE = (
    *(
        "--config says it all",
        "warning: --batch is now --inputs",
        "--layers",
        "loss: give one with --inputs",
    ),
    "--plot needs matplotlib: pip install",
)


@pytest.mark.parametrize("devices", ["a100:1,t4:1", "a100:2,t4:1"])
def test_what_plan_prints_forms_the_pipelines_that_it_planned(devices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, arguments = small_gpt2(), ("plan", *SMALL, "--devices", devices, "--global-batch-size", 12)
    for plan in json.loads(run(*arguments, "--json").output):
        pipelines = plan["pipelines"]
        monkeypatch.setattr(
            "penstock.api.plugin.rank_and_world_size", lambda of=pipelines: (0, sum(len(p["devices"]) for p in of))
        )
        names = {
            "PipelineTemplate": PipelineTemplate,
            "HeterogeneousParallelPlugin": penstock.HeterogeneousParallelPlugin,
        }
        found: dict[str, Any] = {**names, "model": model}
        exec(plan["code"], found)
        made = [found[name] for name in sorted(found) if name.startswith("template_")]
        every = {json.dumps(each["stages"]) for each in pipelines}
        assert {json.dumps(template.modules_per_stage) for template in made} == every and len(made) == len(every)
        if plan["configuration"] is not None:
            Configuration.from_any(plan["configuration"])
            points = plan["configuration"]["model_parallelism"].get("split_points", [])
            assert points == [units[0] for units in pipelines[0]["stages"][1:]]
    printed = run(*arguments).output
    assert "The devices from rank 0 on: " in printed and ("{" in printed or "template_0" in printed)


@pytest.mark.slow
def test_a_packed_base_is_recommended_only_where_a_plain_one_does_not_fit() -> None:
    arguments = ("fit", "GPT2LMHeadModel", "--length", 8, "--lora-rank", 4, "--devices", 1)
    plain, packed = (run(*arguments, "--memory", memory).output for memory in ("1GB", "250MB"))
    assert plain.startswith("It fits: ") and "nf4" not in plain.splitlines()[0]
    assert packed.startswith("It fits: nf4, LoRA 4"), packed


@pytest.fixture(scope="module")
def places(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands for the names in braces in ADVICE."""
    folder = tmp_path_factory.mktemp("advice")
    (folder / "own_of_advice.py").write_text(OWN)
    (folder / "full").mkdir()
    (folder / "full" / "file").write_text("")
    pool.run(2, save_long_names, str(folder / "saved"))
    assert run("profile", *SMALL, "-o", folder / "profile.json").exit_code == 0

    def needed(how: str, *more: str) -> float:
        plans = json.loads(run("plan", *SMALL, "--checkpointing", how, *more, "--most", 50, "--json").output)
        return min(max(max(each["bytes of each rank"]) for each in plan["pipelines"]) for plan in plans)

    names = {"own": "own_of_advice.py", "full": "full", "saved": "saved", "profile": "profile.json"}
    between = (needed("none") + needed("all")) / 2
    with_one = min(needed("none", *SHARDED), needed("all", *SHARDED[:-1]))
    with_both = (with_one + needed("all", *SHARDED)) / 2
    memory = {"between": f"{between:.0f}", "with both": f"{with_both:.0f}"}
    return {name: str(folder / file) for name, file in names.items()} | memory


@pytest.mark.parametrize(("arguments", "said", "options"), ADVICE, ids=[said[:40] for _, said, _ in ADVICE])
def test_the_advice_of_each_error_is_a_command_that_works(
    places: dict[str, str], arguments: tuple[str, ...], said: str, options: dict[str, str | None]
) -> None:
    words = [word.format(**places) for word in arguments]
    first = run(*words)
    printed = " ".join(f"{first.stdout} {first.stderr}".split())
    assert said in printed and all(option in printed for option in options)
    for option, value in options.items():
        if option in words:
            place = words.index(option)
            del words[place : place + 2]
        words += [] if value is None else [option, value.format(**places)] if value else [option]
    again = run(*words)
    assert again.exit_code == 0, again.output
    assert said not in " ".join(f"{again.stdout} {again.stderr}".split())


def test_every_advice_of_the_commands_is_tried() -> None:
    """Whatever text of their sources names an option is part of what a line of ADVICE says."""
    source = Path(penstock.__file__).parent
    files = [file for folder in ("cli", "checking", "planning") for file in (source / folder).glob("*.py")]
    advice = [said for _, said, _ in ADVICE]
    for file in [*files, source / "modeling/graph/dummy_inputs.py"]:
        tree = ast.parse(file.read_text())
        definitions = [
            node for node in ast.walk(tree) if isinstance(node, ast.Call) and "typer." in ast.unparse(node.func)
        ]
        of_options = {id(inner) for call in definitions for inner in ast.walk(call)}
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for text in ast.walk(ast.Module(function.body, [])):
                if not (isinstance(text, ast.Constant) and isinstance(text.value, str)) or id(text) in of_options:
                    continue
                options = re.findall(r"--[a-z][a-z-]+[a-z]", text.value)
                if options and text.value != ast.get_docstring(function, clean=False):
                    known = any(option in said for said in advice for option in options)
                    assert known or any(part in text.value for part in ELSEWHERE), f"{file.name}: {text.value}"
