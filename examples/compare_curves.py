"""Loss curves of several runs of demo.py side by side, with their largest difference; and as a plot.

python examples/compare_curves.py runs/demo/1-stage runs/demo/2-stage
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    folders: Annotated[list[Path], typer.Argument(help="Output folders of demo.py; the first is compared against.")],
    plot: Annotated[Path | None, typer.Option(help="PNG file to write. Default: loss.png beside the folders.")] = None,
) -> None:
    """Compare the loss curves of several runs of demo.py."""
    runs = [json.loads((folder / "curve.json").read_text()) for folder in folders]
    steps = min(len(run["losses"]) for run in runs)
    table = Table("step", *[f"{folder.name}: loss" for folder in folders])
    for step in sorted({*range(0, steps, max(1, steps // 8)), steps - 1}):
        table.add_row(str(step + 1), *[f"{run['losses'][step]:.6f}" for run in runs])
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    for folder, run in zip(folders, runs, strict=True):
        bubbles = [bubble for bubble in run["bubbles"] if bubble is not None]
        console.print(
            f"{folder.name}: loss {run['losses'][0]:.3f} -> {run['losses'][-1]:.3f}, "
            f"{run['tokens_per_second']:,} tokens/s"
            + (f", bubble {sum(bubbles) / len(bubbles):.0%}" if bubbles else "")
        )
    for folder, run in zip(folders[1:], runs[1:], strict=True):
        difference = max(abs(a - b) for a, b in zip(run["losses"], runs[0]["losses"], strict=False))
        console.print(f"{folder.name}: largest difference from {folders[0].name}: {difference:.1e}")
    file = plot or folders[0].parent / "loss.png"
    draw(folders, runs, file)
    console.print(f"plot: {file}")


def draw(folders: list[Path], runs: list[dict[str, Any]], file: Path) -> None:
    """Write the curves to ``file``, each thinner than the one below it so that equal curves stay visible."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for index, (folder, run) in enumerate(zip(folders, runs, strict=True)):
        axes.plot(run["losses"], label=folder.name, linewidth=max(1, 5 - 3 * index))
    axes.set(xlabel="step", ylabel="loss", title="The same loss, whatever the number of stages")
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    app()
