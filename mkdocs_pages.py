"""What the site has besides docs/: the pages of the repository's root, the results, and the public API.

Their links are those of the repository; here they are turned to where the pages stand in the site.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent
ROOMS = "<!-- lines of each room -->"  # a line in docs/architecture.md
ELSEWHERE = ["CONTRIBUTING.md", "CHANGELOG.md"]
INTEGRATIONS = {
    "penstock.integrations.transformers": [
        f"penstock.integrations.transformers.{name}" for name in ("PipelineTrainer", "PipelineTrainerMixin")
    ]
}
API = """# Public API

What is listed here keeps its meaning between minor versions. Everything else may change.
"""


def on_config(config: Any) -> Any:
    """Pages that the navigation does not name come last."""
    named = {
        page
        for entry in config.nav
        for pages in (entry.values() if isinstance(entry, dict) else [[entry]])
        for page in pages
    }
    more = [path.name for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in named]
    if more:
        config.nav.append({"More": more})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    results = sorted((ROOT / "benchmarks/results").glob("*.md"))
    for name in [*ELSEWHERE, *(str(path.relative_to(ROOT)) for path in results)]:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    files.append(File.generated(config, "api.md", content=api_page()))
    for picture in sorted((ROOT / "benchmarks/results").glob("*.svg")):
        files.append(File.generated(config, str(picture.relative_to(ROOT)), abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to and from what is outside docs/ in the repository; and how large each room is."""
    if page.file.src_uri == "architecture.md":
        markdown = markdown.replace(ROOMS, lines_of_rooms())
    if page.file.src_uri in ELSEWHERE:
        return re.sub(r"\]\((?:docs/)", "](", markdown)
    return re.sub(r"\]\(\.\./", "](", markdown) if "/" not in page.file.src_uri else markdown


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


def api_page() -> str:
    """A directive of mkdocstrings for each public name, under its module."""
    import penstock
    import penstock.planning
    import penstock.schedule

    # None of these imports torch.
    homes = {"penstock": [f"{home}.{name}" for name, home in penstock._HOMES.items()], **INTEGRATIONS}
    schedule, planning = penstock.schedule, penstock.planning
    homes[schedule.__name__] = [f"{home}.{name}" for name, home in schedule._HOMES.items()]
    homes[planning.__name__] = [f"{planning.__name__}.{name}" for name in planning.__all__]
    parts = [API]
    for title, names in homes.items():
        names = sorted(names, key=lambda name: name.rpartition(".")[2].lower())
        parts += [f"## {title}\n", *(f"::: {name}\n" for name in names)]
    return "\n".join(parts)
