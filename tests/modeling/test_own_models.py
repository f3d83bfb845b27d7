"""Any `nn.Module` over stages: trained, evaluated and saved as the unsplit model."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.utils import _pytree as pytree
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

import penstock
from penstock import HeterogeneousParallelPlugin, PipelineTemplate
from penstock.checkpoint.contents import merge_checkpoint
from penstock.modeling.graph.loss import loss_of
from penstock.modeling.graph.units import list_units
from tests.support.own_models import CLASSES, GPT, OWN_MODELS, VOCABULARY, OwnModel, classified, mlp
from tests.support.pool import Pool
from tests.support.training import (
    EXACT,
    Step,
    assert_same_gradients,
    assert_steps_equal,
    cut,
    gradients_of,
    in_turn,
    kept_in_double,
    run_step,
    unsplit_step,
)

MICROBATCHES = 4  # of 6 samples: 2, 2, 1, 1


def loss_by(own: OwnModel, output: Any, inputs: Mapping[str, Any]) -> Any:
    return loss_of(output) if own.criterion is None else own.criterion(output, inputs)


def plain(output: Any) -> Any:
    """An output as lists and tensors, to be compared; and to be sent between processes."""
    if dataclasses.is_dataclass(output):
        output = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)


def train_own(
    name: str, stages: int, folder: str, schedule: str = "1f1b"
) -> tuple[Step, Any, str, dict[str, torch.Tensor], list[Any]]:
    """A step, then what an evaluation gives and of which class, buffers, and the fields off the last stage."""
    own = OWN_MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of batch statistics
        number = MICROBATCHES * stages // dist.get_world_size()
        section = {"pipeline_parallel_size": stages, "num_microbatches": number, "schedule": schedule}
        inputs = own.inputs()
        given = {key: value[:1] for key, value in inputs.items() if key != "target"}
        model: Any = penstock.initialize(
            own.build(), {"model_parallelism": section}, own.criterion, example_inputs=given
        )
    losses, fields = [], []
    for out in model(**rows_of(inputs, model)):
        out.loss.backward()
        losses.append(out.loss.item())
        fields.append({key: value is None for key, value in vars(out).items() if not key.startswith("_")})
    model.eval()
    with torch.no_grad():
        output = model(**inputs)
        if own.criterion is not None:
            loss, output = output.loss, output.output
            assert type(model(**{key: inputs[key] for key in given}, criterion=None)) is torch.Tensor
            output = [loss, output]
    step = Step(losses, gradients_of(model))
    model.save_parallelized(f"{folder}/parallel")
    model.save_parallelized(f"{folder}/merged", merge_checkpoints=True)
    model.save_pretrained(f"{folder}/safe")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.from_parallelized(f"{folder}/parallel")
    return step, plain(output), type(output).__name__, {**dict(model.named_buffers()), **model.state_dict()}, fields


def rows_of(inputs: Mapping[str, Any], model: Any) -> dict[str, Any]:
    size = len(next(iter(inputs.values()))) // model.data_parallel_size
    start = model.data_parallel_rank * size
    return {name: value[start : start + size] for name, value in inputs.items()}


def expected_step(own: OwnModel) -> tuple[torch.nn.Module, Step]:
    """The unsplit model after a step: of the whole batch, or of its microbatches where batch statistics are taken."""
    model, inputs, losses = own.build(), own.inputs(), []
    sizes = [2, 2, 1, 1] if own.per_microbatch else [6]
    for size, piece in zip(sizes, cut(inputs, sizes), strict=True):
        loss = loss_by(own, own.call(model, piece), piece) * size / 6
        loss.backward()
        losses.append(loss.item())
    return model, Step(losses, gradients_of(model))


# By number of ranks: models, stages, schedules.
CASES = {
    2: [
        ("gpt", 1, "1f1b"),
        ("sequential", 2, "interleaved-1f1b"),
        *((name, 2, "1f1b") for name in ("sequential, summed", "dataclass", "named tuple", "loss alone")),
    ],
    3: [("gpt", 3, "zb-h1"), *((name, 3, "1f1b") for name in ("convnet", "dictionary", "around transformers"))],
}


@pytest.mark.parametrize("ranks", CASES)
def test_a_model_of_ones_own_is_trained_evaluated_and_saved_as_the_unsplit_one(
    pool: Pool, ranks: int, tmp_path: Path
) -> None:
    calls = [
        partial(train_own, name, stages, str(tmp_path / name), schedule) for name, stages, schedule in CASES[ranks]
    ]
    for (name, stages, _), found in zip(CASES[ranks], zip(*pool.run(ranks, in_turn, calls), strict=True), strict=True):
        print(name)  # for a failure to name
        assert_as_unsplit(OWN_MODELS[name], found, stages, tmp_path / name)


def assert_as_unsplit(own: OwnModel, found: Sequence[Any], stages: int, folder: Path) -> None:
    """`found`: what each rank's `train_own` returned."""
    model, expected = expected_step(own)
    assert_steps_equal([step for step, *_ in found], expected, replicas=len(found) // stages)
    model.eval()
    with torch.no_grad():
        output = own.call(model, own.inputs())
        loss = loss_by(own, output, own.inputs())
    wanted = plain(output if own.criterion is None else [loss, output])
    for _, evaluated, kind, _, _ in found:
        assert kind == (type(output).__name__ if own.criterion is None else "list")
        assert len(evaluated) == len(wanted)
        for one, other in zip(evaluated, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)
    state = model.state_dict()
    for *_, held, _ in found:
        for key, tensor in held.items():
            if key in state:
                torch.testing.assert_close(tensor, state[key], rtol=EXACT, atol=EXACT)
    assert merge_checkpoint(folder / "parallel", folder / "command") == ["model.safetensors"]
    saved = [load_file(folder / name / "model.safetensors") for name in ("safe", "command")]
    for content in (torch.load(folder / "merged/pytorch_model.bin"), *saved):
        fresh = own.build()
        fresh.load_state_dict(content)
        for key, tensor in fresh.state_dict().items():
            torch.testing.assert_close(tensor, state[key], rtol=EXACT, atol=EXACT)
    if stages > 1:  # what a stage does not have is None, under the same names
        assert all(lacking.keys() <= having.keys() for lacking, having in zip(found[0][4], found[-1][4], strict=True))


def generate_greedily() -> torch.Tensor:
    model: Any = penstock.initialize(OWN_MODELS["gpt"].build(), {"model_parallelism": {"pipeline_parallel_size": 2}})
    return model.generate(torch.tensor([[1, 2], [3, 4]]), 4)


def test_its_own_generate_runs_over_stages_and_its_inputs_are_guessed(pool: Pool) -> None:
    model: Any = OWN_MODELS["gpt"].build()
    expected = model.generate(torch.tensor([[1, 2], [3, 4]]), 4)
    assert all(torch.equal(found, expected) for found in pool.run(2, generate_greedily))


SIDE = 2  # tokens, as many as a microbatch has samples


class TimeMajor(torch.nn.Module):
    """Samples are along the second dimension, of the output too; places have none."""

    def __init__(self) -> None:
        super().__init__()
        block = torch.nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)
        self.blocks = torch.nn.TransformerEncoder(block, 3, enable_nested_tensor=False)
        self.head = torch.nn.Linear(6, CLASSES)

    def forward(self, src: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(src + places[:, None]))


def of_tokens(outputs: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), inputs["target"].flatten())


def of_elements(outputs: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs, torch.ones_like(outputs))


CRITERIA = {"tokens": of_tokens, "elements": of_elements}
DIMS = {"src": 1, "target": 1, "places": None}


def time_major(size: int = 6) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    src = torch.randn(SIDE, size, 6, generator=random, dtype=torch.float64)
    target = torch.randint(0, CLASSES, (SIDE, size), generator=random)
    target[0, :3] = -100
    return {"src": src, "places": torch.randn(SIDE, 6, generator=random, dtype=torch.float64), "target": target}


def train_time_major(loss: str, **section: Any) -> tuple[Step, torch.Tensor, float, str]:
    criterion, inputs = CRITERIA[loss], time_major()
    example = {"src": inputs["src"][:, :1], "places": inputs["places"]}
    model: Any = penstock.initialize(
        OwnModel(TimeMajor).build(), section, criterion, example_inputs=example, batch_dim=DIMS
    )
    step = Step(run_step(model, inputs), gradients_of(model))
    model.eval()
    with torch.no_grad():
        out = model(**inputs)
        model.pipeline.options = replace(model.pipeline.options, batch_dim={"scr": 1})
        with pytest.raises(ValueError) as caught:  # the words are looked at below
            model(**inputs)
    return step, out.output, out.loss.item(), str(caught.value)


def test_samples_may_be_along_another_dimension_or_none(pool: Pool) -> None:
    splits: dict[str, dict[str, int]] = {"tokens": {"num_microbatches": 4}, "elements": {"microbatch_size": SIDE}}
    calls = [partial(train_time_major, loss, pipeline_parallel_size=2, **split) for loss, split in splits.items()]
    for loss, found in zip(splits, zip(*pool.run(2, in_turn, calls), strict=True), strict=True):
        print(loss)  # for a failure to name
        model, inputs = OwnModel(TimeMajor).build(), time_major()
        outputs = model(inputs["src"], inputs["places"])
        whole = CRITERIA[loss](outputs, inputs)
        whole.backward()
        assert_steps_equal([step for step, *_ in found], Step([whole.item()], gradients_of(model)))
        for _, evaluated, its_loss, refused in found:
            torch.testing.assert_close(evaluated, outputs.detach(), rtol=EXACT, atol=EXACT)
            assert its_loss == pytest.approx(whole.item(), rel=EXACT)
            assert "batch_dim names 'scr', which is no input of the model" in refused
            assert 'did you mean "src"?' in refused


def collate_time_major(samples: list[dict[str, Any]]) -> dict[str, Any]:
    columns = {name: torch.stack([one[name] for one in samples], 1) for name in ("src", "target")}
    return {**columns, "places": samples[0]["places"]}


def train_time_major_with_the_plugin() -> tuple[Step, float, list[Any]]:
    whole: Any = OwnModel(TimeMajor).build()
    whole.dummy_inputs = {name: value for name, value in time_major().items() if name != "target"}
    templates = [PipelineTemplate.balanced(whole, 1), PipelineTemplate.balanced(whole, 2)]
    plugin = HeterogeneousParallelPlugin(microbatch_size=SIDE, batch_dim=DIMS)
    plugin.set_pipelines(templates, [1, 2])
    inputs = time_major()
    data = [
        {"src": inputs["src"][:, i], "target": inputs["target"][:, i], "places": inputs["places"]} for i in range(6)
    ]
    loader = plugin.prepare_dataloader(data, collate_fn=collate_time_major)
    booster = penstock.Booster(plugin)
    model, *_ = booster.boost(whole, criterion=of_tokens, dataloader=loader)
    result = booster.execute_pipeline(iter(loader), model, return_outputs=True)
    gradients = gradients_of(model)
    with torch.no_grad():
        evaluated = booster.execute_pipeline(iter(loader), model, return_outputs=True)
    assert evaluated["loss"].item() == pytest.approx(result["loss"].item())
    return Step([], gradients), result["loss"].item(), [result["outputs"], evaluated["outputs"]]


def test_the_plugin_takes_samples_along_another_dimension(pool: Pool) -> None:
    model, inputs = OwnModel(TimeMajor).build(), time_major()
    outputs = model(inputs["src"], inputs["places"])
    whole = of_tokens(outputs, inputs)
    whole.backward()
    for rank, (step, loss, found) in enumerate(pool.run(3, train_time_major_with_the_plugin)):
        assert loss == pytest.approx(whole.item(), rel=EXACT)
        assert_same_gradients(step.gradients, gradients_of(model))
        own = outputs.detach()[:, :2] if rank == 0 else outputs.detach()[:, 2:]
        for each in (one for one in found if one is not None):
            torch.testing.assert_close(each, own, rtol=EXACT, atol=EXACT)
        assert found[1] is not None
    with pytest.raises(ValueError, match="batch_dim must be a dict with a dimension"):
        HeterogeneousParallelPlugin(batch_dim={"src": -1})


@dataclasses.dataclass(frozen=True)
class Sentences:
    """A batch, with something that is no field."""

    tokens: torch.Tensor
    labels: torch.Tensor
    offset: float = 0.5
    later: torch.Tensor = dataclasses.field(init=False)  # never given a value

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", 2.0)  # no field


class SentencesTuple(NamedTuple):
    tokens: torch.Tensor
    labels: torch.Tensor
    offset: float = 0.5


class TakesOneBatch(torch.nn.Module):
    """Its forward is given a batch in one piece, of any kind, and perhaps something to add."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 6)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))
        self.head = torch.nn.Linear(6, VOCABULARY)

    def forward(self, batch: Any, more: Any = None) -> Any:
        if isinstance(batch, Mapping):
            batch = Sentences(**batch["inner"])
        hidden = self.embed(batch.tokens) + batch.offset
        if more is not None:
            hidden = hidden + more.labels[..., None]
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        logits = self.head(hidden)
        if more is not None:
            logits = logits * more.scale
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten())
        return loss, logits


class Hidden:
    def __init__(self, labels: torch.Tensor) -> None:
        self.inner: Any = {"labels": labels}
        for _ in range(2000):
            self.inner = SimpleNamespace(further=self.inner)


def one_batch(kind: str, rows: slice = slice(None)) -> Any:
    tokens = torch.randint(0, VOCABULARY, (6, 5), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, 2:] = -100
    tokens, labels = tokens[rows], labels[rows]
    values = {"tokens": tokens, "labels": labels, "offset": 0.25}
    if kind == "dictionary":
        return {"inner": values}
    return (Sentences if kind == "data class" else SentencesTuple)(**values)


def train_one_batch(kind: str) -> tuple[Step, torch.Tensor, str]:
    example = (one_batch(kind, slice(0, 1)),)
    given: Any = example[0] if kind == "data class" else example
    model: Any = penstock.initialize(
        OwnModel(TakesOneBatch).build(), pipeline_parallel_size=2, num_microbatches=4, example_inputs=given
    )
    more = one_batch("data class")
    step = Step(run_step(model, {"batch": one_batch(kind), "more": more}), gradients_of(model))
    with torch.no_grad():
        _, logits = model(batch=one_batch(kind), more=more)
        with pytest.raises(ValueError) as caught:  # the words are looked at below
            model(batch=one_batch(kind), more=Hidden(more.labels))
    return step, logits, str(caught.value)


def test_a_batch_in_one_piece_is_split_and_a_hidden_tensor_refused(pool: Pool) -> None:
    kinds = ["data class", "dictionary", "named tuple"]
    every = pool.run(2, in_turn, [partial(train_one_batch, kind) for kind in kinds])
    for kind, found in zip(kinds, zip(*every, strict=True), strict=True):
        print(kind)  # for a failure to name
        model: Any = OwnModel(TakesOneBatch).build()
        loss, logits = model(one_batch(kind), one_batch("data class"))
        loss.backward()
        assert_steps_equal([step for step, *_ in found], Step([loss.item()], gradients_of(model)))
        for _, evaluated, refused in found:
            torch.testing.assert_close(evaluated, logits.detach(), rtol=EXACT, atol=EXACT)
            assert refused.startswith("more is a Hidden, and the tensors in it cannot be split into microbatches")


UNITS = {
    "gpt": ["transformer.wte", "transformer.wpe", *(f"transformer.h.{i}" for i in range(4)), "transformer.ln_f",
            "lm_head"],
    "convnet": ["stem.0", "stem.1", "stem.2",
                *(f"stages.{i}.{part}" for i in range(2) for part in ("downsample", "blocks.0", "blocks.1")),
                "head.0", "head.1"],
    "sequential": [str(i) for i in range(6)],
    "around transformers": ["backbone.wte", "backbone.wpe", *(f"backbone.h.{i}" for i in range(3)), "backbone.ln_f",
                            "head.0", "head.1"],
}  # fmt: skip


@pytest.mark.parametrize("name", UNITS)
def test_its_units_are_the_entries_of_its_lists_and_sequences(name: str) -> None:
    own = OWN_MODELS[name]
    inputs = {key: value for key, value in own.inputs().items() if key != "target"}
    assert list_units(own.build(), inputs) == UNITS[name]


def refused(model: Any, call: Callable[..., Any] = penstock.initialize, **options: Any) -> str:
    try:
        call(model, config={"model_parallelism": {"pipeline_parallel_size": 2}}, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


class Unguessable(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(left) * right)


class WithPipeline(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.pipeline = torch.nn.Linear(2, 2)


class WithConfiguration(GPT2LMHeadModel):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.configuration = "of its own"


class Hiding(GPT):
    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        class Hidden:
            pass

        found = Hidden()
        found.logits, _ = super().forward(idx, targets)  # type: ignore[attr-defined]  # set here
        return found


def small() -> GPT2Config:
    return GPT2Config(vocab_size=97, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)


def refuse_models(folder: Path) -> dict[str, str]:
    compiled: Any = GPT()
    compiled.compile(backend="eager")
    of_kind: dict[str, Any] = {"model_class": WithConfiguration}
    return {
        "no module": refused(lambda x: x),
        "torch.compile": refused(torch.compile(GPT(), backend="eager")),
        "compile": refused(compiled),
        "data parallel": refused(torch.nn.parallel.DistributedDataParallel(GPT())),
        "a name": refused(WithPipeline()),
        "a name of a config": refused(small(), penstock.from_config, **of_kind),
        "a name in a folder": refused(folder, penstock.from_pretrained, **of_kind),
        "inputs": refused(Unguessable()),
        "wrong inputs": refused(Unguessable(), example_inputs={"left": torch.zeros(2, 3)}),
        "no inputs": refused(Unguessable(), example_inputs=3),
        "hidden": refused(Hiding()),
        "no values": refused(OWN_MODELS["gpt"].build().to("meta")),
        "right inputs": refused(Unguessable(), example_inputs=(torch.zeros(2, 3), torch.zeros(2, 3))),
    }


def test_what_cannot_be_parallelised_is_refused_by_name_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    WithConfiguration(small()).save_pretrained(tmp_path)
    for found in pool.run(2, refuse_models, tmp_path):
        assert found["no module"] == "TypeError: initialize() takes a torch.nn.Module, got function"
        assert found["torch.compile"].startswith("TypeError: initialize() was given a OptimizedModule: torch.compile()")
        assert "call model.compile() after initialize()" in found["compile"]
        assert "DistributedDataParallel: start more processes than stages" in found["data parallel"]
        assert "an attribute 'pipeline' of its own" in found["a name"]
        for made in ("a name of a config", "a name in a folder"):
            assert "this WithConfiguration has an attribute 'configuration' of its own" in found[made]
        assert "give some as example_inputs" in found["inputs"] and "'left'" in found["inputs"]
        assert "'right'" in found["wrong inputs"] and "guessed" not in found["wrong inputs"]
        assert "example_inputs must be a mapping" in found["no inputs"]
        assert "returns a Hidden" in found["hidden"]
        assert "transformer.wte.weight of this GPT is on the meta device" in found["no values"]
        assert "penstock.from_pretrained() or penstock.from_config()" in found["no values"]
        assert found["right inputs"] == "accepted"


def call_wrongly() -> list[str]:
    own = OWN_MODELS["sequential"]
    model: Any = penstock.initialize(own.build(), {"model_parallelism": {"pipeline_parallel_size": 2}})
    x, target = own.inputs().values()
    found = []
    for args, kwargs in (((x, target), {}), ((x,), {"input": x}), ((x,), {}), ((x,), {"target": target})):
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
            model(*args, **kwargs)
        found.append(str(caught.value))
    for out in model(x, target=target, criterion=own.criterion):
        out.loss.backward()
    return found


def test_calls_that_cannot_be_bound_or_have_no_loss_say_so(pool: Pool) -> None:
    for positional, twice, lossless, unknown in pool.run(2, call_wrongly):
        assert "names 1 arguments that may be given by position (input), but 2 were given" in positional
        assert "was given 'input' by position and by name" in twice
        assert "Sequential computes no loss from the inputs ['input']" in lossless and "criterion" in lossless
        assert "unexpected keyword argument 'target'" in unknown


class OneLayer(torch.nn.Module):
    """Its input is no token, whatever its name says."""

    def __init__(self) -> None:
        super().__init__()
        self.only = torch.nn.Linear(6, CLASSES)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.only(input_ids)


def train_one_layer() -> Step:
    own = OwnModel(OneLayer, classified)
    model: Any = penstock.initialize(own.build(), {"pipeline_parallel_size": 1}, own.criterion, num_microbatches=2)
    x, target = rows_of(OWN_MODELS["sequential"].inputs(), model).values()
    return Step(run_step(model, {"input_ids": x, "target": target}), gradients_of(model))


def test_one_layer_with_one_stage_and_fractions_called_ids_are_trained(pool: Pool) -> None:
    own = OwnModel(OneLayer, classified)
    model, (x, target) = own.build(), OWN_MODELS["sequential"].inputs().values()
    loss = classified(model(x), {"target": target})
    loss.backward()
    assert_steps_equal(pool.run(2, train_one_layer), Step([loss.item()], gradients_of(model)), replicas=2)


def mix_types() -> str:
    model: Any = penstock.initialize(mlp().bfloat16(), pipeline_parallel_size=2, num_microbatches=2)
    try:
        with torch.no_grad():
            model(torch.zeros(4, 6))
    except RuntimeError as error:
        return str(error)
    return "accepted"


def test_inputs_of_another_type_than_the_weights_are_named_with_the_unit(pool: Pool) -> None:
    for found in pool.run(2, mix_types):
        assert "the unit 0 was given values of torch.float32, but its weights are of torch.bfloat16" in found
        assert "give the model inputs of the type of its weights" in found


def classify_without_padding() -> tuple[Step, str]:
    own = OwnModel(Classifier)
    model: Any = penstock.initialize(own.build(), pipeline_parallel_size=2, num_microbatches=6)
    inputs = OWN_MODELS["around transformers"].inputs()
    with kept_in_double():
        step = Step(run_step(model, inputs), gradients_of(model))
        model.pipeline.options = replace(model.pipeline.options, num_microbatches=3)
        with pytest.raises(ValueError) as caught:  # the words are looked at below
            model(**inputs)
    return step, str(caught.value)


class Classifier(GPT2ForSequenceClassification):
    def __init__(self) -> None:
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        super().__init__(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=VOCABULARY, num_labels=CLASSES, **quiet))


def test_a_classifier_without_a_token_for_padding_takes_one_sample_at_a_time(pool: Pool) -> None:
    inputs, model = OWN_MODELS["around transformers"].inputs(), OwnModel(Classifier).build()
    expected = unsplit_step(model, *((piece, 1 / 6) for piece in cut(inputs, [1] * 6)))
    found = pool.run(2, classify_without_padding)
    assert_steps_equal([step for step, _ in found], expected)
    assert all("set model.config.pad_token_id" in refused for _, refused in found)


class Shared(nn.Module):
    """A list in which layers stand several times, as in `pattern`; with `inside` they are a part of its entries."""

    def __init__(self, pattern: str, inside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = {letter: nn.Linear(6, 6) for letter in sorted(set(pattern))}
        blocks = [nn.Sequential(nn.Linear(6, 6), layers[letter]) if inside else layers[letter] for letter in pattern]
        self.layers = nn.ModuleList(blocks).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


SHARED_INPUTS = {"x": torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6), "target": torch.tensor([0, 3, 1, 2])}


def train_shared(pattern: str, inside: bool, folder: str) -> Step:
    model = penstock.initialize(
        Shared(pattern, inside),
        {"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 2}},
        lambda outputs, inputs: nn.functional.cross_entropy(outputs, inputs["target"]),
        example_inputs={"x": SHARED_INPUTS["x"][:1]},
    )
    step = Step(run_step(model, SHARED_INPUTS), gradients_of(model))
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.save_pretrained(folder)
    return step


def test_a_module_that_several_stages_share_is_a_tied_weight(pool: Pool, tmp_path: Path) -> None:
    cases = [("bxyb", False), ("bbbb", False), ("bbxb", False), ("bxby", False), ("bb", True)]
    calls = [partial(train_shared, *case, str(tmp_path / case[0])) for case in cases]
    for case, steps in zip(cases, zip(*pool.run(2, in_turn, calls), strict=True), strict=True):
        print(case)  # for a failure to name
        model = Shared(*case)
        loss = nn.functional.cross_entropy(model(SHARED_INPUTS["x"]), SHARED_INPUTS["target"])
        loss.backward()
        assert_steps_equal(steps, Step([loss.item()], gradients_of(model)))
        torch.optim.SGD(model.parameters(), 0.1).step()
        saved = load_file(tmp_path / case[0] / "model.safetensors")
        torch.testing.assert_close(saved, dict(model.state_dict()), rtol=EXACT, atol=EXACT)


def test_a_shared_module_with_running_statistics_is_refused_by_name() -> None:
    model = Shared("bxxb")
    model.layers[0] = model.layers[3] = nn.BatchNorm1d(6)
    with pytest.raises(NotImplementedError, match=r"layers\.3 stands elsewhere, too, and has a buffer"):
        PipelineTemplate.get_modules(model)


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)


class Watched(nn.Module):
    """Keeps a running mean of what its second layer returns: in a module for that, or itself."""

    def __init__(self, in_module: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.watch = RunningMean() if in_module else None
        self.register_buffer("mean", torch.zeros(6), persistent=not in_module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number == 1:
                RunningMean.forward(self, x) if self.watch is None else self.watch(x)
        return x


def train_watched(folder: str) -> None:
    model = penstock.initialize(
        Watched(True),
        {"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 2}},
        lambda outputs, inputs: nn.functional.cross_entropy(outputs, inputs["target"]),
        example_inputs={"x": SHARED_INPUTS["x"][:1].float()},
    )
    run_step(model, {**SHARED_INPUTS, "x": SHARED_INPUTS["x"].float()})
    model.save_pretrained(folder)


def test_a_buffer_that_a_forward_changes_is_saved_by_its_stage_or_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, train_watched, str(tmp_path))
    model = Watched(True)
    for part in SHARED_INPUTS["x"].float().chunk(2):
        model(part)
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors"), dict(model.state_dict()))
    with pytest.raises(NotImplementedError, match="its forward changes the buffer mean outside of the modules"):
        list_units(Watched(False), {"x": SHARED_INPUTS["x"].float()})
