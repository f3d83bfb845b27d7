"""`penstock describe`, `profile`, `plan` and `fit`: which pipelines a model has, or should have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.models import Inputs, Model, subject_of, waiting
from penstock.schedule.registry import AUTO, PLAIN, named_schedule, planned_schedules, schedule_names

if TYPE_CHECKING:
    from torch import nn

    from penstock.planning.fit import Recipe
    from penstock.planning.profile import Profile

Length = Annotated[int, typer.Option(min=1, help="Tokens of a sample.")]
OF_DTYPE = (
    "Type of weights and activations: fp32, bf16 or fp16, or torch's names (default: fp32; MODULE:NAME has its own)."
)
Dtype = Annotated[str | None, typer.Option(help=OF_DTYPE)]
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
OF_OPTIMIZER = "adam (two numbers for each weight) or sgd (none)."
Optimizer = Annotated[str, typer.Option(help=OF_OPTIMIZER)]
STATES = {"adam": 2, "sgd": 0}
Chunk = Annotated[int | None, typer.Option(min=1, help="Tokens of which logits exist at once, as in the run.")]
# What switches recomputed activations on in transformers, and in diffusers.
ENABLING = ("gradient_checkpointing_enable", "enable_gradient_checkpointing")
# Whether activations are recomputed: what is tried.
CHECKPOINTING = {"none": (False,), "all": (True,), "auto": (False, True, "stages")}
Quantization = Annotated[
    str | None, typer.Option(help="A frozen base in nf4, nf4-double, fp4 or int8, with --lora-rank.")
]
Rank = Annotated[int | None, typer.Option(min=1, help="Train adapters of this rank on all linear layers, frozen.")]
# As everywhere, and as the configuration called it until 0.4.
MICROBATCH = ("--microbatch-size", "--micro-batch-size")
OF_INPUTS = "Samples in a microbatch (default: as many as --inputs have, or {})."
Speed = Annotated[
    str | None, typer.Option(help="Speed of devices relative to each other: a100=1,t4=0.2 (default: data sheets).")
]
Memory = Annotated[
    str | None,
    typer.Option(help="Memory of each device for the run: 24GB, or a100=36GB,t4=14GB (default: 90 % if known)."),
]


def describe(
    model: Model,
    pipelines: Annotated[
        str,
        typer.Option(
            help="Stages x microbatches of each pipeline, such as 1x3,2x5. Stages are balanced by cost. (Ranks x "
            "microbatches, where the schedule puts several stages on a rank.)"
        ),
    ],
    microbatch_size: Annotated[int, typer.Option(*MICROBATCH, min=1, help="Samples in a microbatch.")] = 1,
    schedule: Annotated[str, typer.Option(help=f"Schedule of every pipeline: {', '.join(schedule_names())}.")] = AUTO,
    plot: Annotated[Path | None, typer.Option(help="Draw the layout and a step's timeline to this .svg file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the layout as JSON.")] = False,
) -> None:
    """Show how pipelines, maybe of different depth, hold a model: stages, ranks, units, parameters, share of the batch.

    Loads no weights and computes nothing.

    Example: penstock describe GPT2LMHeadModel --pipelines 1x2,3x6 --plot layout.svg
    """
    with waiting("following the model"):
        from penstock.checking.check import build_on_meta
        from penstock.layout.pipelines import parse_pipelines
        from penstock.simulation.describe import describe_pipelines

        subject = subject_of(model)
        whole = build_on_meta(subject) if isinstance(subject, str | type) else subject
        description = describe_pipelines(whole, parse_pipelines(pipelines), microbatch_size, schedule)
    print(json.dumps(description.data(), indent=1) if as_json else description)
    if plot is not None:
        path = description.write_svg(plot)
        if not as_json:
            print(f"drawn to {path}")


def profile(
    model: Model,
    batch: Annotated[int | None, typer.Option(*MICROBATCH, "--batch", min=1, help=OF_INPUTS.format(1))] = None,
    length: Length = 128,
    inputs: Inputs = None,
    dtype: Dtype = None,
    loss_chunk_tokens: Chunk = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... (default: a GPU if there is one).")] = None,
    optimizer: Optimizer = "adam",
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("profile.json"),
) -> None:
    """Measure what each unit of a model costs on this device, and under a launcher the links between ranks.

    Each kind of unit is run alone, so the model need not fit the device.

    Example: penstock profile GPT2LMHeadModel --microbatch-size 4 --length 512 -o profile.json
    """
    import os

    import torch

    from penstock.planning.memory import readable
    from penstock.planning.profiling import measure_links, profile_model
    from penstock.runtime.comm.bootstrap import ensure_process_group, find_place
    from penstock.runtime.comm.devices import local_device
    from penstock.tables import wrapped

    inside = between = None
    rank = 0
    if find_place(os.environ) is not None:
        ensure_process_group()
        rank = torch.distributed.get_rank()
        inside, between = measure_links()
    if rank == 0:
        with waiting("measuring"):
            where = torch.device(device) if device else local_device()
            whole, batch = _model(model, inputs, batch, 1, dtype)
            measured = profile_model(
                whole, batch, length, device=where, optimizer_states=_states(optimizer),
                loss_chunk_tokens=loss_chunk_tokens,
            )  # fmt: skip
            about = {**measured.about, "optimizer": optimizer}
            measured = replace(measured, inside=inside, between=between, about=about)
        seconds = sum(unit.seconds for unit in measured.units)
        summary = f"{measured.model}: {len(measured.units)} units, {seconds:.4g} s for a microbatch on {where}, "
        summary += f"{readable(sum(unit.state for unit in measured.units))} of weights, gradients and optimizer; "
        print(wrapped(f"{summary}written to {measured.write(output)}"))
        for name, link in (("inside a node", measured.inside), ("between nodes", measured.between)):
            if link is not None:
                print(f"link {name}: {link.latency * 1e6:.0f} microseconds, {readable(link.bandwidth)} a second")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # nobody leaves while rank 0 measures


def plan(
    model: Model,
    devices: Annotated[str, typer.Option(help="How many devices, or how many of each class: 7, or a100:4,t4:3.")] = "1",
    memory: Memory = None,
    speed: Speed = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch-size", "--global-batch", min=1, help="Samples in a step, over all pipelines (default: 64)."
        ),
    ] = None,
    microbatch: Annotated[
        int | None, typer.Option(*MICROBATCH, "--microbatch", min=1, help=OF_INPUTS.format(4))
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="What `penstock profile` wrote (default: estimated).")] = None,
    # Nothing by default, as a profile has its own.
    length: Annotated[int | None, typer.Option(min=1, help="Tokens of a sample (default: 128).")] = None,
    inputs: Inputs = None,
    dtype: Dtype = None,
    optimizer: Annotated[str | None, typer.Option(help=f"{OF_OPTIMIZER} Default: adam.")] = None,
    nodes: Annotated[str | None, typer.Option(help="Devices of each node: 2x4, or 4,8 (default: one node).")] = None,
    copies: Annotated[int, typer.Option(min=1, help="The least number of pipelines that hold each unit.")] = 1,
    schedule: Annotated[str, typer.Option(help="auto tries all that can be best; a name is the only one used.")] = AUTO,
    checkpointing: Annotated[
        str,
        typer.Option(help="Recompute activations: none, all, or auto (all or on some ranks, if that is better)."),
    ] = "none",
    loss_chunk_tokens: Chunk = None,
    sharded_optimizer: Annotated[
        bool,
        typer.Option(
            "--sharded-optimizer",
            help="Pipelines, and devices that share sequences, may divide the optimizer's state.",
        ),
    ] = False,
    quantization: Quantization = None,
    lora_rank: Rank = None,
    context_parallel: Annotated[
        int, typer.Option(min=1, help="context_parallel_size: number of devices that share each sequence.")
    ] = 1,
    most: Annotated[int, typer.Option(min=1, help="How many plans to show.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plans as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the first plan's step: .svg, or .json for Perfetto.")] = None,
) -> None:
    """Find the best pipelines for any set of devices: how many, their stages, microbatches and schedule.

    Example: penstock plan GPT2LMHeadModel --devices 5 --memory 8GB --global-batch-size 64
    """
    with waiting("planning"):
        from penstock.planning.cluster import USUAL_BETWEEN, USUAL_INSIDE, Cluster, parse_devices, parse_nodes
        from penstock.planning.context_parallel import share_sequences
        from penstock.planning.plan import Job
        from penstock.planning.planner import Infeasible, best_of, shares_of, with_equal_pipelines
        from penstock.planning.profile import Profile
        from penstock.planning.profiling import profile_model
        from penstock.planning.report import plan_data, plans_table
        from penstock.simulation.timeline import write_timeline

        if checkpointing not in CHECKPOINTING:
            known = " or ".join(f"--checkpointing {name}" for name in CHECKPOINTING)
            raise ValueError(f"{checkpointing!r} is no way to recompute activations: give {known}")
        if profile is not None:
            if quantization or lora_rank or loss_chunk_tokens or inputs:
                raise ValueError(
                    f"{profile} says what the model is: give --quantization, --lora-rank, --inputs and "
                    "--loss-chunk-tokens to an estimate, without --profile, or the last two to `penstock profile`"
                )
            profiled = Profile.read(profile)
            type_name = None if dtype is None else str(_dtype(dtype)).removeprefix("torch.")
            given: dict[str, int | str | None]
            given = {"microbatch-size": microbatch, "length": length, "dtype": type_name, "optimizer": optimizer}
            _refuse_others(profile, profiled, model, given)
            classes = parse_devices(devices, memory, speed, profiled.measured_on)
            microbatch = int(profiled.about.get("microbatch", 4))
        else:
            classes = parse_devices(devices, memory, speed)
            whole, microbatch = _model(model, inputs, microbatch, 4, dtype, quantization, lora_rank)
            profiled = profile_model(
                whole, microbatch, length or 128, operations_per_second=_fastest([kind.name for kind in classes]),
                optimizer_states=_states(optimizer or "adam"),
                loss_chunk_tokens=loss_chunk_tokens,
            )  # fmt: skip
        if schedule not in (AUTO, *schedule_names()):
            raise ValueError(f"unknown schedule {schedule!r}: known are {', '.join((AUTO, *schedule_names()))}")
        links = profiled.inside or USUAL_INSIDE, profiled.between or USUAL_BETWEEN
        cluster = Cluster(classes, parse_nodes(nodes) if nodes else (), *links)
        names = planned_schedules() if schedule == AUTO else (schedule,)
        whole_sequences = Job(profiled, cluster, _microbatches(global_batch, microbatch, 64), copies, schedules=names)
        job = share_sequences(whole_sequences, context_parallel)
        if job is None:
            raise ValueError(
                f"{context_parallel} devices share every sequence: each class and node needs a multiple of "
                f"{context_parallel} devices"
            )
        shares = [*shares_of(job), 0] if sharded_optimizer else [0]
        ways: Any = product(CHECKPOINTING[checkpointing], shares)
        try:
            plans, words = best_of([replace(job, checkpointing=how, sharded=share) for how, share in ways], most)
        except Infeasible as error:
            with suppress(Infeasible):
                if checkpointing == "none" and best_of(
                    [replace(job, checkpointing=True, sharded=share) for share in shares], 1
                ):
                    raise ValueError(f"{error}. It fits with --checkpointing all") from error
            raise
        plans, equal = with_equal_pipelines(plans, plans[0].job)
        plans = plans[:most]
    print(
        json.dumps([plan_data(plan, equal) for plan in plans], indent=1)
        if as_json
        else plans_table(plans, equal, words)
    )
    if plot is not None:
        path = write_timeline(plans[0].simulation.events, plot, f"{profiled.model}: a step as predicted")
        if not as_json:
            print(f"drawn to {path}")


def _refuse_others(file: Path, profile: Profile, model: str, given: Mapping[str, int | str | None]) -> None:
    """Raise ValueError if MODEL is another class than that of the profile in `file`, or an option is `given` otherwise
    than when it was measured."""
    if model.isidentifier() and model[0].isupper() and not Path(model).exists() and model != profile.model:
        raise ValueError(f"{file} is of {profile.model}, and not of {model}: leave --profile out, or measure {model}")
    for option, value in given.items():
        if value is None or value == (measured := profile.about.get(option.removesuffix("-size"))):
            continue
        if measured is None:
            raise ValueError(
                f"{file} does not say what --{option} it was measured with: leave it out, or measure again"
            )
        raise ValueError(
            f"{file} was measured with --{option} {measured}: give --{option} {measured}, or measure again"
        )


def _microbatches(global_batch: int | None, microbatch: int, usual: int) -> int:
    """How many microbatches a step has: if no global batch is given, as many as hold the `usual` number of samples."""
    if global_batch is not None and global_batch % microbatch:
        raise ValueError(
            f"a global batch of {global_batch} samples is no whole number of microbatches of {microbatch}: give "
            f"--global-batch-size {-(-global_batch // microbatch) * microbatch}, or another --microbatch-size"
        )
    return -(-(global_batch or usual) // microbatch)


def _model(
    name: str,
    inputs: str | None,
    microbatch: int | None,
    usual: int,
    dtype: str | None = None,
    quantization: str | None = None,
    rank: int | None = None,
) -> tuple[nn.Module, int]:
    """The user's MODEL, and the samples of a microbatch: those given, those of its inputs, or the `usual` number. It is
    of type `dtype`; None is float32, but what a user's own code makes is then as it was made. With adapters
    and a packed base, where these are asked for."""
    from torch import nn

    from penstock.checking.check import build_on_meta
    from penstock.modeling.instrumentation import known_of
    from penstock.nested import named_tensors
    from penstock.planning.qlora import adapt, pack

    if rank is None and quantization is not None:
        raise ValueError("--quantization needs --lora-rank 16: packed weights are not trained, adapters on them are")
    kind = None if dtype is None and ":" in name else _dtype(dtype or "float32")
    subject = subject_of(name, inputs)
    model = subject if isinstance(subject, nn.Module) else build_on_meta(subject)
    if kind is not None:
        nn.Module.to(model, kind)  # models of diffusers warn of it
    samples = usual if microbatch is None else microbatch
    if (given := known_of(model).example_inputs) is not None:
        sizes = list(dict.fromkeys(len(tensor) for tensor in named_tensors(given).values() if tensor.dim()))
        if microbatch is None and sizes:
            samples = sizes[0]
        elif samples not in sizes:
            raise ValueError(
                f"--inputs are those of a microbatch, but none of them has {samples} samples: leave --microbatch-size "
                f"out, or give --microbatch-size {sizes[0] if sizes else 1}"
            )
    if rank is not None:
        adapt(model, rank)
    if quantization is not None:
        pack(model, quantization)
    return model, samples


def _fastest(names: list[str]) -> float:
    """Operations per second of the fastest of these devices, to which speeds are relative; of an A100 if none is
    known."""
    from penstock.planning.cluster import operations_of

    return max(filter(None, map(operations_of, names)), default=312e12)


def fit(
    model: Model,
    devices: Annotated[str, typer.Option(help="How many devices, or how many of each class: 3090:3.")] = "1",
    memory: Memory = None,
    speed: Speed = None,
    length: Length = 2048,
    inputs: Inputs = None,
    microbatch: Annotated[int | None, typer.Option(*MICROBATCH, min=1, help=OF_INPUTS.format(1))] = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch-size", min=1, help="Samples in a step (default: 16).")
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option(min=1, help="Also with LoRA adapters of this rank, on a plain base and in 4 bits.")
    ] = None,
    dpo: Annotated[
        bool, typer.Option("--dpo", help="For DPO: a sample is a pair of sequences, and there is a reference.")
    ] = False,
    schedule: Annotated[str, typer.Option(help="Schedule of every pipeline.")] = PLAIN,
    every_way: Annotated[bool, typer.Option("--all", help="Show each way with and without what saves memory.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the memory of the best way's devices: .svg, .png.")] = None,
) -> None:
    """Does a model fit on these devices, and what must be switched on? From its configuration alone.

    Example: penstock fit LlamaForCausalLM --devices 3090:3 --length 2048 --lora-rank 16
    """
    with waiting("following the model"):
        from penstock.modeling.packed_layers import stacks_of
        from penstock.planning.cluster import USUAL_INSIDE, Cluster, operations_of, parse_devices
        from penstock.planning.fit import profiles_of, ways
        from penstock.planning.qlora import names_to_adapt
        from penstock.planning.report import draw_memory, fit_text

        if dpo and inputs:
            raise ValueError("--dpo is of pairs of sequences: give their --length in place of --inputs")
        classes = parse_devices(devices, memory, speed)
        cluster = Cluster(classes, inside=USUAL_INSIDE)
        fastest = _fastest([kind.name for kind in classes])
        subject, microbatch = _model(model, inputs, microbatch, 1)
        num_microbatches = _microbatches(global_batch, microbatch, 16)
        sizes = f"{type(subject).__name__}{' in its default size' * model.isidentifier()}"
        on = f"{devices} devices" if devices.isdigit() else devices
        on += " as fast as an A100" * (not any(operations_of(kind.name) for kind in classes))
        about = f"{sizes}, {sum(each.numel() for each in subject.parameters()):,} parameters, estimated for {on}"
        without = sorted(kind.name for kind in classes if not kind.has_bfloat16)
        about += f"; no bfloat16 on {' and '.join(without)}" * bool(without)
        unknown = sorted(kind.name for kind in classes if operations_of(kind.name) is None and not devices.isdigit())
        about += f"; bfloat16 taken for granted on {' and '.join(unknown)}" * bool(unknown and not without)
        checkpointing = next((name for name in ENABLING if hasattr(subject, name)), "gradient checkpointing")
        about += "; DPO's pairs and reference" * dpo
        linear = names_to_adapt(subject) if any(map(stacks_of, subject.modules())) else None
        recipes = recipes_of(lora_rank, not without, linear)
        profiles = profiles_of(subject, recipes, microbatch, length, fastest, dpo)
        in_parts = not dpo and _may_share_sequences(subject)
        all_ways = ways(profiles, cluster, num_microbatches, named_schedule(schedule).name, in_parts)
    samples = num_microbatches * microbatch
    if lora_rank is None and not any(way.plan for way in all_ways):
        about += "; adapters may fit (--lora-rank 16)"
    print(fit_text(all_ways, about, samples, None if inputs else length * (1 + dpo), checkpointing, every_way))
    if plot is not None:
        print(f"drawn to {draw_memory(all_ways, plot)}")


def _may_share_sequences(model: nn.Module) -> bool:
    """Whether `context_parallel_size` is offered: to models that are known to have one sequence, and a loss over its
    tokens. What a run then refuses shows only when it computes."""
    from transformers import PreTrainedModel

    from penstock.context_parallel.apply import refuse_model

    with suppress(NotImplementedError):
        refuse_model(model)
        assert isinstance(model, PreTrainedModel)
        return model.can_generate() and not model.config.is_encoder_decoder
    return False


def recipes_of(lora_rank: int | None, bfloat16: bool = True, linear: list[str] | None = None) -> list[Recipe]:
    """What `fit` tries, by how little it changes training. Without `bfloat16` a frozen base is in float16. `linear` has
    the names of a mixture's linear layers."""
    import torch

    from penstock.planning.fit import Recipe
    from penstock.planning.qlora import adapt, pack

    whole, half = torch.float32, torch.bfloat16 if bfloat16 else torch.float16
    recipes = [Recipe("float32", whole), Recipe("float32, sharded", whole, sharded=True)]
    if bfloat16:
        recipes += [
            # Two numbers of 32 bits are four of 16.
            Recipe("bf16, Adam f32", half, ("bitsandbytes.optim.AdamW, whose states are float32",), states=4),
            Recipe("bfloat16", half),
            Recipe("bf16, sharded", half, sharded=True),
        ]
    if lora_rank is not None:
        config = f"LoraConfig(r={lora_rank}, target_modules={json.dumps(linear or 'all-linear')})"
        call = "penstock.PackedExpertsConfig(" if linear else "BitsAndBytesConfig(\n    load_in_4bit=True,"
        four = f'{call}\n    bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype={half}\n)'
        lines = (config,) if bfloat16 else (config, "torch.amp.GradScaler(), as gradients of float16 underflow")
        recipes += [
            Recipe(f"LoRA {lora_rank}", half, lines, change=lambda model: adapt(model, lora_rank)),
            Recipe(
                f"nf4, LoRA {lora_rank}", half, (four, *lines), packed=True, change=lambda model: pack(model, "nf4")
            ),
        ]
    return recipes


def _dtype(name: str) -> Any:
    import torch

    dtype = getattr(torch, DTYPES.get(name, name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f"--dtype must be fp32, bf16, fp16 or one of torch's names, but is {name!r}: give --dtype bf16"
        )
    return dtype


def _states(optimizer: str) -> int:
    if optimizer not in STATES:
        raise ValueError(f"optimizer must be one of {', '.join(STATES)}, but is {optimizer!r}")
    return STATES[optimizer]
