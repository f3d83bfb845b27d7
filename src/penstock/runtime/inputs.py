"""What a step runs on: the microbatches of one rank's pipeline, with what was found out about them beforehand."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

from penstock.modeling.graph.loss import Criterion, LossTerm, read_counts
from penstock.modeling.graph.plan import DataflowPlan
from penstock.nested import named_tensors
from penstock.runtime.gradients.holders import HeldParameter

# Odd multipliers keep seeds of neighbouring steps and microbatches far apart and distinct for long.
STEP_STRIDE, MICROBATCH_STRIDE = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
SEED_MASK = (1 << 63) - 1
# How each warning of what a pipeline cannot keep ends.
AS_ACCUMULATED = (
    "the run equals the unsplit model accumulating over the same microbatches, not over the whole batch at once"
)


@dataclass(frozen=True)
class StepInputs:
    """The microbatches of one rank's pipeline in one step.

    Attributes:
        signatures: each one's plan, and its inputs' shapes and types; equal signatures have equal shapes at every
            boundary. One whose shapes there also depend on the inputs' values is equal to no other.
        counts: each one's numbers of elements in the means that make up the loss.
        first_microbatch: the index of the first one in the global batch (it seeds dropout).
        number: the number of the training step, counted from 0 alike on all ranks; it seeds dropout.
        hosts: `microbatches`, with CPU tensors in place of those on an accelerator where there are copies of them.
    """

    microbatches: Sequence[Mapping[str, Any]]
    plans: Sequence[DataflowPlan]
    signatures: Sequence[Any]
    counts: Sequence[Sequence[float]]
    sizes: Sequence[int]
    first_microbatch: int
    number: int
    hosts: Sequence[Mapping[str, Any]]
    run_seed: int = 0
    criterion: Criterion | None = None

    @classmethod
    def of(
        cls,
        microbatches: Sequence[Mapping[str, Any]],
        plan_of: Callable[..., DataflowPlan],
        sizes: Sequence[int],
        first_microbatch: int,
        number: int,
        with_counts: bool,
        hosts: Sequence[Mapping[str, Any]] | None = None,
        run_seed: int = 0,
        criterion: Criterion | None = None,
    ) -> StepInputs:
        """Make the inputs of microbatches; `plan_of(microbatch, criterion=...)` gives the plan of one."""
        hosts = microbatches if hosts is None else hosts
        plans: list[DataflowPlan] = []
        signatures: list[Any] = []
        previous: Any = None
        for microbatch in microbatches:
            form: list[tuple[Any, ...]] = []
            for name, value in microbatch.items():
                if isinstance(value, torch.Tensor):
                    form.append((name, value.shape, value.dtype))
                else:
                    form.append((name, id(value)))
                    form += [(inner, t.shape, t.dtype) for inner, t in named_tensors({name: value}).items()]
            same = form == previous  # nearly always
            plans.append(plans[-1] if same else _plan(plan_of, microbatch, criterion))
            if same and not plans[-1].shapes_vary:
                signatures.append(signatures[-1])
            else:
                apart = [object()] if plans[-1].shapes_vary else []
                signatures.append((plans[-1].digest, *(entry for entry in form if len(entry) == 3), *apart))
            previous = form
        _refuse_unlike_losses(plans)
        counts = read_counts(
            [
                plan.loss.count_later(microbatch, size) if with_counts and plan.loss is not None else ()
                for plan, microbatch, size in zip(plans, hosts, sizes, strict=True)
            ]
        )
        return cls(microbatches, plans, signatures, counts, sizes, first_microbatch, number, hosts, run_seed, criterion)

    @cached_property
    def different_plans(self) -> list[DataflowPlan]:
        """Nearly always a single one."""
        return list({id(plan): plan for plan in self.plans}.values())

    @property
    def changed_later(self) -> list[str]:
        """Attributes that the model's code changes after the units of some stage."""
        return sorted({name for plan in self.different_plans for name in plan.changed_later})

    @property
    def changed(self) -> list[str]:
        """Attributes that the model's code changes."""
        return sorted({name for plan in self.different_plans for name in plan.changed})

    def total_counts(self) -> list[float]:
        return [sum(column) for column in zip(*self.counts, strict=True)]

    def shares(self, microbatch: int, totals: Sequence[float]) -> Sequence[float] | None:
        """What part a microbatch is of each mean over a batch with `totals` elements; None without a loss."""
        rule = self.plans[microbatch].loss
        return None if rule is None else rule.shares(self.counts[microbatch], totals)

    def plans_checksum(self) -> int:
        """A number that is equal on all ranks of the pipeline if they have the same plans."""
        checksums = list(dict.fromkeys(plan.checksum for plan in self.different_plans))
        return checksums[0] if len(checksums) == 1 else zlib.crc32(repr(checksums).encode())

    def num_tokens(self) -> int:
        """Tokens of all microbatches, padding counted; 0 if the model is given none."""
        total, previous, tokens = 0, None, 0
        for microbatch, signature in zip(self.microbatches, self.signatures, strict=True):
            if signature is not previous:  # nearly always it is
                previous, tokens = signature, _tokens(microbatch)
            total += tokens
        return total

    def seed(self, microbatch: int) -> int:
        """The seed of a microbatch's dropout: of the step and its place in the global batch, not of the layout."""
        index = self.first_microbatch + microbatch
        return (self.run_seed + self.number * STEP_STRIDE + index * MICROBATCH_STRIDE) & SEED_MASK


def _refuse_unlike_losses(plans: Sequence[DataflowPlan]) -> None:
    """Raise NotImplementedError if the losses of microbatches are made of unlike means: the batch then has none."""
    if len(set(map(id, plans))) <= 1:  # nearly always
        return
    made = [None if plan.loss is None else [replace(term, calls=()) for term in plan.loss.counted] for plan in plans]
    other = next((number for number, terms in enumerate(made) if terms != made[0]), None)
    if other is not None:
        raise NotImplementedError(
            f"the loss of microbatch {other} is made of other means ({_means(made[other])}) than that of microbatch 0 "
            f"({_means(made[0])}), so it cannot be told what part each is of the batch's: let the model compute the "
            "same means for every microbatch (of zeros, where there is nothing to compute)"
        )


def _means(terms: Sequence[LossTerm] | None) -> str:
    return "no loss" if terms is None else ", ".join(f"{term.kind} of {term.input or 'the batch'}" for term in terms)


def _tokens(microbatch: Mapping[str, Any]) -> int:
    ids, embedded = microbatch.get("input_ids"), microbatch.get("inputs_embeds")
    if isinstance(ids, torch.Tensor):
        return ids.numel()
    return math.prod(embedded.shape[:-1]) if isinstance(embedded, torch.Tensor) else 0


def refuse_tuples(model: nn.Module, microbatches: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the model is asked for tuples in place of outputs with named fields."""
    if not isinstance(model, PreTrainedModel):
        return
    asked = microbatches[0].get("return_dict") if microbatches else None
    if not (getattr(model.config, "return_dict", True) if asked is None else asked):
        raise ValueError(
            "outputs of a parallelised model have named fields, so return_dict=False cannot be used: leave it out, "
            "or call to_tuple() on an output"
        )


# Inputs that models look up in a table.
INTEGER_INPUTS = ("input_ids", "decoder_input_ids", "token_type_ids", "position_ids")


def refuse_wrong_types(model: nn.Module, microbatches: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for texts and lists of numbers in place of token ids or labels, and for ids of a model of
    transformers that are no integers."""
    for name, value in (microbatches[0] if microbatches else {}).items():
        if name.endswith(("ids", "labels")) and isinstance(_first(value), str | bytes | int | float):
            raise ValueError(
                f"{name} is {value!r:.40}, not a tensor: pass tensors, for texts those of "
                "tokenizer(texts, return_tensors='pt', padding=True)"
            )
        ids = name in INTEGER_INPUTS and isinstance(model, PreTrainedModel)
        if ids and isinstance(value, torch.Tensor) and value.is_floating_point():
            raise ValueError(
                f"{name} is of {value.dtype}, but ids are integers: pass them as the tokenizer gives them, as "
                "torch.int64"
            )


def _first(value: Any) -> Any:
    """The first element of lists in lists, or the value itself."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return value


def _plan(
    plan_of: Callable[..., DataflowPlan], microbatch: Mapping[str, Any], criterion: Criterion | None
) -> DataflowPlan:
    """The plan, or a ValueError if labels of an unusual type, or no token for padding, are why there is none."""
    try:
        return plan_of(microbatch, criterion=criterion)
    except NotImplementedError as error:
        if "no padding token is defined" in str(error):  # as transformers' classifiers of texts say it
            raise ValueError(
                "the model has no token for padding, so a microbatch has one sample: set model.config.pad_token_id, or "
                f"num_microbatches to the number of samples ({error})"
            ) from error
        for name, value in microbatch.items():
            if name.endswith("labels") and isinstance(value, torch.Tensor) and value.dtype != torch.int64:
                raise ValueError(
                    f"{name} is of {value.dtype}, with which the model computes no loss: labels of tokens and classes "
                    f"are of torch.int64 ({error})"
                ) from error
        raise


def warn_of_inexact_loss(model: nn.Module, inputs: StepInputs) -> None:
    """Warn, as often as the user's filters let it through, if microbatches cannot add up to the whole batch's loss."""
    plans = inputs.different_plans
    for reason in dict.fromkeys(plan.loss.reason for plan in plans if plan.loss and not plan.loss.exact):
        what = f"the loss of {type(model).__name__} is no mean over tokens or samples ({reason})"
        warnings.warn(f"{what}: {AS_ACCUMULATED}", stacklevel=2)


def warn_of_batch_statistics(model: nn.Module) -> None:
    normalising = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if normalising:
        what = f"in training, batch normalisation ({_some(normalising)}) takes its statistics from each microbatch"
        warnings.warn(f"{what}: {AS_ACCUMULATED}", stacklevel=3)


def kept_buffers(model: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """The buffers that a checkpoint has, each with the number of its changes in place. Not those of batch
    normalisation, of which users are warned at once."""
    return {
        f"{module_name}.{name}".lstrip("."): (buffer, 0 if buffer.is_inference() else buffer._version)
        for module_name, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set and not isinstance(module, _BatchNorm)
    }


def warn_of_changed_buffers(model: nn.Module, before: Mapping[str, tuple[torch.Tensor, int]]) -> None:
    """Warn if the forwards of a step have changed buffers of this rank's stages."""
    now = kept_buffers(model) if before else {}
    both = [(name, *before[name], *now[name]) for name in now.keys() & before.keys()]
    changed = sorted(name for name, was, version, buffer, latest in both if was is not buffer or version != latest)
    if changed:
        what = f"a forward in training changes buffers ({_some(changed)}), and runs for each microbatch"
        warnings.warn(f"{what}: {AS_ACCUMULATED}", stacklevel=2)


def warn_of_kept_state(names: Sequence[str]) -> None:
    """Warn of attributes that each forward of a step has changed."""
    if names:
        what = f"a forward in training changes attributes of modules ({_some(names)}), and runs for each microbatch"
        warnings.warn(f"{what}: {AS_ACCUMULATED}", stacklevel=2)


def warn_of_later_changes(inputs: StepInputs) -> None:
    """Warn of attributes that the model's code changes where ranks of earlier stages have left the forward."""
    if names := inputs.changed_later:
        warnings.warn(
            f"the model's code changes attributes ({_some(names)}) after the units of earlier stages, whose ranks have "
            "left the forward by then, and keep what they had. If a later forward uses these attributes, the results "
            "are not those of the unsplit model: change them before the first unit, or in your loop",
            stacklevel=2,
        )


def warn_of_variables(names: Sequence[str]) -> None:
    """Warn of variables outside of functions that forwards of this rank's stages have changed."""
    if names:
        warnings.warn(
            f"forwards change variables ({_some(names)}): each rank has its own, which the forwards of its own stages "
            "change, once for each microbatch. What depends on them is not as in the unsplit model",
            stacklevel=2,
        )


def warn_of_kept_tensors(names: Sequence[str]) -> None:
    """Warn of forward hooks, by their modules, that have kept tensors of this rank's stages."""
    if names:
        warnings.warn(
            f"forward hooks keep tensors ({_some(names)}). They run on the rank that holds their module only: other "
            "ranks have nothing of them, and a loss that uses them there lacks them. Let the forward return them",
            stacklevel=2,
        )


def warn_of_changes_by_stages(inputs: StepInputs) -> None:
    """Warn of attributes that the model's code changes, where a rank holds several stages."""
    if names := inputs.changed:
        warnings.warn(
            f"the model's code changes attributes ({_some(names)}), and a rank that holds several stages runs it for "
            "each of them. If a later forward uses these attributes, the results are not those of the unsplit model: "
            "choose a schedule with one stage for each rank",
            stacklevel=2,
        )


def warn_of_norms_of_one(given: Sequence[HeldParameter]) -> None:
    """Warn where several ranks have each given another parameter, and nothing else, to one norm."""
    names = f" ({given[0].name})" if len(given) == 1 else ""
    warnings.warn(
        f"a gradient norm was asked of a single parameter{names}, but other ranks have given another one to the same "
        "call, so it is that of all of these. To clip each parameter by itself, scale its gradient by its own norm: "
        "parameter.grad.mul_((max_norm / (parameter.grad.norm() + 1e-6)).clamp(max=1))",
        stacklevel=2,
    )


def warn_of_hooks(names: Sequence[str]) -> None:
    """Warn of hooks of the user's own on the gradients of these parameters."""
    if names:
        what = (
            f"hooks on the gradients of parameters ({_some(names)}) see those of each microbatch. What is linear in a "
            "gradient (a mask, a factor) stays exact. For anything else, such as clamping"
        )
        warnings.warn(f"{what}, {AS_ACCUMULATED}", stacklevel=2)


def warn_of_equal_batches(pipelines: Sequence[int]) -> None:
    """Warn of pipelines that were given the same batch in the first step."""
    if pipelines:
        warnings.warn(
            f"pipelines {', '.join(map(str, pipelines))} were given the same batch in the first step, so that its "
            "samples count several times: give each pipeline its own, by model.prepare_dataloader(dataset, "
            "batch_size), or by model.data_parallel_rank of model.data_parallel_size",
            stacklevel=2,
        )


def warn_of_batchwise(inputs: StepInputs) -> None:
    """Warn of operations whose backward depends on the whole batch."""
    if units := sorted({each for plan in inputs.different_plans for each in plan.batchwise}):
        warnings.warn(f"the gradient of {_some(units)} depends on the whole batch: {AS_ACCUMULATED}", stacklevel=2)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def refuse_without_loss(model: nn.Module, inputs: StepInputs) -> None:
    if any(plan.loss is None for plan in inputs.different_plans):
        raise ValueError(
            f"{type(model).__name__} computes no loss from the inputs {sorted(inputs.microbatches[0])}: "
            "pass labels, or a criterion=..., or evaluate under torch.no_grad()"
        )
