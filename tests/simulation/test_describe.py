"""What a layout looks like: the table, the picture, the command."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from penstock.cli import app
from penstock.layout.announce import compact
from penstock.layout.layout import Layout
from penstock.modeling.weights.whole import stage_sizes
from penstock.schedule import build
from penstock.simulation.describe import LayoutDescription, describe_pipelines
from tests.support.families import FAMILIES
from tests.support.hetero import make_plugin
from tests.support.pool import Pool

SVG = "{http://www.w3.org/2000/svg}"


def description() -> LayoutDescription:
    return describe_pipelines(FAMILIES["gpt2"].build(), [(1, 2), (3, 6)], 4, "1f1b")


def test_the_table_has_every_stage_with_its_rank_units_parameters_and_share() -> None:
    model = FAMILIES["gpt2"].build()
    text = str(description())
    assert "global batch: 8 microbatches of 4 = 32 samples" in text and "3 segment(s)" in text
    total = sum(parameter.numel() for parameter in model.parameters())
    first, second = text.partition("pipeline 0: 2 microbatches, 25.0% of the batch")[2].split("pipeline 1: ")
    assert f"{total:,}" in first and "transformer.wte" in first
    assert second.startswith("6 microbatches, 75.0% of the batch")
    assert all(len(line) <= 80 for line in text.splitlines())


def test_stages_hold_their_own_parameters_and_the_tied_one_twice() -> None:
    model = FAMILIES["gpt2"].build()
    blocks = [f"transformer.h.{index}" for index in range(4)]
    units = ["transformer.wte", "transformer.wpe", *blocks, "transformer.ln_f", "lm_head"]
    tied = model.get_input_embeddings().weight.numel()
    total = sum(parameter.numel() for parameter in model.parameters())
    assert stage_sizes(model, [units]) == [total]
    assert sum(stage_sizes(model, [units[:4], units[4:]])) == total + tied
    assert sum(stage_sizes(model, [units[:3], units[3:5], units[5:]])) == total + tied


def test_names_of_blocks_are_joined() -> None:
    units = ["a.wte", "a.h.0", "a.h.1", "a.h.2", "a.h.4", "b.h.5", "head"]
    assert compact(units) == "a.wte, a.h.0-2, a.h.4, b.h.5, head"


def test_the_picture_has_a_box_for_each_stage_and_the_timeline_below(tmp_path: Path) -> None:
    drawn = description()
    root = ElementTree.parse(drawn.write_svg(tmp_path / "layout.svg")).getroot()
    own = [rect for rect in root.findall(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert len(own) == 4
    widths = [float(rect.get("width", 0)) for rect in own]
    assert widths[0] == pytest.approx(sum(widths[1:]), abs=0.5), "all pipelines hold all units"
    (timeline,) = root.findall(f"{SVG}svg")
    assert float(timeline.get("y", 0)) > max(float(rect.get("y", 0)) for rect in own)
    with pytest.raises(ValueError, match=r"drawn as \.svg, but the path is"):
        drawn.write_svg(tmp_path / "layout.png")


def test_schedules_with_several_stages_on_a_rank_have_a_row_for_each_stage() -> None:
    drawn = describe_pipelines(FAMILIES["gpt2"].build(), [(1, 2), (2, 6)], 4, "zb-v")
    assert [pipeline.stage_to_rank for pipeline in drawn.layout.pipelines] == [(0,), (0, 1, 1, 0)]
    assert "schedule 1f1b, zb-v;" in str(drawn) and "8 microbatches of 4" in str(drawn)
    assert [len(pipeline.bubble) for pipeline in drawn.simulate().pipelines] == [1, 2]
    assert drawn.svg().count("<svg ") == 2


def test_without_a_model_modules_count_alike() -> None:
    layout = Layout.place([[["a", "b"]], [["a"], ["b"]]])
    plain = LayoutDescription("mine", layout, (build("1f1b", 1, 1), build("1f1b", 2, 2)), 1)
    assert "33.3%" in str(plain)
    # Two modules of one second each and backwards of two: one microbatch on one rank, two on two ranks.
    step = plain.simulate()
    assert [pipeline.makespan for pipeline in step.pipelines] == pytest.approx([6.0, 9.0])


def printed(plot: str) -> tuple[str, str]:
    import contextlib
    import io

    model = FAMILIES["gpt2"].build()
    plugin = make_plugin(model, "1x1,2x3")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        before = plugin.describe()
        plugin.configure(model)
        after = plugin.describe(plot=plot)
    assert before.parameters is None and after.parameters is not None
    return out.getvalue(), str(after)


def test_the_plugin_prints_on_the_first_rank_only(pool: Pool, tmp_path: Path) -> None:
    (first, table), (second, same), (third, _) = pool.run(3, printed, str(tmp_path / "layout.svg"))
    assert first.endswith(f"{table}\n") and table == same and not second and not third
    assert (tmp_path / "layout.svg").exists()


def test_the_command(tmp_path: Path) -> None:
    FAMILIES["gpt2"].build().config.save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("{", '{"architectures": ["GPT2LMHeadModel"],', 1))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["describe", str(tmp_path / "model"), *arguments], env={"COLUMNS": "200"})

    result = run("--pipelines", "1x1,2x3", "--microbatch-size", "2", "--plot", str(tmp_path / "layout.svg"))
    assert result.exit_code == 0, result.output
    assert "GPT2LMHeadModel: 2 pipeline(s) on 3 rank(s)" in result.output and (tmp_path / "layout.svg").exists()
    data = json.loads(run("--pipelines", "1x1,2x3", "--microbatch-size", "2", "--json").output)
    assert data["global_batch_size"] == 8 and [line["share_of_batch"] for line in data["pipelines"]] == [0.25, 0.75]
    assert [[stage["ranks"] for stage in line["stages"]] for line in data["pipelines"]] == [[[0]], [[1], [2]]]
    whole, *halves = (stage for line in data["pipelines"] for stage in line["stages"])
    assert whole["units"] == [unit for half in halves for unit in half["units"]]
    assert all(f"{stage['parameters']:,}" in result.output for stage in (whole, *halves))
    for arguments, message in (
        (("--pipelines", "2x1", "--schedule", "zbv"), "unknown schedule 'zbv'"),
        (("--pipelines", "1x"), "such as 1x3,2x5"),
    ):
        wrong = run(*arguments)
        assert wrong.exit_code == 1 and message in wrong.stderr and "Traceback" not in wrong.stderr
