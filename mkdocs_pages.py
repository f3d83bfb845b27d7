"""What the site has besides docs/: the pages of the repository's root, the results, and the public API.

Their links are those of the repository; here they are turned to where the pages stand in the site.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent
ELSEWHERE = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
MODELS = "benchmarks/results/models.md"  # of the results the one that is a page to search
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
    """The navigation with the page of each public name."""
    reference = next(entry["Reference"] for entry in config.nav if "Reference" in entry)
    reference.insert(1, {"Names": [page for page in api_pages() if page != "api.md"]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/, and the pictures of the results."""
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
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to and from what is outside docs/ in the repository."""
    if page.file.src_uri in ELSEWHERE.values():
        return re.sub(r"\]\((?:docs/)", "](", markdown)
    if page.file.src_uri.startswith("api/"):
        return markdown
    if page.file.src_uri.startswith("benchmarks/"):
        return re.sub(r"\]\(\.\./\.\./docs/", "](../../", markdown)
    up = "../" * page.file.src_uri.count("/")  # to docs/; the root of the repository is one folder above it
    return re.sub(rf"\]\({re.escape(up)}\.\./", f"]({up}", markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Pictures scroll in a narrow window, instead of becoming too small to read; options do not break at hyphens."""
    html = re.sub("<img [^>]*>", r'<span class="picture">\g<0></span>', html)
    return re.sub("(?<=<code>)[^<]*(?=</code>)", lambda code: re.sub(r"[\w-]*-[\w-]+", OPTION, code[0]), html)


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
