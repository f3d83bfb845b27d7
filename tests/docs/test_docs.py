"""The documentation does what it says: its code runs, its commands parse, its links lead somewhere.

Every Python block of README.md, docs/*.md and docs/from/*.md is run, beside a local folder called "gpt2";
tests/docs/pages.txt has what the blocks take for granted, and what is to hold after them.
"""

import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import griffe
import pytest
import typer
from kinds.options import build_parser
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

import draw_pictures
import mkdocs_pages
import penstock
from penstock.cli import app
from penstock.config.configuration import Configuration
from penstock.schedule.registry import SCHEDULES, build, default_stages_per_rank
from tests.support.launch import ROOT
from tests.support.local_hub import local_hub
from tests.support.pool import Pool

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FROM = sorted((ROOT / "docs/from").glob("*.md"))  # a user of another tool reads one of them
ALL_PAGES = [*PAGES, *FROM]
QUIET: Any = {"warnings": False}
LINKING = [
    *ALL_PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "benchmarks/results").glob("*.md")),
]


# ---------------------------------------------------------------- reading a page


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: the line its text begins at, counted from 1, and the heading it stands below."""

    page: Path
    line: int
    heading: str
    language: str
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    heading, fence, begin, lines = "", None, 0, page.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        if line.startswith("```"):
            if fence is None:
                fence, begin = line[3:].strip(), number
            else:
                yield Block(page, begin + 1, heading, fence, "\n".join(lines[begin : number - 1]) + "\n")
                fence = None
        elif fence is None and line.startswith("#"):
            heading = line.lstrip("# ")
    assert fence is None, f"{page}:{begin}: the block does not end"


def prose_of(page: Path) -> list[tuple[int, str]]:
    """The numbered lines outside fenced blocks."""
    inside, found = False, []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            found.append((number, line))
    return found


def spans_of(page: Path) -> list[tuple[int, str]]:
    """Inline code, with the line each begins in; a span may go on in the next line."""
    lines = prose_of(page)
    text, found = "\n".join(line for _, line in lines), []
    for match in re.finditer(r"`([^`]+)`", text):
        number = lines[text.count("\n", 0, match.start())][0]
        found.append((number, match[1].replace("\n", " ")))
    return found


def table_column(page: Path, header: str) -> list[str]:
    """The first cells of the table whose first header is `header`, without quotes and remarks."""
    lines = [line for _, line in prose_of(page)]
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {header} |")) + 2
    cells = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells += re.findall(r"`([^`]+)`", line.split("|")[1])
    return cells


# ---------------------------------------------------------------- Python


@dataclass(frozen=True)
class Run:
    """The Python blocks below some headings of a page, in order, in one namespace, and what is around them.

    Attributes:
        before, after: code around the blocks: what their reader has by then, and what the page says is true then.
        num_layers: of the model that is called "gpt2".
        needs: a library that is not installed for the tests; without it the blocks are only compiled.
        goes_on: in the folder of the run above.
    """

    page: str
    headings: tuple[str, ...]
    ranks: int
    before: str
    after: str
    num_layers: int
    needs: str | None
    goes_on: bool

    def __str__(self) -> str:
        return f"{self.page}: {', '.join(self.headings)}"

    @property
    def blocks(self) -> list[Block]:
        blocks = blocks_of(ROOT / self.page)
        return [block for block in blocks if block.language == "python" and block.heading in self.headings]


TOOLS = """
import os, torch, penstock
from penstock import Booster, HeterogeneousParallelPlugin, PipelineTemplate
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
def whole():
    return AutoModelForCausalLM.from_pretrained("gpt2")
def split(stages):
    return penstock.initialize(whole(), {"model_parallelism": {"pipeline_parallel_size": stages}})
def samples(number):
    tokens = torch.arange(number * 8).reshape(number, 8) % 400
    return [{"input_ids": row, "labels": row} for row in tokens]
def batch_of(number):
    return {name: torch.stack([row[name] for row in samples(number)]) for name in ("input_ids", "labels")}
def assert_trained(folder):
    trained, start = (AutoModelForCausalLM.from_pretrained(name) for name in (folder, "gpt2"))
    for name, parameter in trained.named_parameters():
        assert torch.isfinite(parameter).all() and not torch.equal(parameter, start.get_parameter(name)), name
def assert_alike(first, second):
    # not the weights: Adam makes steps of the noise in gradients that are zero
    first, second = (AutoModelForCausalLM.from_pretrained(folder)(**batch_of(4)).logits for folder in (first, second))
    assert torch.allclose(first, second, atol=1e-4), (first - second).abs().max()
def assert_equal(folder, model):
    plain = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name)), name
"""


def runs() -> Iterator[Run]:
    """Those of tests/docs/pages.txt, which says how it is read."""
    for text in (ROOT / "tests/docs/pages.txt").read_text().split("\n=== ")[1:]:
        head, _, code = text.partition("\n")
        head, *options = re.findall(r"[^()]+", head)
        page, _, headings = head.strip().partition(": ")
        numbers = {word: int(number) for number, word in re.findall(r"(\d+) (ranks|layers)", " ".join(options))}
        before, after = f"\n{code}\n".split("\n...\n")
        tools = "" if "whole script" in options else TOOLS
        ranks, layers = numbers.get("ranks", 2), numbers.get("layers", 4)
        needs = next((option.removeprefix("needs ") for option in options if option.startswith("needs ")), None)
        names = tuple(headings.split("; "))
        yield Run(page, names, ranks, tools + before, TOOLS + after, layers, needs, "goes on" in options)


RUNS = list(runs())
FIRST = [index for index, run in enumerate(RUNS) if not run.goes_on]


def test_every_python_block_is_run() -> None:
    written = {
        (str(page.relative_to(ROOT)), block.heading)
        for page in ALL_PAGES
        for block in blocks_of(page)
        if block.language == "python"
    }
    assert written == {(run.page, heading) for run in RUNS for heading in run.headings}


def test_every_other_block_is_checked_by_its_language() -> None:
    """Commands are parsed below; a block without a language is what something printed."""
    for page in [*ALL_PAGES, ROOT / "CONTRIBUTING.md"]:
        python = [block.text.splitlines() for block in blocks_of(page) if block.language == "python"]
        for block in blocks_of(page):
            match block.language:
                case "python" | "console" | "bash" | "":
                    pass
                case "json":
                    lines = [line for line in block.text.splitlines() if not line.startswith("//")]
                    Configuration.from_any(json.loads("\n".join(lines)))
                case "diff":  # what it adds stands in the page's own script, and what it takes away does not
                    for line in block.text.splitlines():
                        if line[0] in "+-" and len(line) > 1:
                            stands = any(own.strip().startswith(line[1:].strip()) for own in itertools.chain(*python))
                            assert stands == (line[0] == "+"), f"{page.name}:{block.line}: {line}"
                case language:
                    raise AssertionError(f"{page.name}:{block.line}: nobody checks {language}")


@pytest.fixture(scope="module")
def hubs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Local folders for the names "gpt2" and "squad", for each number of layers."""
    folders = {}
    for num_layers in {run.num_layers for run in RUNS}:
        folders[num_layers] = tmp_path_factory.mktemp("hub")
        local_hub(folders[num_layers], num_layers)
    return folders


@pytest.mark.parametrize("first", FIRST, ids=lambda first: str(RUNS[first]))
def test_python_blocks_run_and_do_what_the_page_says(
    first: int, hubs: dict[int, Path], pool: Pool, tmp_path: Path
) -> None:
    hub = hubs[RUNS[first].num_layers]
    for name in ("gpt2", "squad"):
        (tmp_path / name).symlink_to(hub / name)
    for block in blocks_of(ROOT / RUNS[first].page):
        if block.language == "json":  # named by a comment in its first line
            (tmp_path / block.text.splitlines()[0].removeprefix("// ")).write_text(block.text)
    environment = {"HF_HOME": str(hub / "cache"), "HF_HUB_OFFLINE": "1"}
    for run in (RUNS[first], *itertools.takewhile(lambda run: run.goes_on, RUNS[first + 1 :])):
        pieces = [(str(block.page), block.line, block.text) for block in run.blocks]
        if run.needs and importlib.util.find_spec(run.needs) is None:
            for file, _, text in pieces:
                compile(text, file, "exec")
            pieces = []
        pieces = [("before", 1, run.before), *pieces, ("after", 1, run.after)]
        pool.run(run.ranks, run_code, pieces, tmp_path, init=False, timeout=120, environment=environment)


def run_code(pieces: list[tuple[str, int, str]], folder: Path) -> None:
    """On a worker: pieces of code (file, line, text) in one namespace; tracebacks name the lines of the page."""
    namespace = {"__name__": "page", "ROOT": str(ROOT)}
    with contextlib.chdir(folder):
        for file, line, text in pieces:
            exec(compile("\n" * (line - 1) + text, file, "exec"), namespace)


# ---------------------------------------------------------------- commands

PLACEHOLDERS = {"YOUR_SCRIPT.py", "script.py", "train.py"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
FOREIGN = {"git", "cd", "export", "sinfo", "gcloud", "deepspeed", "mpirun"}


def commands() -> list[tuple[str, list[str]]]:
    """All commands in console and bash blocks and in inline code, each with where it stands, in words."""
    found = []
    for page in [*ALL_PAGES, ROOT / "CONTRIBUTING.md"]:
        for block in blocks_of(page):
            if block.language in ("console", "bash"):
                text = block.text.replace("\\\n", " ")
                for line in text.splitlines():
                    for part in re.split(r" && ", line.removeprefix("$ ")):
                        found.append((f"{page.name}: {part}", shlex.split(part, comments=True)))
        for number, span in spans_of(page):
            if re.match(r"(penstock|make|torchrun|python|pip|srun|sbatch|\.venv/bin/pip) ", span):
                found.append((f"{page.name}:{number}: {span}", shlex.split(span)))
    return [(where, words) for where, words in found if words]


@pytest.mark.parametrize("words", [pytest.param(words, id=where) for where, words in commands()])
def test_commands_parse(words: list[str]) -> None:
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):  # variables before a command
        words = words[1:]
    program, *arguments = words
    match program.removeprefix(".venv/bin/"):
        case "penstock":
            check_penstock(arguments)
        case "make":
            targets = [word for word in arguments if "=" not in word]
            assert set(targets) <= TARGETS, f"the Makefile has no {targets}"
            dry = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
            assert dry.returncode == 0, dry.stderr
        case "torchrun":
            check_launch(arguments)
        case "python" | "python3":
            check_python(arguments)
        case "pip":
            for word in arguments:
                assert not word.startswith("penstock"), "it is not on PyPI: pip install -e ."
                assert set(re.findall(r"\w+", word.partition("[")[2])) <= EXTRAS.keys(), word
        case "bash":
            assert (ROOT / arguments[0]).is_file()
        case "srun" | "sbatch":
            check_slurm(arguments)
        case name:
            assert name in FOREIGN or name == ".", f"{name}: nobody checks this command"


def check_penstock(arguments: list[str]) -> None:
    group = typer.main.get_command(app)
    name, *rest = arguments
    if name.startswith("--"):
        assert any(name in parameter.opts for parameter in group.get_params(group.make_context("penstock", ["check"])))
        return
    command = group.commands[name]
    if not rest:
        return  # only the command's name
    context = command.make_context(name, rest)
    if name == "bench":
        build_parser().parse_args(context.args)


def check_launch(arguments: list[str]) -> None:
    options = get_args_parser().parse_args(arguments)
    check_python([options.training_script, *options.training_script_args])


def check_python(arguments: list[str]) -> None:
    script, *rest = arguments
    if script == "-m":
        if rest[0] == "torch.distributed.launch":
            check_launch(rest[1:])
        else:
            assert importlib.util.find_spec(rest[0]) is not None
    elif script == "trainer.py":
        build_parser().parse_args(rest)
    else:
        assert script in PLACEHOLDERS or (ROOT / script).is_file(), f"there is no {script}"


def check_slurm(arguments: list[str]) -> None:
    scripts = [index for index, word in enumerate(arguments) if word.endswith((".sh", ".sbatch", ".py"))]
    assert len(scripts) == 1, "a SLURM line starts one script"
    script, rest = arguments[scripts[0]].removeprefix("$PWD/"), arguments[scripts[0] + 1 :]
    if script.endswith(".sbatch"):
        assert (ROOT / "benchmarks/suite" / script).is_file()
        script = f"launch_4_node_{rest.pop(0)}.sh"
    assert script in PLACEHOLDERS or (ROOT / "benchmarks/suite" / script).is_file()
    build_parser().parse_args(rest)


# ---------------------------------------------------------------- names and links


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = [line.lstrip("# ") for _, line in prose_of(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = "\n".join(line for _, line in prose_of(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors_of(file), f"{page.name} links to {target}"


def test_the_navigation_has_every_page_once() -> None:
    nav = re.findall(
        r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("not_in_nav")[0]
    )
    assert len(nav) == len(set(nav))
    assert {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} <= set(nav)


def test_the_site_needs_no_network() -> None:
    """The plugin for search without a server asks a host for its script, unless the site has one."""
    polyfills = re.search(r"polyfills: \[(.+)\]", (ROOT / "mkdocs.yml").read_text())
    assert polyfills is not None and "iframe-worker" in polyfills[1] and (ROOT / "docs" / polyfills[1]).is_file()


def test_code_is_at_most_88_columns_wide() -> None:
    """As much as the site shows beside its navigation in a window of 1400 pixels."""
    wide = [
        f"{page.name}:{block.line + number}: {line}"
        for page in [*ALL_PAGES, ROOT / "CONTRIBUTING.md"]
        for block in blocks_of(page)
        for number, line in enumerate(block.text.splitlines())
        if len(line) > 88
    ]
    assert wide == []


@pytest.mark.parametrize("page", FROM, ids=lambda page: page.stem)
def test_a_page_for_those_who_come_from_another_tool_is_short_and_says_all(page: Path) -> None:
    """It has at most 900 words, code included, and the same headings as the others."""
    headings = [line.removeprefix("## ") for _, line in prose_of(page) if line.startswith("## ")]
    assert headings[-3:] == ["What you gain", "What you lose", "Moving a checkpoint"]
    assert len(page.read_text().split()) <= 900


# ---------------------------------------------------------------- the first page

README = ROOT / "README.md"


def shape(text: str) -> list[str]:
    """The lines of what a command prints, with a sign in place of each number, without what only aligns them."""
    return [" ".join(re.sub(r"\d[\d,.]*(e[+-]\d+)?", "#", line).split()) for line in text.splitlines()]


def printed(heading: str) -> list[str]:
    (block,) = (block for block in blocks_of(README) if block.heading == heading and block.language == "")
    return shape(block.text)


def test_the_first_screen_has_both_commands_each_with_its_time() -> None:
    lines = README.read_text().splitlines()
    for target in ("demo", "test"):
        begin = lines.index(f"## `make {target}`")
        section = " ".join(itertools.takewhile(lambda line: not line.startswith("## "), lines[begin + 1 :]))
        assert begin < 40 and "minutes" in section and target in TARGETS


def test_the_block_of_make_demo_is_what_it_prints_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    recipe = subprocess.run(
        ["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True, env=alone
    ).stdout
    *_, program, one, two = recipe.splitlines()[-1].split()
    assert program == "examples/compare_curves.py"
    monkeypatch.chdir(tmp_path)
    for folder, bubble in ((one, 0.0), (two, 0.25)):
        run = {"losses": [7.0, 5.0], "bubbles": [bubble] * 2, "tokens_per_second": 5000}
        Path(folder).mkdir(parents=True)
        (Path(folder) / "curve.json").write_text(json.dumps(run))
    result = CliRunner().invoke(runpy.run_path(str(ROOT / program))["app"], [one, two])
    assert result.exit_code == 0, result.output
    block = printed("`make demo`")
    assert shape(result.output)[-len(block) :] == block


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{name}.md" for name in ("trainer", "lora", "limits", "verify"))]
)
def test_the_pages_agree_about_dropout(page: str) -> None:
    """tests/api/test_initialize_dropout.py has the oracle."""
    sentences = re.split(r"(?<=[.:]) ", " ".join((ROOT / page).read_text().split()))
    about = [" ".join(sentences[index : index + 2]) for index, words in enumerate(sentences) if "ropout" in words]
    assert any("same for any number of stages" in words and re.search(r"\bnot\b|other", words) for words in about), (
        about
    )


# ---------------------------------------------------------------- pictures and tables that are made


def test_every_picture_is_in_a_page_and_has_its_command() -> None:
    shown = {
        (page.parent / name).resolve() for page in PAGES for name in re.findall(r"\]\((\S+\.svg)\)", page.read_text())
    }
    pictures = set((ROOT / "docs/pictures").iterdir())
    assert pictures <= shown
    assert {path.stem for path in pictures} == draw_pictures.PICTURES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", draw_pictures.PICTURES)
def test_the_pictures_are_what_the_commands_draw(name: str) -> None:
    assert (ROOT / f"docs/pictures/{name}.svg").read_text() == draw_pictures.drawn(draw_pictures.PICTURES[name])


def test_the_tables_of_other_systems_are_those_of_the_results() -> None:
    page = draw_pictures.COMPARED.read_text()
    assert page == draw_pictures.with_tables(page) and "### Exact or not" in page


def test_the_reference_has_a_page_for_every_public_name() -> None:
    pages = mkdocs_pages.api_pages()
    assert {f"api/penstock.{name}.md" for name in penstock.__all__} <= pages.keys()
    assert "last_step" in pages["api/penstock.Engine.md"] and "register" not in pages["api/penstock.Engine.md"]


@pytest.mark.slow
def test_the_reference_documents_every_parameter_and_has_one_error_a_row() -> None:
    """A parameter stands in a section, or the text names it. `args` and `kwargs` are those of who is called."""
    loader = griffe.GriffeLoader(search_paths=[ROOT / "src"], docstring_parser="google", docstring_options=QUIET)
    package = loader.load("penstock")
    homes = re.findall(r"^::: penstock\.(\S+)$", "\n".join(mkdocs_pages.api_pages().values()), re.MULTILINE)
    assert len(homes) > 40
    missing, packed = [], []
    for home in homes:
        one = package[home]
        one = one.final_target if one.is_alias else one
        shown = not home.endswith(("PipelineTrainer", "PipelineTrainerMixin"))
        members = one.members.values() if one.is_class and shown else []
        for thing in [one, *members]:
            if not (thing.is_class or thing.is_function) or thing.name.startswith("_"):
                continue
            text = thing.docstring.value if thing.docstring else ""
            names = {parameter.name for parameter in thing.parameters} - {"self", "cls", "args", "kwargs"}
            missing += [f"{thing.path}: {name}" for name in names if not re.search(rf"\b{name}\b", text)]
            packed += re.findall(r"(?:\.|;) [A-Z]\w*(?:Error|Failure): .*", text)
    assert missing == [] and packed == []


def test_headings_of_troubleshooting_are_words_of_errors() -> None:
    source = "".join(re.sub(r'"\n\s*f?"', "", file.read_text()) for file in (ROOT / "src/penstock").rglob("*.py"))
    headings = [line[3:] for _, line in prose_of(ROOT / "docs/troubleshooting.md") if line.startswith("## ")]
    told = [heading for heading in headings if not heading.startswith(("The loss", "A device", "It is slow"))]
    assert len(told) >= 8
    for heading in told:
        parts = [part.strip() for part in heading.split("...") if part.strip()]
        assert all(part in source for part in parts), heading


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_files_and_public_names_in_inline_code_exist(page: Path) -> None:
    for number, span in spans_of(page):
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+\.(py|sh|md|csv|toml|sbatch)", span):
            assert any((ROOT / top / span).exists() for top in ("", "src", "src/penstock", "benchmarks/suite")), (
                f"{page}:{number}: {span}"
            )
        for name in re.findall(r"\bpenstock((?:\.\w+)+)", span):
            if not name.endswith((".json", ".py")):
                assert resolve("penstock" + name) is not None, f"{page}:{number}: {span}"


def test_where_to_change_what_names_files_that_have_these_names() -> None:
    text = (ROOT / "docs/where_to_change.md").read_text()
    items = [re.sub(r"\n +", " ", item) for item in re.findall(r"^(?:-|\d+\.) (.*(?:\n  +.*)*)", text, re.MULTILINE)]
    assert len(items) > 500
    wrong = []
    for item in items:
        spans = re.findall(r"`([^`]+)`", item)
        there = {span: path for span in spans for top in (".", "src/penstock") if (path := ROOT / top / span).exists()}
        assert item.startswith(f"`{spans[0]}`") and spans[0] in there, item
        files = [file for path in there.values() for file in (path.rglob("*.py") if path.is_dir() else [path])]
        source = "".join(file.read_text() for file in files)
        names = [span for span in spans if span not in there and not span.startswith("make ")]
        words = {word for name in names for word in re.findall(r"[A-Za-z_]\w*", name)}
        wrong += [(item, word) for word in words if not re.search(rf"\b{word}\b", source)]
    assert wrong == []


def test_the_picture_of_the_house_is_true() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    picture = next(block for block in text.split("```") if "your script" in block)
    names = set(re.findall(r"[\w./]+\.py|\w+/", picture))
    assert {"runtime/", "engine.py", "builder.py", "schedule/"} <= names
    there = {path.name + "/" * path.is_dir() for path in (ROOT / "src/penstock").rglob("*")}
    assert names <= there


def resolve(name: str) -> object:
    """What a dotted name stands for: an attribute, or a module to import."""
    found: object = importlib.import_module("penstock")
    path = "penstock"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if not hasattr(found, part):
            importlib.import_module(path)
        found = getattr(found, part)
    return found


def test_the_tutorials_table_has_every_configuration_key_once() -> None:
    keys = table_column(ROOT / "docs/tutorial.md", "key")
    assert sorted(keys) == sorted(field.name for field in dataclasses.fields(Configuration))


def test_the_schedules_page_says_what_the_registry_does() -> None:
    page = ROOT / "docs/schedules.md"
    assert tuple(table_column(page, "name")) == tuple(SCHEDULES)
    for name, row in SCHEDULES.items():
        stages = f"{'v = ' * row.any_stages_per_rank}{default_stages_per_rank(name)}"
        cells = f"`{name}`", row.source, stages, row.bubble, row.held
        assert f"| {' | '.join(cells)} |" in page.read_text()
        assert f"![{name}: {row.summary}](pictures/{name}.svg)" in page.read_text()
    splitting = [f"`{name}`" for name in SCHEDULES if build(name, 2, 4).splits_backward]
    assert f"These schedules have W actions: {', '.join(splitting)}." in page.read_text()
