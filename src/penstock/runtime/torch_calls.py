"""What torch's own functions do with a rank's part of a model, where it would silently differ from the whole's.

`clip_grad_norm_` and `get_total_norm` take the norm of the whole model's gradients, wherever they were imported from; a
`GradScaler` hears of overflows on all ranks; optimizers whose updates depend on parameters of other ranks are refused,
as are updates inside a training step. The engine is told when the updates that are not refused begin and end.
A scheduler that accelerate has prepared steps once for each replica, not for each rank. Other models' parameters are
not concerned.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from penstock.modeling.instrumentation import known_of
from penstock.runtime.comm.rollcall import Call
from penstock.runtime.engine import Engine
from penstock.runtime.gradients.holders import HeldParameter
from penstock.runtime.optimizer_trial import Dependence, clips, dependence, inner_function

# What a trial of an optimizer may fail to show is known by the names of classes, of torch and others. Those that use
# sums over all parameters: a line search, a norm, a distance. timm's Lamb first clips by the norm of all gradients.
OVER_ALL_PARAMETERS = {
    "LBFGS",
    "Lamb",
    "FusedLAMB",
    "SAM",
    "Prodigy",
    "DAdaptAdam",
    "DAdaptSGD",
    "DAdaptLion",
    "DAdaptAdaGrad",
}
# Those that divide their state among all ranks, which they take for replicas.
OVER_ALL_RANKS = {"ZeroRedundancyOptimizer", "OSS", "DeepSpeedZeroOptimizer", "DistributedOptimizer"}
# Those that compute an update from the whole of a matrix: its norm (bitsandbytes' LAMB), sums over its rows and
# columns, products with itself.
OVER_MATRICES = {"Adafactor", "LAMB", "LARS", "Muon", "Shampoo", "SOAP"}

# Whether a call of `clip_grad_norm_` that is under way was given one parameter.
_alone = ContextVar("_alone", default=False)

# In the order in which they were made, which is that of all ranks.
_engines: weakref.WeakKeyDictionary[Engine, None] = weakref.WeakKeyDictionary()
# What a trial has shown of optimizers of the engines' parameters, and of how many of their groups.
_tried: weakref.WeakKeyDictionary[Optimizer, tuple[int, Dependence]] = weakref.WeakKeyDictionary()


def follow(engine: Engine) -> None:
    """From now on torch's functions know the gradients and parameters of `engine`."""
    _engines[engine] = None
    _install()


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_refuse_unsupported_optimizer)
    register_optimizer_step_pre_hook(_before_update)
    register_optimizer_step_post_hook(_after_update)
    # Both are wrappers for torch.no_grad. The function inside is exchanged, so that whoever has imported one has ours.
    for wrapper, ours in ((torch.nn.utils.clip_grad_norm_, _clip), (torch.nn.utils.get_total_norm, _total_norm)):
        cell = inner_function(wrapper)
        cell.cell_contents = functools.partial(ours, cell.cell_contents)
    scaler: Any = torch.amp.GradScaler
    scaler._unscale_grads_ = functools.partialmethod(_unscale, scaler._unscale_grads_)
    if (accelerates := sys.modules.get("accelerate.scheduler")) is not None:  # transformers imports it if it is there
        scheduler: Any = accelerates.AcceleratedScheduler
        scheduler.step = functools.partialmethod(_step_of_scheduler, accelerates, scheduler.step)


def _clip(torchs_own: Any, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Torch's own passes on only the gradients, and there may be none: whose the parameters are is known here."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if given and all(parameter.grad is None for parameter in given) and not engines_of(given):
        return torch.zeros(())
    token = _alone.set(len(given) == 1)
    try:
        norm: torch.Tensor = torchs_own(given or parameters, *args, **kwargs)
    finally:
        _alone.reset(token)
    return norm


def _total_norm(
    torchs_own: Any, tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None
) -> torch.Tensor:
    gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    engine, held = _engine_of(gradients)
    if engine is None:
        total: torch.Tensor = torchs_own(gradients, norm_type, error_if_nonfinite, foreach)
        return total
    norm: torch.Tensor = engine.norm_of(held, float(norm_type), error_if_nonfinite, _alone.get())
    return norm


def _engine_of(gradients: Sequence[torch.Tensor]) -> tuple[Engine | None, Sequence[HeldParameter]]:
    """Whose gradients these are, if an engine's."""
    if not gradients:
        return _only_one_trained(), ()
    for engine in _engines:
        weights = engine.held_of(gradients) if engine.is_open else [None]
        held = [weight for weight in weights if weight is not None]
        if len(held) == len(weights):
            return engine, held
        if held:
            raise ValueError(
                f"the norm of {len(gradients)} gradients, of which {len(held)} are of one parallelised model (such as "
                f"{held[0].name}) and the others are not: clip each model by itself"
            )
    return None, ()


def _only_one_trained() -> Engine | None:
    """The model that is meant on a rank that has no gradient to give, but must take part."""
    if len(_engines) > 1:
        gc.collect()  # models that are used no more
    trained = [engine for engine in _engines if engine.is_open and engine.report is not None]
    if len(trained) > 1:
        raise ValueError(
            f"this rank has no gradient to give to the norm, and trains {len(trained)} parallelised models: which of "
            "them is meant cannot be told. Call model.clip_grad_norm_(max_norm)"
        )
    return trained[0] if trained else None


def engines_of(parameters: Iterable[torch.Tensor]) -> list[Engine]:
    """Those whose model has some of these parameters, on whatever rank; in one order on all ranks."""
    ids = set(map(id, parameters))
    known = ((engine, (*engine.known.values(), known_of(engine.split.model).stand_in)) for engine in _engines)
    return [engine for engine, every in known if not ids.isdisjoint(map(id, every))]


def _unscale(scaler: Any, torchs_own: Any, optimizer: Optimizer, *args: Any) -> dict[torch.device, torch.Tensor]:
    """Whether gradients of this optimizer are not finite, which is so on all ranks if it is on one. On a rank that has
    no gradient for it torch's own finds nothing, and the scaler's step would fail."""
    infinite: dict[torch.device, torch.Tensor] = torchs_own(scaler, optimizer, *args)
    for engine in engines_of(parameter for group in optimizer.param_groups for parameter in group["params"]):
        engine.recovery.refuse("a GradScaler", "give the plugin precision='fp16'")
        if engine.is_open:
            with engine.together(Call.UNSCALE, [int(any(map(bool, infinite.values())))]) as facts_by_rank:
                overflow = any(facts[0] for facts in facts_by_rank.values())
            infinite[engine.device] = torch.full((), float(overflow), device=engine.device)
    return infinite


def _step_of_scheduler(scheduler: Any, accelerates: Any, accelerates_own: Any, *args: Any, **kwargs: Any) -> None:
    """Accelerate steps once for each process, as a step takes so many batches. Here it takes one for each replica."""
    groups = (group for optimizer in scheduler.optimizers for group in optimizer.param_groups)
    engines = engines_of(parameter for group in groups for parameter in group["params"])
    if not engines:
        accelerates_own(scheduler, *args, **kwargs)
        return
    state = SimpleNamespace(num_processes=engines[0].layout.num_replicas)
    with mock.patch.object(accelerates, "AcceleratorState", lambda: state):
        accelerates_own(scheduler, *args, **kwargs)


def _updated_by(optimizer: Optimizer) -> list[Engine]:
    """The engines with weights on this rank that an optimizer has."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [engine for engine in _engines if engine.parts.updates.has_any_of(parameters)]


def _before_update(optimizer: Optimizer, *_: Any) -> None:
    for engine in _updated_by(optimizer):
        engine.parts.open_step.refuse("optimizer.step() inside the loop over microbatches")
        engine.parts.updates.begin_update()


def _after_update(optimizer: Optimizer, *_: Any) -> None:
    for engine in _updated_by(optimizer):
        engine.parts.updates.end_update()


def _refuse_unsupported_optimizer(optimizer: Optimizer, args: Sequence[Any], kwargs: Any) -> None:
    """Before each optimizer's step: refuse one whose updates depend on other parameters, or that runs the model, or
    that works with all ranks; and one that computes from whole matrices where tensor parallelism slices them."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kind, engines = type(optimizer).__name__, engines_of(parameters)
    if not engines:
        return
    depends_on = max(_known_dependence(type(optimizer), closure), _seen_dependence(optimizer, engines))
    if depends_on is Dependence.RANKS:
        raise NotImplementedError(
            f"{kind} divides its state among all ranks, or exchanges something else between them, as if they were "
            "replicas, but each has parameters of its own. Take torch.optim.AdamW, and sharded_optimizer=True to "
            "divide its state"
        )
    # A closure that several processes call would run the model on the samples of each.
    run_apart = closure is not None and any(engine.layout.world_size > 1 for engine in engines)
    instead, ids = "", set(map(id, parameters))
    if depends_on is Dependence.PARAMETERS and (run_apart or _are_divided(engines)):
        how = "lets updates depend on other parameters, or runs the model, but each rank has its own part alone"
        instead = " (clip gradients before step(), or in it also if there are none, if it does that)"
    elif depends_on is Dependence.MATRIX and any(
        weight.sliced and id(weight.parameter) in ids for engine in engines for weight in engine.held
    ):
        how = "computes an update from the whole of a matrix, but with tensor parallelism each rank has parts of them"
        instead = ", or leave tensor_parallel_size out"
    else:
        return
    raise NotImplementedError(
        f"{kind} {how}: its updates would not be those of the unsplit model. Take one that treats each number by "
        f"itself, such as torch.optim.AdamW{instead}"
    )


def depends_on_others(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether an optimizer is known, or a trial on `device` shows it, to let updates depend on other parameters, or on
    other ranks."""
    known = _known_dependence(type(optimizer), closure=None)
    seen = Dependence.NOTHING if _is_torchs(type(optimizer)) else dependence(optimizer, device)
    return max(known, seen) in (Dependence.PARAMETERS, Dependence.RANKS)


def _seen_dependence(optimizer: Optimizer, engines: Sequence[Engine]) -> Dependence:
    """What a trial shows of an optimizer. Torch's own are not tried."""
    if not _are_divided(engines) or _is_torchs(type(optimizer)):
        return Dependence.NOTHING
    num_groups, depends_on = _tried.get(optimizer, (0, Dependence.NOTHING))
    if num_groups != len(optimizer.param_groups):
        depends_on = dependence(optimizer, engines[0].device)
        _tried[optimizer] = len(optimizer.param_groups), depends_on
    return depends_on


def _are_divided(engines: Sequence[Engine]) -> bool:
    """Whether some rank lacks parameters, or updates only some, or may come to that when an elastic run's members
    change: else a dependence on others does no harm."""
    return any(
        engine.recovery.repeats
        or engine.layout.world_size > len(engine.layout.pipelines)
        or any(weight.owners for weight in engine.held)
        for engine in engines
    )


def clips_in_step(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether a trial on `device` shows that an optimizer's step clips by the norm of all gradients. Torch's own do
    not."""
    return not _is_torchs(type(optimizer)) and clips(optimizer, device)


def _is_torchs(kind: type[Optimizer]) -> bool:
    """Whether a class is one of torch's own, all of which are known by their names."""
    return kind.__module__.partition(".")[0] == "torch"


def _known_dependence(kind: type[Optimizer], closure: Any) -> Dependence:
    """What is known of an optimizer's class, and of its step with `closure`."""
    names, step_takes = {base.__name__ for base in kind.__mro__}, inspect.signature(kind.step).parameters
    if not names.isdisjoint(OVER_ALL_RANKS):
        return Dependence.RANKS
    needs_closure = "closure" in step_takes and step_takes["closure"].default is inspect.Parameter.empty
    # torch's own call it once, before the update; but for LBFGS, which is known by its name.
    used = closure is not None and not _is_torchs(kind)
    if needs_closure or used or not names.isdisjoint(OVER_ALL_PARAMETERS):
        return Dependence.PARAMETERS
    return Dependence.NOTHING if names.isdisjoint(OVER_MATRICES) else Dependence.MATRIX
