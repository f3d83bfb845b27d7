"""`penstock inspect` and `penstock merge`: checkpoints, without the run that wrote them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.checkpoint.untrusted import CheckpointError
from penstock.tables import wrapped

_SHOWN = 12


def inspect(
    folder: Annotated[Path, typer.Argument(help="What save_checkpoint or save_parallelized wrote, or its folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    quick: Annotated[bool, typer.Option(help="Compare the files' sizes only, and do not read them.")] = False,
    parameters: Annotated[bool, typer.Option(help="List every weight.")] = False,
) -> None:
    """Show what checkpoints hold: layout, step, sizes, weights, and whether they are whole.

    Reads every file, and runs nothing in them. The status is 0 if the newest checkpoint is whole and 1 if not.

    Example: penstock inspect runs/gpt2
    """
    from penstock.checkpoint.contents import inspect_folder

    try:
        checkpoints = inspect_folder(folder, values=not quick)
    except CheckpointError as error:
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            raise ValueError(f"{folder} is an ordinary checkpoint of transformers: nothing to inspect") from error
        raise
    if as_json:
        print(json.dumps(checkpoints, indent=1))
    else:
        for checkpoint in checkpoints:
            print("\n".join(map(wrapped, _lines(checkpoint, parameters))))
    if not checkpoints[0]["whole"]:
        raise typer.Exit(1)


def _lines(checkpoint: dict[str, Any], parameters: bool) -> list[str]:
    lines = [f"{checkpoint['path']}: {'whole' if checkpoint['whole'] else 'NOT WHOLE'}"]
    lines += [f"  {fault}" for fault in checkpoint["faults"]]
    if "files" not in checkpoint:
        return lines
    shards = checkpoint["tensor_parallel_size"]
    layout = f"{checkpoint['pipeline_ranks']} pipeline rank(s)" + (
        f" of {shards} tensor-parallel ranks each" if shards > 1 else ""
    )
    lines.append(f"  {checkpoint['model_class']}, written by {layout}")
    if (training := checkpoint["training"]) is not None:
        lines.append(
            f"  step {training['step']}, with the state of {', '.join(training['objects']) or 'no object'}, and of "
            f"{training['parameter_groups']} parameter group(s) of an optimizer; {training['ranks']} rank(s), which "
            f"take {training['pipelines']} batch(es) in a step"
        )
    weights = checkpoint["parameters"]
    lines.append(
        f"  {checkpoint['bytes']:,} bytes in {len(checkpoint['files'])} files, "
        f"{checkpoint['bytes_of_weights']:,} of them weights"
    )
    lines.append(f"  {len(weights)} weights, {sum(math.prod(weight['shape']) for weight in weights):,} numbers")
    for weight in weights if parameters else weights[:_SHOWN]:
        notes = [f"tied to {', '.join(weight['tied_to'])}"] if weight["tied_to"] else []
        notes += ["sharded"] if weight["sharded"] else []
        notes += [f"with {', '.join(weight['optimizer_states'])}"] if weight["optimizer_states"] else []
        lines.append(
            f"    {weight['name']} {weight['shape']} {weight['dtype']}" + (f" ({'; '.join(notes)})" if notes else "")
        )
    if not parameters and len(weights) > _SHOWN:
        lines.append(f"    and {len(weights) - _SHOWN} more (--parameters shows all)")
    return lines


def merge(
    folder: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of them, of which the newest is taken.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    safetensors: Annotated[bool, typer.Option(help="Write .safetensors files instead of .bin.")] = True,
    max_shard_size: Annotated[str, typer.Option(help="Size of the largest file; one is in memory at a time.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into a folder that exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Make the folder that plain transformers loads, in one process, with one shard in memory at a time.

    Example: penstock merge runs/gpt2 gpt2-trained --max-shard-size 2GB
    """
    from penstock.checkpoint.contents import merge_checkpoint

    if not overwrite and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists: name another folder, or give --overwrite")
    merge_checkpoint(folder, out, safe_serialization=safetensors, max_shard_size=max_shard_size)
    files = sorted(path.name for path in out.iterdir())
    if as_json:
        print(json.dumps({"folder": str(out), "files": files}))
    else:
        print(wrapped(f"{out}: {', '.join(files)}"))
