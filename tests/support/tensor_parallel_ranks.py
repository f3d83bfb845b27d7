"""What the ranks of tensor-parallel tests run, and how their slices are compared with the unsplit model."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
import transformers

import penstock
from penstock.checkpoint.untrusted import CheckpointError
from penstock.modeling.graph.loss import read_counts
from penstock.modeling.graph.units import list_units
from penstock.modeling.stage.split import SplitModel
from penstock.runtime.inputs import StepInputs
from tests.support.families import FAMILIES, batch
from tests.support.training import kept_in_double

# A vocabulary that two and four ranks can share.
VOCABULARY = {"vocab_size": 100}
SETTINGS: dict[str, dict[str, Any]] = {
    # Its balance loss is no mean, and so not exact over several microbatches.
    "mixtral": {**VOCABULARY, "output_router_logits": False},
    "vit": {},
}


def build(family: str, dropout: float | None = 0.0, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    return FAMILIES[family].build(dropout=dropout, dtype=dtype, **{**SETTINGS.get(family, VOCABULARY), **settings})


def inputs_of(family: str, size: int = 4) -> dict[str, Any]:
    return batch(FAMILIES[family].kind, size)


def config(stages: int, size: int, microbatches: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "model_parallelism": {
            "pipeline_parallel_size": stages,
            "tensor_parallel_size": size,
            "num_microbatches": microbatches,
            **more,
        }
    }


def gather_gradients(model: Any) -> dict[str, Any]:
    """Every parameter's whole gradient by name, from this rank's pipeline; None where there is none."""
    return gather(model, {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)})


def gather(model: Any, mine: dict[str, Any]) -> dict[str, Any]:
    place = model.pipeline.place
    cut = model.pipeline.split.tensor_parallel
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (place, mine))
    whole: dict[str, Any] = {}
    parts: dict[tuple[str, int], dict[int, Any]] = {}
    for where, tensors in every:
        if where.pipeline == place.pipeline:
            for name, tensor in tensors.items():
                parts.setdefault((name, where.pipeline_rank), {})[where.tensor_parallel_rank] = tensor
    for (name, _), slices in parts.items():
        if slices[0] is None:
            joined = None
        elif cut is not None and name in cut.shards:
            joined = cut.shards[name].join([slices[t] for t in sorted(slices)])
        else:
            joined = slices[0]
            for other in slices.values():
                torch.testing.assert_close(other, joined, rtol=0, atol=1e-12)
        if name in whole and joined is not None and whole[name] is not None:
            torch.testing.assert_close(joined, whole[name], rtol=0, atol=1e-10)
        whole[name] = joined
    return whole


def in_double(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `function` without transformers' roundings to single precision: a sum in another order could else only be
    compared to float32's."""
    with kept_in_double():
        return function(*args, **kwargs)


def train_against_unsplit(family: str, stages: int, size: int, **options: Any) -> dict[str, float]:
    """One step; the largest differences of the loss and of any gradient to the unsplit model's."""
    model_settings = options.pop("model_settings", {})
    model = build(family, **model_settings)
    reference = copy.deepcopy(model)
    inputs = inputs_of(family)
    expected = reference(**inputs).loss
    expected.backward()
    penstock.initialize(model, config(stages, size, **options))
    loss = 0.0
    for output in model(**inputs):
        output.loss.backward()
        loss += float(output.loss)
    gradients = gather_gradients(model)
    worst = 0.0
    for name, parameter in reference.named_parameters(remove_duplicate=False):
        mine = gradients[name]
        if parameter.grad is None:
            assert mine is None or not mine.any(), name
            continue
        assert mine is not None, name
        difference = float((mine - parameter.grad).abs().max())
        worst = max(worst, difference)
        assert difference < 1e-9, (name, difference)
    held = sum(p.numel() for p in model.parameters())
    return {"loss": abs(loss - float(expected)), "gradient": worst, "held": held}


def one_step(model: Any, inputs: dict[str, Any]) -> float:
    loss = 0.0
    for output in model(**inputs):
        output.loss.backward()
        loss += float(output.loss)
    return loss


def difference_to(reference: Any, whole: dict[str, Any], gradients: bool = False) -> float:
    """The largest difference of a parameter, or of its gradient, to those in `whole`."""
    worst = 0.0
    for name, parameter in reference.named_parameters(remove_duplicate=False):
        expected = parameter.grad if gradients else parameter.data
        if expected is not None:
            worst = max(worst, float((whole[name] - expected).abs().max()))
    return worst


def parameters_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def optimize_and_clip(family: str, stages: int, size: int, **options: Any) -> dict[str, Any]:
    """Two steps with clipping and an optimizer built before initialize(), against the unsplit model."""
    model = build(family)
    reference = copy.deepcopy(model)
    inputs = inputs_of(family)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    identities = {id(p) for p in model.parameters()}
    penstock.initialize(model, config(stages, size, **options))
    kept = {id(p) for p in model.parameters()} <= identities
    norms = []
    for _ in range(2):
        reference(**inputs).loss.backward()
        one_step(model, inputs)
        for norm_type in (2.0, float("inf")):
            ours = model.clip_grad_norm_(0.05, norm_type)
            theirs = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm_type)
            norms.append(abs(float(ours - theirs)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = gather(model, parameters_of(model))
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    stored = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return {
        "kept": kept,
        "norms": norms,
        "parameters": difference_to(reference, whole),
        "only the slice": sum(stored.values()) == held,
    }


def dropout_against_one_stage(family: str, stages: int, size: int, **settings: Any) -> dict[str, Any]:
    """A step with dropout on a pipeline with tensor parallelism, and on each rank alone without."""
    torch.manual_seed(3)
    model = build(family, 0.3, **settings)
    alone = copy.deepcopy(model)
    inputs = inputs_of(family)
    penstock.initialize(model, config(stages, size))
    loss, gradients = one_step(model, inputs), gather_gradients(model)
    split = SplitModel(alone, [list_units(alone)], [0])
    expected = 0.0
    microbatches = [{name: value[i : i + 2] for name, value in inputs.items()} for i in (0, 2)]
    counts = read_counts([split.plan(microbatch).loss.count_later(microbatch) for microbatch in microbatches])
    totals = [sum(column) for column in zip(*counts, strict=True)]
    for index, microbatch in enumerate(microbatches):
        plan = split.plan(microbatch)
        shares = plan.loss.shares(counts[index], totals)
        inputs = StepInputs.of([microbatch], split.plan, [2], index, 0, False, run_seed=model.pipeline.seed)
        output, _ = split.forward(plan, 0, microbatch, (), seed=inputs.seed(0), shares=shares)
        output.loss.backward()
        expected += float(output.loss)
    return {"loss": abs(loss - expected), "gradient": difference_to(alone, gradients, gradients=True)}


def evaluate_and_generate(family: str, stages: int, size: int) -> dict[str, Any]:
    model = build(family).eval()
    reference = copy.deepcopy(model)
    inputs = inputs_of(family)
    penstock.initialize(model, config(stages, size))
    with torch.no_grad():
        output, expected = model(**inputs), reference(**inputs)
    found = {
        "loss": abs(float(output.loss - expected.loss)),
        "logits": float((output.logits - expected.logits).abs().max()),
    }
    prompt = {name: value[:, :6] for name, value in inputs_of(family, 1).items() if name != "labels"}
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "temperature": 2.0}):
        settings = {"max_new_tokens": 6, **options}
        torch.manual_seed(5 + dist.get_rank() if options.get("do_sample") else 5)
        mine = model.generate(**prompt, **settings)
        torch.manual_seed(5)
        theirs = reference.generate(**prompt, **settings)
        found[f"same tokens {sorted(options)}"] = torch.equal(mine, theirs)
    return found


def save_and_reshard(family: str, folder: str, layouts: list[tuple[int, int]]) -> list[str]:
    """Save from the first layout, load into each of the others; merge, and load with plain transformers."""
    source = build(family)
    reference = copy.deepcopy(source)
    stages, size = layouts[0]
    penstock.initialize(source, config(stages, size))
    source.save_parallelized(f"{folder}/parallel")
    source.save_parallelized(f"{folder}/merged", merge_checkpoints=True)
    dist.barrier()
    for stages, size in layouts:
        target = build(family)
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.fill_(7.0)
        penstock.initialize(target, config(stages, size))
        target.from_parallelized(f"{folder}/parallel")
        assert difference_to(reference, gather(target, parameters_of(target))) == 0, (stages, size)
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.fill_(7.0)
        penstock.Booster(plugin=penstock.HeterogeneousParallelPlugin()).load_model(target, f"{folder}/merged")
        assert difference_to(reference, gather(target, parameters_of(target))) == 0, (stages, size)
        if stages == 1:
            refuses_one_row_more(target, folder)
        target.pipeline.close()
    plain = type(reference).from_pretrained(f"{folder}/merged", dtype=torch.float64)
    assert difference_to(reference, parameters_of(plain)) == 0
    straight = penstock.from_pretrained(f"{folder}/merged", config=config(*layouts[0]), dtype=torch.float64)
    assert difference_to(reference, gather(straight, parameters_of(straight))) == 0
    return sorted(os.listdir(f"{folder}/parallel"))


def refuses_one_row_more(model: Any, folder: str) -> None:
    """A checkpoint whose slices would have the right shape, if the last row were left out."""
    if dist.get_rank() == 0:
        build("gpt2" if "GPT2" in type(model).__name__ else "bert_mlm", vocab_size=101).save_pretrained(f"{folder}/odd")
    dist.barrier()
    before = parameters_of(model)
    try:
        penstock.Booster(plugin=penstock.HeterogeneousParallelPlugin()).load_model(model, f"{folder}/odd")
    except CheckpointError as error:
        assert "[101, 32] in the checkpoint, [100, 32] in the model" in str(error), error
    else:
        raise AssertionError("a checkpoint of 101 rows was taken for one of 100")
    assert all(torch.equal(value, before[name]) for name, value in parameters_of(model).items())


def refusals() -> list[str]:
    messages = []
    for model, settings in (
        (build("gpt2"), config(1, 3)),
        (build("llama"), config(1, 6)),
        (build("gpt2", vocab_size=97, n_head=4), config(1, 2)),
        (FAMILIES["falcon"].build(), config(1, 2)),
        (build("gpt2"), config(2, 2)),
    ):
        try:
            penstock.initialize(model, settings)
            messages.append("nothing")
        except (ValueError, NotImplementedError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def overflow_is_shared(family: str, stages: int, size: int) -> float:
    """A gradient that is infinite on the last rank only: what a scaler makes of it, on every rank."""
    model = build(family, dtype=torch.float32)
    penstock.initialize(model, config(stages, size))
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0)
    for out in model(**inputs_of(family)):
        scaler.scale(out.loss).backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        next(p for p in model.parameters() if p.grad is not None).grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def from_config_against_unsplit(family: str, stages: int, size: int) -> dict[str, float]:
    """Weights made straight into slices, and the loss of a step with them."""
    settings, kind = build(family, dtype=torch.float32).config, getattr(transformers, FAMILIES[family].model_class)
    torch.manual_seed(11)
    reference = kind(copy.deepcopy(settings))
    model = penstock.from_config(settings, config=config(stages, size), model_class=kind, seed=11)
    weights = difference_to(reference, gather(model, parameters_of(model)))
    inputs, loss = inputs_of(family), 0.0
    for out in model(**inputs):
        out.loss.backward()
        loss += out.loss.item()
    expected = reference(**inputs).loss
    expected.backward()
    return {"weights": weights, "loss": abs(loss - expected.item())}
