"""Tiny quantised models with adapters, and one script for them, unsplit and over stages, with what differs then."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from optimum.quanto.library.extensions import get_extension
from peft import LoraConfig, get_peft_model
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

import penstock
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import cut, gradients_of, parallelize, rows, run_step, weigh

# Quanto compiles C++ when it first unpacks 4 bits on a CPU, which takes a minute. This is the same in Python.
get_extension("quanto_cpp")._lib = SimpleNamespace(
    unpack=lambda packed, bits: torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])
)

BITSANDBYTES = ("nf4", "fp4", "double", "int8")
UNSAVED = ("quanto8", "quanto4")  # by transformers
KINDS = (*BITSANDBYTES, "torchao8", "torchao-float8", *UNSAVED)

# Of a width that the 4-bit libraries pack in whole blocks.
SIZES = {
    "llama": {"hidden_size": 64, "intermediate_size": 128},
    "gpt2": {"n_embd": 64},
    "mixtral": {"hidden_size": 64, "intermediate_size": 128},
}


def quantisation(kind: str) -> Any:
    """A configuration of transformers for one of `KINDS`. `double` is nf4, its statistics quantised again."""
    if kind.startswith("torchao"):
        return transformers.TorchAoConfig((Int8WeightOnlyConfig if kind[-2] == "o" else Float8WeightOnlyConfig)())
    if kind.startswith("quanto"):
        return transformers.QuantoConfig(weights=f"int{kind[-1]}")
    if kind == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="fp4" if kind == "fp4" else "nf4",
        bnb_4bit_use_double_quant=kind == "double",
        bnb_4bit_compute_dtype=torch.float32,
    )


def write_base(family: str, folder: Path, kind: str | None = None, scale: float = 1.0, **sizes: int) -> Path:
    """A checkpoint of a tiny model; with a `kind`, saved quantised."""
    model: Any = FAMILIES[family].build(dtype=torch.float32, **{**SIZES[family], **sizes})
    for parameter in model.parameters():
        parameter.data.mul_(scale)
    model.save_pretrained(folder)
    if kind is not None:
        quantised = type(model).from_pretrained(folder, quantization_config=quantisation(kind))
        folder = folder / kind
        quantised.save_pretrained(folder)
    return folder


def adapt(model: Any) -> Any:
    torch.manual_seed(1)
    layers = ["c_attn", "c_fc"] if model.config.model_type == "gpt2" else ["q_proj", "o_proj", "down_proj", "gate_proj"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=layers, init_lora_weights=False, task_type="CAUSAL_LM"))


def load(family: str, folder: Path, kind: str | None, adapters: bool = True) -> Any:
    """The unsplit model; `kind` None for a checkpoint that was saved quantised."""
    config = {} if kind is None else {"quantization_config": quantisation(kind)}
    model = getattr(transformers, FAMILIES[family].model_class).from_pretrained(folder, dtype=torch.float32, **config)
    return adapt(model) if adapters else model


# -- one script for the unsplit model and for stages -------------------------------------------------------------------

# Of single precision, which the libraries compute in (bitsandbytes' 8 bits, in evaluation on a CPU, in float16).
ROUNDING = 5e-6
SCHEDULES = ("1f1b", "zb-h1", "zb-v")
# Ranks and stages: two stages and three, and two replicas.
PLACES = ((2, 2), (3, 3), (4, 2))


def families_and_ways(kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What there is of a kind. transformers packs the layers of GPT-2, which are none of `nn.Linear`, by bitsandbytes
    only."""
    families = ("llama", "mixtral", "gpt2") if kind in BITSANDBYTES else ("llama", "mixtral")
    return families, ("whole", "in stages") if kind in UNSAVED else ("whole", "in stages", "saved")


def covering(kind: str) -> list[tuple[str, str, int, int, str]]:
    """Three cases: family, way, ranks, stages, schedule. Over all kinds they are each pair of the five that there
    is."""
    (families, ways), k = families_and_ways(kind), KINDS.index(kind)
    turns = ((families[(n + 2 * k) % len(families)], ways[(n + k) % len(ways)], n) for n in range(3))
    return [(family, way, *PLACES[n], SCHEDULES[(n + k // 3) % 3]) for family, way, n in turns]


@functools.cache
def base(family: str, kind: str | None = None, **sizes: int) -> Path:
    return write_base(family, Path(tempfile.mkdtemp()), kind, **sizes)


def shallow_base(family: str, kind: str | None = None) -> Path:
    """Of three layers: with what is before and after them, they are enough for two stages on each of three ranks."""
    return base(family, kind, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 3})


def evaluated(model: Any) -> tuple[float, torch.Tensor]:
    """A loss, and tokens chosen greedily. What kernels of 8 bits give for a row depends on the rows beside it."""
    model.eval()
    split = isinstance(model, penstock.PipelineModel)
    pieces = [(batch("causal", 4), 1.0)] if split else weigh("causal", cut(batch("causal", 4), [1] * 4))
    with torch.no_grad():
        loss = sum(float(model(**piece).loss) * share for piece, share in pieces)
        tokens = model.generate(batch("causal", 2)["input_ids"][:, :4], max_new_tokens=4, do_sample=False)
    return loss, tokens


def story(model: Any, step: Any, folder: Path) -> dict[str, Any]:
    """The same script for both: a step, an evaluation, the adapters saved and then merged into the base."""
    model.train()
    loss, gradients = step(model), gradients_of(model)
    gradients = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    told = {"loss": loss, "gradients": gradients, "evaluated": evaluated(model)}
    told["counted"] = model.get_nb_trainable_parameters()
    model.save_pretrained(folder)
    return {**told, "merged": evaluated(model.merge_and_unload())}


def plain_step(model: Any) -> float:
    """Over the microbatches that the split model has, so that kernels see the same rows."""
    losses = []
    for piece, share in weigh("causal", cut(batch("causal", 4), [1] * 4)):
        (loss := model(**piece).loss * share).backward()
        losses.append(float(loss))
    return sum(losses)


def split_step(model: Any) -> float:
    run_step(model, rows(batch("causal", 4), model.data_parallel_rank, model.data_parallel_size))
    return float(model.pipeline.last_step.global_loss)


@functools.cache
def unsplit(family: str, kind: str, saved: bool) -> tuple[dict[str, Any], Path]:
    """What the unsplit model tells, and the folder of its adapters."""
    folder = shallow_base(family, kind if saved else None)
    adapters = folder / f"adapters-{kind}"
    return story(load(family, folder, None if saved else kind), plain_step, adapters), adapters


def split_stories(
    family: str, folder: Path, kind: str | None, whole: bool, stages: int, schedules: Sequence[str], saved: Path
) -> list[dict[str, Any]]:
    """On a worker, with one schedule after another."""
    stories = []
    for schedule in schedules:
        options: dict[str, Any] = {"schedule": schedule, "microbatch_size": 1}
        if whole:
            model = parallelize(load(family, folder, kind), stages, **options)
        else:
            options |= {} if kind is None else {"quantization_config": quantisation(kind)}
            model = penstock.from_pretrained(
                str(folder), adapt=adapt, dtype=torch.float32, pipeline_parallel_size=stages, **options
            )
        stories.append(story(model, split_step, saved))
    return stories


def compared(
    pool: Pool, family: str, kind: str, way: str, ranks: int, stages: int, schedules: Sequence[str], folder: Path
) -> list[dict[str, float]]:
    """For each schedule, by how much the stages differ from the unsplit model. Adapters are saved in `folder`.

    Args:
        way: the base is made and then split ("whole"), packed by each rank ("in stages"), or was saved so ("saved").
    """
    saved = way == "saved"
    expected, _ = unsplit(family, kind, saved)
    arguments = family, shallow_base(family, kind if saved else None), None if saved else kind, way == "whole"
    ranks_stories = pool.run(ranks, split_stories, *arguments, stages, schedules, folder, timeout=240)
    return [differences(runs, expected) for runs in zip(*ranks_stories, strict=True)]


def differences(runs: Sequence[dict[str, Any]], expected: dict[str, Any]) -> dict[str, float]:
    """The largest over ranks: of losses beside the expected one, of gradients beside the largest entry of any; and how
    many tokens, names of gradients and numbers of parameters are others."""
    found = dict.fromkeys(("loss", "gradients", "evaluation", "merged", "others"), 0.0)
    largest = max(float(gradient.abs().max()) for gradient in expected["gradients"].values())
    assert largest > 0 and expected["loss"] > 0

    def note(column: str, difference: float) -> None:
        found[column] = max(found[column], difference)

    for run in runs:
        note("loss", abs(run["loss"] / expected["loss"] - 1))
        for name in run["gradients"].keys() & expected["gradients"].keys():
            gap = (run["gradients"][name] - expected["gradients"][name]).abs().max()
            note("gradients", float(gap) / largest)
        for column, what in (("evaluation", "evaluated"), ("merged", "merged")):
            note(column, abs(run[what][0] / expected[what][0] - 1))
            found["others"] += int((run[what][1] != expected[what][1]).sum())
        found["others"] += run["counted"] != expected["counted"]
    found["others"] += len(set().union(*(run["gradients"] for run in runs)) ^ expected["gradients"].keys())
    return found
