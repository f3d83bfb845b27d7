"""What the site has besides docs/: the pages of the repository's root, the results, and the public API.

Their links are those of the repository; here they are turned to where the pages stand in the site.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent
ROOMS = "<!-- lines of each room -->"  # a line in docs/architecture.md
ELSEWHERE = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
PARITY = "<!-- tables of benchmarks/results/parity.md -->"  # a line in docs/compared.md
MODELS = "benchmarks/results/models.md"  # of the results the one that is a page to search
# A picture: the command that draws it, and what it shows. The option that names the file is added.
PICTURE = re.compile(r"<!-- penstock (.+?): (.+?) -->")
CSS = """.md-grid { max-width: 68rem; }
.option { white-space: nowrap; }
.md-typeset table code { word-break: normal; overflow-wrap: normal; }
.md-typeset img { background: white; }
.picture { display: block; overflow-x: auto; }
.picture img { min-width: 40rem; }
"""
OPTION = r'<span class="option">\g<0></span>'
# In the order in which a user meets them; names that are not here follow.
FIRST = (
    *("initialize", "from_pretrained", "from_config", "Configuration", "ConfigurationError", "PipelineModel"),
    *("verify", "save_checkpoint", "load_checkpoint", "Checkpoint", "CheckpointManager", "finish_saving"),
    *("CheckpointError", "PipelineFailure", "HeterogeneousParallelPlugin", "Booster", "PipelineOptimizer"),
    *("PipelineTemplate", "Elastic", "register_tensor_parallel_plan", "TensorParallelPlan"),
)
ENGINE = """What a parallelised model runs on. `print(model.pipeline)` shows this rank's part and the last step.
`device` is this rank's; `step_number` counts the training steps that were begun. Set on all ranks, `trace` and
`trace_steps` record [a timeline](../logging.md#a-timeline-of-steps).
"""
API = """# Public API

What is listed here keeps its meaning between minor versions. Everything else may change.
"""


def on_config(config: Any) -> Any:
    """The navigation without pages that are not there, and with those that it does not name, as guides."""
    there = {path.name for path in (ROOT / "docs").glob("*.md")} | {*ELSEWHERE.values(), "api.md", MODELS}
    for entry in config.nav:
        if isinstance(entry, dict):
            for title, pages in entry.items():
                entry[title] = [page for page in pages if page in there]
                there.difference_update(pages)
    there.discard("index.md")
    reference = next(entry["Reference"] for entry in config.nav if "Reference" in entry)
    reference.insert(1, {"Names": [page for page in api_pages() if page != "api.md"]})
    next(entry for entry in config.nav if "Guides" in entry)["Guides"] += sorted(there)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/, and the pictures."""
    for name, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for path in sorted((ROOT / "benchmarks/results").glob("*.md")):
        name = str(path.relative_to(ROOT))
        head = "" if name == MODELS else "---\nsearch:\n  exclude: true\n---\n\n"
        files.append(File.generated(config, name, content=head + path.read_text()))
    for name, content in api_pages().items():
        files.append(File.generated(config, name, content=content))
    for picture in sorted((ROOT / "benchmarks/results").glob("*.svg")):
        files.append(File.generated(config, str(picture.relative_to(ROOT)), abs_src_path=str(picture)))
    for page in sorted((ROOT / "docs").glob("*.md")):
        for command, _ in PICTURE.findall(page.read_text()):
            files.append(File.generated(config, name_of(command), content=drawn(command)))
    files.append(File.generated(config, "extra.css", content=CSS))
    return files


def name_of(command: str) -> str:
    """The file of a picture in the site."""
    return f"pictures/{re.sub(r'[^a-z0-9]+', '-', command.lower()).strip('-')}.svg"


def drawn(command: str) -> str:
    """The picture that a command of the package draws."""
    from penstock.cli import app

    words = shlex.split(command)
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder) / "picture.svg"
        app([*words, "--output" if words[0] == "draw" else "--plot", str(file)], standalone_mode=False)
        return file.read_text()


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Pictures; links to and from what is outside docs/ in the repository; how large each room is; other systems."""
    if page.file.src_uri == "architecture.md":
        markdown = markdown.replace(ROOMS, f"{lines_of_rooms()}\n\n{purposes()}")
    if PARITY in markdown:
        found = (ROOT / "benchmarks/results/parity.md").read_text().partition("\n\n")[2]
        markdown = markdown.replace(PARITY, re.sub("^## ", "### ", found, flags=re.MULTILINE))
    markdown = PICTURE.sub(lambda found: f"![{found[2]}]({name_of(found[1])})", markdown)
    if page.file.src_uri in ELSEWHERE.values():
        return re.sub(r"\]\((?:docs/)", "](", markdown)
    if page.file.src_uri.startswith("api/"):
        return markdown
    if page.file.src_uri.startswith("benchmarks/"):
        return re.sub(r"\]\(\.\./\.\./docs/", "](../../", markdown)
    return re.sub(r"\]\(\.\./", "](", markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Pictures scroll in a narrow window, instead of becoming too small to read; options do not break at hyphens."""
    html = re.sub("<img [^>]*>", r'<span class="picture">\g<0></span>', html)
    return re.sub("(?<=<code>)[^<]*(?=</code>)", lambda code: re.sub(r"[\w-]*-[\w-]+", OPTION, code[0]), html)


def lines_of_rooms() -> str:
    """A table of the package's rooms, and the faces, with their files and lines."""
    package, files = ROOT / "src/penstock", Counter[str]()
    lines = Counter[str]()
    for file in package.rglob("*.py"):
        room = f"`{file.relative_to(package).parts[0]}/`" if file.parent != package else "the faces"
        files[room] += 1
        lines[room] += len(file.read_text().splitlines())
    rows = [f"| {room} | {files[room]} | {number:,} |" for room, number in lines.most_common()]
    total = f"| all | {files.total()} | {lines.total():,} |"
    return "\n".join(["| room | files | lines |", "|---|---|---|", *rows, total])


def purposes() -> str:
    """A table of what each file of the package is for: the first sentence of its docstring."""
    rows, package = ["| file | what it is for |", "|---|---|"], ROOT / "src/penstock"
    for file in sorted(package.rglob("*.py")):
        words = (ast.get_docstring(ast.parse(file.read_text())) or "").split()
        rows.append(f"| `{file.relative_to(package)}` | {' '.join(words).partition('. ')[0].rstrip('.')} |")
    return "\n".join(rows)


@cache
def api_pages() -> dict[str, str]:
    """A page of mkdocstrings for each public name, and one that lists them."""
    import penstock
    import penstock.planning
    import penstock.schedule

    # None of these imports torch.
    schedule, planning = penstock.schedule, penstock.planning
    homes = {
        "penstock": [f"{home}.{name}" for name, home in penstock._HOMES.items()],
        "penstock, while it runs": ["penstock.runtime.engine.Engine", "penstock.runtime.report.StepReport"],
        "penstock.integrations.transformers": [
            f"penstock.integrations.transformers.{name}" for name in ("PipelineTrainer", "PipelineTrainerMixin")
        ],
        schedule.__name__: [f"{home}.{name}" for name, home in schedule._HOMES.items()],
        planning.__name__: [f"{planning.__name__}.{name}" for name in planning.__all__],
    }
    homes["penstock"].sort(key=lambda home: (_place(home), home))
    pages, index = {}, [API]
    for title, names in homes.items():
        index.append(f"## {title}\n")
        for home in names:
            name = home.rpartition(".")[2]
            file = f"api/{title.rpartition('.')[2].partition(',')[0]}.{name}.md"
            heading = "model.pipeline" if name == "Engine" else name
            if name == "Engine":  # most of it serves the package
                text = f"# {heading}\n\n{ENGINE}" + "".join(f"\n::: {home}.{member}\n" for member in _for_users())
            else:
                members = "false" if name.startswith("PipelineTrainer") else "null"  # its methods are the Trainer's
                options = f"{{heading: {heading}, heading_level: 1, members: {members}}}"
                text = f"::: {home}\n    options: {options}\n"
            pages[file] = f"---\ntitle: {heading}\n---\n\n{text}"
            index.append(f"- [`{heading}`]({file})")
        index.append("")
    return pages | {"api.md": "\n".join(index)}


def _place(home: str) -> int:
    name = home.rpartition(".")[2]
    return FIRST.index(name) if name in FIRST else len(FIRST)


def _for_users() -> list[str]:
    """What `model.pipeline` offers beside what the text says; read without importing torch."""
    text = (ROOT / "src/penstock/runtime/engine.py").read_text()
    names = [
        name for line in re.findall(r"^FOR_USERS \+?= (.*)$", text, re.MULTILINE) for name in ast.literal_eval(line)
    ]
    return [name for name in names if f"`{name}`" not in ENGINE]
