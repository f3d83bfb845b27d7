"""Impossible sizes, unusable batches, models that cannot be split: an error on every rank, at once."""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from penstock.config.configuration import ConfigurationError
from tests.support.families import FAMILIES, batch, gpt2
from tests.support.pool import Pool
from tests.support.training import gradients_of, kept_in_double, parallelize, run_step

# Nothing here may wait for a timeout; the slack is for a busy machine.
AT_ONCE = 10.0


def caught(call: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The type and text of the exception that a call raises, within the time allowed."""
    start = time.monotonic()
    try:
        call(*args, **kwargs)
    except Exception as error:
        assert time.monotonic() - start < AT_ONCE, f"took {time.monotonic() - start:.1f} s to raise {error}"
        return type(error).__name__, str(error)
    return "nothing", ""


# ---------------------------------------------------------------- sizes


def ask_for_sizes(*sizes: Any) -> list[tuple[str, str]]:
    """What initialize() raises for each of several sizes, or options, and that a possible one works after them."""
    options = [size if isinstance(size, dict) else {"stages": size} for size in sizes]
    found = [caught(parallelize, gpt2(), **option) for option in options]
    assert run_step(parallelize(gpt2(), 1), batch("causal", 2))
    return found


def test_a_size_that_is_no_positive_integer_is_refused(pool: Pool) -> None:
    sizes = 0, -1, 2.5, True, "2"
    for found in pool.run(2, ask_for_sizes, *sizes):
        for size, (kind, text) in zip(sizes, found, strict=True):
            assert kind == "ConfigurationError"
            assert "pipeline_parallel_size" in text and "positive integer" in text and repr(size) in text


def test_sizes_that_do_not_fit_the_world_are_refused(pool: Pool) -> None:
    shared = {"stages": 1, "context_parallel_size": 2}
    for larger, indivisible, parts in pool.run(3, ask_for_sizes, 4, 2, shared):
        assert larger[0] == indivisible[0] == "ConfigurationError"
        assert "is 4" in larger[1] and "only 3 processes" in larger[1]
        assert "3 processes" in indivisible[1] and "[1, 3]" in indivisible[1]
        assert parts[0] == "ConfigurationError"
        assert "takes 2 pipelines of 1 ranks, which is 2 processes, but 3 were started" in parts[1]


def ask_for_more_stages_than_units() -> list[tuple[str, str]]:
    model = FAMILIES["bert_mlm"].build(num_hidden_layers=1)
    found = [caught(parallelize, model, 3, schedule="zb-v")]
    # The refused model is as it was, and may be split as far as it goes.
    with kept_in_double():
        run_step(parallelize(model, 3), batch("masked", 3))
    return found


def test_more_stages_than_units_are_refused(pool: Pool) -> None:
    for ((kind, text),) in pool.run(3, ask_for_more_stages_than_units):
        assert kind == "ConfigurationError"
        assert "2 stage(s) per rank" in text and "only 3 units" in text
        assert "needs at least 6 units" in text
        assert text.endswith("ask for at most 1 or choose a schedule with one stage per rank")


def test_the_configuration_error_is_a_value_error() -> None:
    assert issubclass(ConfigurationError, ValueError)


# ---------------------------------------------------------------- ranks that were given different things


DIFFERENCES = {
    "layers": "n_layer is 4 on rank 0 and 5 on rank 2",
    "class": "class is 'GPT2LMHeadModel' on rank 0 and 'LlamaForCausalLM' on rank 2",
    "stages": "pipeline_parallel_size is 3 on rank 0 and 1 on rank 2",
    "microbatches": "num_microbatches is None on rank 0 and 2 on rank 2",
    "wrong stages": "pipeline_parallel_size is 3 on rank 0 and 7 on rank 2",
}


def initialize_differently(rank: int) -> dict[str, tuple[str, str]]:
    def attempt(what: str) -> tuple[str, str]:
        what = what if torch.distributed.get_rank() == rank else ""
        model = FAMILIES["llama"].build() if what == "class" else gpt2(n_layer=5 if what == "layers" else 4)
        options = {"num_microbatches": 2} if what == "microbatches" else {}
        return caught(parallelize, model, {"stages": 1, "wrong stages": 7}.get(what, 3), **options)

    return {what: attempt(what) for what in DIFFERENCES}


def test_ranks_with_different_models_or_configurations_say_so(pool: Pool) -> None:
    for found in pool.run(3, initialize_differently, 2):
        for what, (kind, text) in found.items():
            assert kind == "ValueError" and DIFFERENCES[what] in text, text


# ---------------------------------------------------------------- batches


def bad_batches() -> dict[str, Mapping[str, Any]]:
    good = batch("causal", 4)
    return {
        "too small": {name: value[:2] for name, value in good.items()},
        "empty": {name: value[:0] for name, value in good.items()},
        "no tensors": {"use_cache": False},
        "nothing": {},
        "no labels": {name: value for name, value in good.items() if name != "labels"},
        "unequal rows": {**good, "labels": good["labels"][:3]},
        "float ids": {**good, "input_ids": good["input_ids"].double()},
        "texts": {**good, "input_ids": ["one", "two", "three", "four"]},
        "text labels": {**good, "labels": ["one", "two", "three", "four"]},
        "list labels": {**good, "labels": good["labels"].tolist()},
        "float labels": {**good, "labels": good["labels"].double()},
    }


def train_on_bad_batches() -> tuple[dict[str, tuple[str, str]], dict[str, torch.Tensor | None]]:
    with kept_in_double():
        model = parallelize(gpt2(), 2, num_microbatches=3)
        found = {name: caught(run_step, model, inputs) for name, inputs in bad_batches().items()}
        run_step(model, batch("causal", 4))
        return found, gradients_of(model)


def test_unusable_batches_are_refused_on_every_rank_and_the_next_step_is_exact(pool: Pool) -> None:
    expected = {
        "too small": ["2 samples", "3 microbatches"],
        "empty": ["empty", "(0, 9)"],
        "no tensors": ["no tensors", "use_cache"],
        "nothing": ["no tensors"],
        "no labels": ["GPT2LMHeadModel computes no loss", "pass labels", "torch.no_grad()"],
        "unequal rows": ["labels has 3", "input_ids has 4"],
        "float ids": ["input_ids is of torch.float64", "ids are integers"],
        "texts": ["input_ids is ['one', 'two'", "tokenizer(texts"],
        "text labels": ["labels is ['one', 'two'", "tokenizer(texts"],
        "list labels": ["labels is [[", "not a tensor"],
        "float labels": ["labels is of torch.float64", "torch.int64"],
    }
    model = gpt2()
    with kept_in_double():
        model(**batch("causal", 4)).loss.backward()
    for found, gradients in pool.run(2, train_on_bad_batches):
        for name, words in expected.items():
            kind, text = found[name]
            assert kind == "ValueError" and all(word in text for word in words), f"{name}: {kind}: {text}"
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, gradients_of(model)[name], rtol=0, atol=1e-10)


KINDS = dict, transformers.BatchEncoding


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def call_with_the_dictionary() -> list[list[tuple[str, str]]]:
    model, found = parallelize(gpt2(), 2), []
    own: Any = parallelize(Own(), 2, num_microbatches=2)
    x = torch.zeros(4, 4)
    for refused in (lambda: own({"x": x}), lambda: own({"x": x, "label": x})):
        name, text = caught(refused)
        assert name == "TypeError" and "Own was given a dict" in text and "model(**batch)" in text, text
    for kind in KINDS:
        inputs = kind(batch("causal", 4))
        training = caught(lambda inputs=inputs: list(model(inputs)))
        with torch.no_grad():
            found.append([training, caught(model, inputs)])
    return found


def test_the_dictionary_itself_is_no_input_as_of_the_plain_model(pool: Pool) -> None:
    for kind in KINDS:
        with pytest.raises((TypeError, AttributeError)):
            gpt2()(kind(batch("causal", 4)))
    for rank in pool.run(2, call_with_the_dictionary):
        for kind, found in zip(KINDS, rank, strict=True):
            for name, text in found:
                assert name == "TypeError" and f"GPT2LMHeadModel was given a {kind.__name__}" in text
                assert "model(**batch)" in text


def run_on_other_batch(how: str) -> tuple[str, str]:
    """Rank 1 of 3 is given another batch than the others."""
    model = parallelize(gpt2(), 3, microbatch_size=1)
    run_step(model, batch("causal", 4))
    odd = torch.distributed.get_rank() == 1
    inputs = batch("causal", 3 if odd and how == "number" else 4, seed=int(odd and how != "number"))
    if how == "evaluation":
        with torch.no_grad():
            return caught(model, **inputs)
    return caught(run_step, model, inputs)


@pytest.mark.parametrize("how", ["content", "number", "evaluation"])
def test_batches_that_differ_between_the_ranks_of_a_pipeline_are_noticed(pool: Pool, how: str) -> None:
    found = pool.run(3, run_on_other_batch, how)
    assert any(kind == "BatchMismatch" for kind, _ in found)
    said = next(text for kind, text in found if kind == "BatchMismatch")
    if how == "number":
        assert "ranks 0, 2 were given a batch of 4 samples, rank 1 was given a batch of 3 samples" in said
        assert re.search(r"input_ids: ranks 0, 2 have int64\[4, (\d+)\], rank 1 has int64\[3, \1\]", said)
    else:
        assert re.search(r"input_ids: ranks 0, 2 have int64\[4, \d+\], rank 1 has other values", said)
    for kind, text in found:
        assert kind in ("BatchMismatch", "PipelineFailure")
        assert "was given" in text and "same batch" in text


# ---------------------------------------------------------------- models


class Cyclic(transformers.PreTrainedModel):
    """Its layers run in the order 0, 1, 0: no chain of stages holds them."""

    config_class = transformers.GPT2Config
    _no_split_modules = ["Linear"]  # noqa: RUF012  transformers declares it so

    def __init__(self, config: transformers.GPT2Config) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(nn.Linear(config.n_embd, config.n_embd) for _ in range(4))
        self.head = nn.Linear(config.n_embd, config.vocab_size)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.embed(input_ids)
        for index in (0, 1, 2, 3, 0):
            hidden = self.layers[index](hidden).tanh()
        logits = self.head(hidden)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class Counting(Cyclic):
    """Its forward changes a buffer outside of the modules that stages hold."""

    def __init__(self, config: transformers.GPT2Config) -> None:
        super().__init__(config)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.calls += 1
        return super().forward(input_ids, labels)


def parallelize_the_impossible() -> dict[str, tuple[str, str]]:
    config, given = transformers.GPT2Config(vocab_size=97, n_embd=16), batch("causal", 4)
    inputs = {name: given[name] for name in ("input_ids", "labels")}
    counting = Counting(config)
    found = {"initialize": caught(parallelize, counting, 2)}
    assert type(counting) is Counting and not any(tensor.is_meta for tensor in counting.state_dict().values())
    assert counting.calls == 0
    # What depends on the stages and on the inputs is known at the first call. No step begins: nothing is iterated over.
    cyclic = parallelize(Cyclic(config), 2, split_points=["layers.2"])
    found["first step"] = caught(cyclic, **inputs)
    with torch.no_grad():
        found["first evaluation"] = caught(cyclic, **inputs)
    found["no module"] = caught(parallelize, nn.Linear, 2)
    found["again"] = caught(parallelize, parallelize(gpt2(), 2), 2, num_microbatches=3)
    return found


def test_what_cannot_be_split_is_refused_before_the_model_changes_or_at_the_first_call_before_a_step(
    pool: Pool,
) -> None:
    for found in pool.run(2, parallelize_the_impossible):
        kind, text = found["initialize"]
        assert kind == "NotImplementedError"
        assert text.startswith("Auto policy for Counting is not implemented... its forward changes the buffer calls")
        for call in ("first step", "first evaluation"):
            kind, text = found[call]
            assert kind == "NotImplementedError"
            assert text.startswith("Auto policy for Cyclic is not implemented... layers.0 runs on stage 0 but needs")
        assert found["no module"] == ("TypeError", "initialize() takes a torch.nn.Module, got type")
        assert found["again"][0] == "ValueError" and "already" in found["again"][1]


def misuse() -> list[tuple[str, str]]:
    whole = Largest(transformers.GPT2Config(vocab_size=97, n_embd=16))
    weights, given = list(whole.layers.parameters()), batch("causal", 4)
    model = parallelize(whole, 2)
    given = {name: given[name] for name in ("input_ids", "labels")}

    def penalised(output: Any, inputs: Any) -> torch.Tensor:
        return output.loss + sum(weight.pow(2).sum() for weight in weights)

    found = [caught(model, **given, extra=given["labels"]), caught(model, **given, criterion=penalised)]
    with warnings.catch_warnings(action="ignore"):
        assert len(run_step(model, given)) == 4
    return found


def test_what_is_not_the_models_fault_is_not_called_a_model_that_is_not_implemented(pool: Pool) -> None:
    (many, (penalty, weight)), (other, _) = pool.run(2, misuse)
    assert many == other and many[0] == "InputsError" and "unexpected keyword argument 'extra'" in many[1]
    # On the rank that has these weights.
    assert penalty == "CriterionError" and "the criterion uses the weight layers." in weight
    assert "Auto policy" not in many[1] + weight


class Largest(Cyclic):
    """Can be split, but takes its loss from the largest logit of the whole batch: no mean that shares add up to."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        logits = self.head(hidden)
        loss = None if labels is None else logits.max()
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def train_what_is_no_mean() -> list[str]:
    model = parallelize(Largest(transformers.GPT2Config(vocab_size=97, n_embd=16)), 2)
    inputs = {name: value for name, value in batch("causal", 4).items() if name != "attention_mask"}
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        run_step(model, inputs)
    return [str(warning.message) for warning in caught_warnings if "no mean" in str(warning.message)]


def test_a_loss_that_microbatches_cannot_add_up_to_is_warned_of_where_it_is_computed(pool: Pool) -> None:
    without, (warning,) = pool.run(2, train_what_is_no_mean)
    assert not without
    assert "the loss of Largest" in warning and "accumulating over the same microbatches" in warning


def trace_then_step(path: str) -> list[tuple[str, str]]:
    """A step whose trace rank 0 cannot write, and the next one."""
    model = parallelize(gpt2(), 2, trace=path)
    return [caught(run_step, model, batch("causal", 4)) for _ in range(2)]


def test_a_trace_that_cannot_be_written_ends_every_rank(pool: Pool, tmp_path: Path) -> None:
    writer, other = pool.run(2, trace_then_step, str(tmp_path / "missing" / "step.svg"))
    assert writer[0][0] == "FileNotFoundError" and "missing" in writer[0][1]
    # The other may be done with the step before the writing fails; then the next one says so.
    assert other[1][0] == writer[1][0] == "PipelineFailure"
    assert "rank 0 failed: FileNotFoundError" in other[1][1]


# ---------------------------------------------------------------- a pipeline that was closed


def use_after_close() -> list[tuple[str, str]]:
    model = parallelize(gpt2(), 1)
    run_step(model, batch("causal", 4))
    model.pipeline.close()
    with torch.no_grad():
        evaluated = caught(model, **batch("causal", 4))
    return [caught(run_step, model, batch("causal", 4)), evaluated]


def fail_inside_the_loop(stages: int, closes: bool) -> tuple[str, str]:
    """What the loop raises after its last backward on rank 0 has closed the pipeline, or swallowed an error of its own
    in which others waited for it."""
    model = parallelize(gpt2(), stages, num_microbatches=2)

    def loop() -> None:
        for number, out in enumerate(model(**batch("causal", 4))):
            out.loss.backward()
            if number == 0 or model.pipeline.rank > 0:
                continue
            if closes:
                model.pipeline.close()
                continue
            with contextlib.suppress(ValueError), model.pipeline.board.guard("asking for more", (0, 1)):
                raise ValueError("an error of its own")

    return caught(loop)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_rank_whose_groups_close_inside_the_loop_says_why(pool: Pool, stages: int) -> None:
    (kind, text), (other, told) = pool.run(2, fail_inside_the_loop, stages, True)
    assert kind == "LoopError" and "was closed inside the loop" in text
    assert other == "PipelineFailure" and "rank 0" in told
    for kind, text in pool.run(2, fail_inside_the_loop, stages, False):
        assert kind == "PipelineFailure" and "rank 0 failed: ValueError: an error of its own" in text


def test_a_closed_pipeline_says_so(pool: Pool) -> None:
    for found in pool.run(2, use_after_close):
        for kind, text in found:
            assert kind == "RuntimeError" and "pipeline was closed" in text and "Make a new model" in text
