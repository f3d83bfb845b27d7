"""`penstock check` and `penstock verify`."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import typer
from rich.console import Console

from penstock.tables import wrapped

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_OR_CLASS",
        help="A folder or name of a checkpoint (only its configuration is read; verify also reads a folder's weights), "
        "a class of transformers or diffusers such as LlamaForCausalLM (with its default configuration), or "
        "MODULE:NAME or SCRIPT.py:NAME of your own.",
    ),
]
Inputs = Annotated[
    str | None,
    typer.Option(
        help="SCRIPT.py:NAME of a batch (the model's arguments by name), or of a function that returns one; otherwise "
        "inputs are made up."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code in files beside a checkpoint's configuration.")
]


def check(
    model: Model,
    stages: Annotated[int | None, typer.Option(min=1, help="Also show how so many stages share the units.")] = None,
    inputs: Inputs = None,
    as_json: AsJson = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Say whether a model can be split, into which units, what crosses each boundary, what is tied; or why not.

    Loads no weights and computes nothing: whether the model is exact over stages is what `penstock verify` says. The
    status is 0 if the model can be split, and 1 if not, or if that is not known without --inputs.

    Example: penstock check GPT2LMHeadModel --stages 4
    """
    with waiting("following the model"):
        from penstock.checking.check import check as check_model
        from penstock.layout.partition import partition, split_into

        report = check_model(subject_of(model, inputs), trust_remote_code=trust_remote_code)
    rows: list[dict[str, Any]] = []
    if stages is not None and report.units:
        sizes = partition([unit.cost for unit in report.units], [1.0] * stages).sizes
        for units in split_into(report.units, sizes):
            rows.append({"units": [unit.name for unit in units], "parameters": sum(unit.parameters for unit in units)})
    if as_json:
        print(json.dumps(report.data() | ({"stages": rows} if stages is not None else {}), indent=1))
    else:
        print(report.render())
        for stage, row in enumerate(rows):
            first, last = row["units"][0], row["units"][-1]
            print(wrapped(f"stage {stage}: {first} to {last}, {row['parameters']:,} parameters"))
    if not report.splittable:
        raise typer.Exit(1)


def verify(
    model: Model,
    inputs: Inputs = None,
    batch: Annotated[str | None, typer.Option(hidden=True)] = None,
    criterion: Annotated[
        str | None, typer.Option(help="SCRIPT.py:NAME of the criterion; otherwise the loss is the model's own.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="A JSON file, as for initialize(); in place of the next three options.")
    ] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="pipeline_parallel_size; 2 by default.")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="num_microbatches.")] = None,
    context_parallel: Annotated[
        int | None, typer.Option(min=1, help="context_parallel_size: over so many parts of each sequence.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps, on the same batch.")] = 3,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Compare a model of so many layers; for checkpoints and classes.")
    ] = None,
    as_json: AsJson = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Run a model unsplit and over stages, and compare losses, gradients, weights, evaluation, tokens, a checkpoint.

    It runs in processes on this machine's CPU, in double precision, without dropout. The status is 0 if everything is
    exact, or exact against accumulation where a warning says so in training too, and 1 otherwise.

    Example: penstock verify script.py:make_model --inputs script.py:make_batch
    """
    import torch

    from penstock.checking.verify import verify as verify_model

    keys = {
        "pipeline_parallel_size": stages,
        "num_microbatches": microbatches,
        "context_parallel_size": context_parallel,
    }
    given = {name: value for name, value in keys.items() if value is not None}
    if config is not None and given:
        raise ValueError(f"--config says it all: leave out what stands for {', '.join(given)}")
    if batch is not None:
        Console(stderr=True).print("warning: --batch is now --inputs, as in the other commands", highlight=False)
        inputs = inputs or batch
    make = named(model) if ":" in model else subject_of(model)
    result = verify_model(
        (lambda: make) if isinstance(make, torch.nn.Module) else make,
        None if inputs is None else named(inputs),
        config=config or {"pipeline_parallel_size": 2, **given},
        criterion=None if criterion is None else named(criterion),
        steps=steps,
        layers=layers,
        trust_remote_code=trust_remote_code,
    )
    print(json.dumps(result.data(), indent=1) if as_json else result.render())
    if not result.exact:
        raise typer.Exit(1)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """A spinner on stderr while something is made, if that is a terminal. Nothing may be printed meanwhile."""
    console = Console(stderr=True)
    shown = console.is_terminal and "JPY_PARENT_PID" not in os.environ  # a notebook's cell keeps every frame
    with console.status(f"{text} ...") if shown else nullcontext():
        yield


def subject_of(model: str, inputs: str | None = None) -> Any:
    """What MODEL_OR_CLASS means: an own model or class, one of diffusers, or a name; with `inputs` it is a model."""
    import transformers

    if ":" in model:
        subject = _made(model)
    elif (subject := _of_diffusers(model)) is None:
        subject = model
        if not Path(model).exists() and not (model[:1].isupper() and model.isidentifier()):
            _look_for_a_hub()
        elif not Path(model).exists() and not hasattr(transformers, model):
            close = difflib.get_close_matches(model, dir(transformers), n=1, cutoff=0.8)
            raise ValueError(f"transformers has no class {model}" + (f"; did you mean {close[0]}?" if close else ""))
    if inputs is not None:
        from torch import nn

        from penstock.api.builder import remember_example_inputs
        from penstock.checking.check import build_on_meta
        from penstock.checking.reasons import inputs_of_forward

        given: Any = named(inputs)
        given = given() if callable(given) else given
        subject = subject if isinstance(subject, nn.Module) else build_on_meta(subject)
        # What the forward does not take is for a criterion.
        remember_example_inputs(subject, inputs_of_forward(subject, given) if isinstance(given, Mapping) else given)
    return subject


def _made(reference: str) -> Any:
    """A model of the user's own, made by a function or a class, without memory for its weights where its code allows
    it; or a class of transformers, which has a configuration."""
    import torch
    from transformers import PreTrainedModel

    target = named(reference)
    own_class = (
        isinstance(target, type) and issubclass(target, torch.nn.Module) and not issubclass(target, PreTrainedModel)
    )
    if isinstance(target, torch.nn.Module) or not (callable(target) and (own_class or not isinstance(target, type))):
        return target
    with suppress(Exception), torch.device("meta"):  # a constructor may compute with numbers
        return target()
    try:
        return target()
    except Exception as error:
        advice = ": name a function without arguments that returns the model" if own_class else ""
        raise ValueError(f"{reference} does not make a model: {type(error).__name__}: {error}{advice}") from error


def _of_diffusers(name: str) -> Any:
    """A model of diffusers without memory for its weights, by a folder or a class; None if it is none of its models."""
    import transformers

    written = Path(name, "config.json")
    config = json.loads(written.read_text(encoding="utf-8")) if written.is_file() else {}
    known = config.get("_class_name", "" if config else name)
    if (
        not (known.isidentifier() and known[0].isupper())
        or hasattr(transformers, known)
        or find_spec("diffusers") is None
    ):
        return None
    import diffusers
    from accelerate import init_empty_weights
    from diffusers.models.modeling_utils import no_init_weights

    kind = getattr(diffusers, known, None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
        return None
    with no_init_weights(), init_empty_weights():
        return kind.from_config(config)


def _look_for_a_hub() -> None:
    """Without a hub that answers within two seconds only its cache is read; else five attempts take half a minute."""
    from huggingface_hub import constants

    def connect() -> None:
        with suppress(OSError):
            address = urlsplit(constants.ENDPOINT)
            socket.create_connection(
                (address.hostname or "", address.port or (80 if address.scheme == "http" else 443)), 2
            ).close()
            answered.set()

    answered, proxies = threading.Event(), getproxies()
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(2)
    if not answered.is_set() and not proxies:
        constants.HF_HUB_OFFLINE = True


def named(reference: str) -> Any:
    """What is at `module:name` or `script.py:name`. Modules of the working directory are found."""
    module_name, _, name = reference.rpartition(":")
    folder, file = os.path.split(module_name)
    if file.endswith(".py"):
        if not os.path.isfile(module_name):
            raise ValueError(f"there is no file {module_name}")
        module_name = file.removesuffix(".py")
    sys.path.insert(0, folder)
    value: Any = importlib.import_module(module_name)
    for part in name.split("."):
        if not hasattr(value, part):
            raise ValueError(f"module {module_name} has no {name!r}")
        value = getattr(value, part)
    return value
