"""On each rank of a pipeline: one class of transformers against itself unsplit; see `coverage.py`."""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

import penstock
from penstock.data.batch import microbatches_of
from penstock.data.media import MediaTokens

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tiny_models import NUM_TOKENS, build_running

from training import gradients_of, kept_in_double, run_step

NUM_MICROBATCHES = 4
GENERATIVE = ("causal-lm", "seq2seq-lm", "speech-seq2seq", "image-text", "image-text with images")
# Sums in another order, in the type the model runs in, relative to the largest entry.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-4}


def examine(class_name: str, task: str, num_stages: int, tensor_parallel_size: int = 1) -> dict[str, str]:
    """Train, evaluate and generate with a tiny model of a class; say for each what came out.

    Returns:
        "train", "evaluate" and, for generative tasks, "generate", each `exact`, `warned: <why>` (exact against the
        unsplit model accumulating over the same microbatches), `refused: <why>`, `wrong: <what differs>` or
        `crash: <error>`; or only "unsplit", why the class does not run unsplit.
    """
    with kept_in_double():
        try:
            model, inputs = build_running(class_name, task)
        except Exception as error:
            return {"unsplit": _short(error)}
        whole = copy.deepcopy(model)
        results: dict[str, str] = {}
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                penstock.initialize(
                    model,
                    {
                        "model_parallelism": {
                            "pipeline_parallel_size": num_stages,
                            "tensor_parallel_size": tensor_parallel_size,
                            "num_microbatches": NUM_MICROBATCHES,
                        }
                    },
                )
                results["train"] = _train(model, whole, inputs, caught)
        except Exception as error:
            return {"train": _failed(error)}
        tries = {"evaluate": _evaluate, "generate": _generate}
        for what, attempt in tries.items():
            if what == "generate" and (task not in GENERATIVE or not whole.can_generate()):
                continue
            try:
                results[what] = attempt(model, whole, inputs, results["train"])
            except Exception as error:
                results[what] = _failed(error)
        return results


def _train(model: Any, whole: nn.Module, inputs: Mapping[str, Any], caught: Sequence[Any]) -> str:
    losses = run_step(model, inputs)
    own = next((str(w.message) for w in caught if "accumulating over the same microbatches" in str(w.message)), None)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)  # only the rank with the loss warns
    warned = next((text for text in told if text is not None), None)
    pieces: list[tuple[Mapping[str, Any], float]] = [(inputs, 1.0)]
    if warned is not None:
        media = MediaTokens.of(whole.config)
        parts, sizes = microbatches_of(inputs, whole.main_input_name, NUM_MICROBATCHES, media=media)
        pieces = list(zip(parts, _shares(whole, inputs, parts, sizes, warned), strict=True))
    expected = 0.0
    for piece, share in pieces:
        loss = whole(**piece).loss * share
        loss.backward()
        expected += float(loss.detach())
    tolerance = TOLERANCES[next(p.dtype for p in whole.parameters())]
    found = sum(losses)
    if not abs(found - expected) <= tolerance * max(1.0, abs(expected)):
        return f"wrong: the loss is {found:.6g}, unsplit {expected:.6g}"
    wanted = gradients_of(whole)
    scale = max((float(g.abs().max()) for g in wanted.values() if g is not None and g.numel()), default=0.0)
    if not scale:
        return "wrong: no gradients unsplit, so that nothing was compared"
    sharding = model.pipeline.split.tensor_parallel
    for name, gradient in gradients_of(model).items():
        reference = wanted[name]
        if sharding is not None and name in sharding.shards and reference is not None:
            reference = sharding.shards[name].take(reference, sharding.index, sharding.size)
        zero = reference is None or not reference.any()
        if gradient is None or reference is None:
            if (gradient is None) != (reference is None) and not (zero and (gradient is None or not gradient.any())):
                return f"wrong: the gradient of {name} is {'there' if reference is None else 'missing'}"
        elif gradient.numel() and not float((gradient - reference).abs().max()) <= tolerance * scale:
            return f"wrong: the gradient of {name} differs by {float((gradient - reference).abs().max()) / scale:.1e}"
    return "exact" if warned is None else f"warned: {warned.partition(': the run equals')[0]}"


def _shares(
    whole: nn.Module, inputs: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], sizes: Sequence[int], warned: str
) -> list[float]:
    """What the losses of microbatches are weighed by.

    By samples, where the warning is about the loss. Otherwise by those of the usual weights that give the whole batch's
    loss in evaluation, where no statistics of the batch are in the way.
    """
    if "the loss of" in warned:
        return [size / sum(sizes) for size in sizes]
    labels = [part["labels"] for part in parts if isinstance(part.get("labels"), torch.Tensor)]
    weights: list[list[int]] = [list(sizes)]
    if len(labels) == len(parts):
        weights.append([int((each != -100).sum()) for each in labels])
        if labels[0].dim() > 1:
            weights.append([int((each[:, 1:] != -100).sum()) for each in labels])
    kinds = [*([count / sum(counts) for count in counts] for counts in weights), [1.0] * len(parts)]
    training = whole.training
    whole.eval()
    with torch.no_grad():
        expected = float(whole(**inputs).loss)
        losses = [float(whole(**part).loss) for part in parts]
    whole.train(training)
    totals = [sum(loss * share for loss, share in zip(losses, shares, strict=True)) for shares in kinds]
    best = min(range(len(kinds)), key=lambda index: abs(totals[index] - expected))
    return kinds[best] if abs(totals[best] - expected) <= 1e-6 * max(1.0, abs(expected)) else kinds[0]


def _evaluate(model: Any, whole: nn.Module, inputs: Mapping[str, Any], trained: str) -> str:
    model.eval(), whole.eval()
    with torch.no_grad():
        found, expected = model(**inputs), whole(**inputs)
        if trained.startswith("warned"):  # the loss, too, is that of accumulation
            media = MediaTokens.of(whole.config)
            parts, sizes = microbatches_of(inputs, whole.main_input_name, NUM_MICROBATCHES, media=media)
            shares = _shares(whole, inputs, parts, sizes, trained)
            losses = [whole(**part).loss * share for part, share in zip(parts, shares, strict=True)]
            expected["loss"] = torch.stack(losses).sum()
    tolerance = TOLERANCES[next(p.dtype for p in whole.parameters())]
    for name, reference in expected.items():
        if isinstance(reference, Cache):
            continue
        if name not in found:
            return f"wrong: the output has no {name}"
        ours, theirs = (
            [leaf for leaf in pytree.tree_leaves(part) if isinstance(leaf, torch.Tensor)]
            for part in (found[name], reference)
        )
        for a, b in zip(ours, theirs, strict=True):
            if a.shape != b.shape:
                return f"wrong: {name} has shape {list(a.shape)}, unsplit {list(b.shape)}"
            scale = max(1.0, float(b.abs().max()) if b.numel() and b.is_floating_point() else 1.0)
            if b.is_floating_point() and b.numel() and not torch.allclose(a, b, atol=tolerance * scale, equal_nan=True):
                said = f"wrong: {name} differs by {float((a - b).abs().max()):.1e}"
                with torch.no_grad(), contextlib.suppress(TypeError, RuntimeError):
                    if torch.allclose(whole(**inputs, use_cache=False)[name], a, atol=tolerance * scale):
                        return f"{said}, not so from the unsplit model with use_cache=False"
                with torch.no_grad(), contextlib.suppress(TypeError, RuntimeError):
                    media = MediaTokens.of(whole.config)
                    pieces, _ = microbatches_of(inputs, whole.main_input_name, NUM_MICROBATCHES, media=media)
                    if torch.allclose(torch.cat([whole(**piece)[name] for piece in pieces]), a, atol=tolerance * scale):
                        return f"{said}: the unsplit model's own depend on what else is in the batch"
                return said
    return "exact"


def _generate(model: Any, whole: nn.Module, inputs: Mapping[str, Any], trained: str) -> str:
    model.eval(), whole.eval()
    # Without padding: this is about the forward's path, and padding belongs on the left here.
    given = {name: value for name, value in inputs.items() if name != "labels" and "decoder" not in name}
    prompt = microbatches_of(given, whole.main_input_name, None, 2, media=MediaTokens.of(whole.config))[0][0]
    if "input_ids" in prompt:
        prompt.pop("attention_mask", None)
        ids = prompt["input_ids"]
        end = ids.shape[1] - NUM_TOKENS + 4  # images, if any, come before the text
        for name in ("input_ids", "mm_token_type_ids"):
            if name in prompt:
                prompt[name] = prompt[name][:, :end]
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    try:
        expected = whole.generate(**prompt, **options)
    except Exception as error:
        return f"unsplit: {_short(error)}"
    found = model.generate(**prompt, **options)
    return "exact" if torch.equal(found, expected) else "wrong: other tokens"


def _failed(error: Exception) -> str:
    if isinstance(error, NotImplementedError):
        return f"refused: {str(error).partition('is not implemented... ')[2] or error}"
    return f"crash: {_short(error)}"


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]
