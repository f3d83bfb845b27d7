"""`verify` says what is exact over stages, and what not and why. Oracle: models made to be the one or the other."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import penstock
from penstock.checking.batches import build
from penstock.checking.compare import ACCUMULATED, DIFFERS, EXACT, NOT_TRIED, REFUSED, Comparison
from penstock.checking.reasons import reason_of_difference
from penstock.runtime.failures import watcher
from penstock.runtime.failures.position import Position
from tests.cli.test_cli import run
from tests.support.families import FAMILIES
from tests.support.launch import ROOT
from tests.support.pool import Pool
from tests.support.training import cut

pytestmark = pytest.mark.slow

CONFIG = {"pipeline_parallel_size": 2, "num_microbatches": 3}
ALL = ("loss", "gradients", "weights", "evaluation", "checkpoint")


class Memory(nn.Module):
    """Keeps a running mean in training, and takes it away."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean


class Tower(nn.Module):
    """Linear blocks; what `twist` does to the hidden state of the second one is what a pipeline cannot keep."""

    def __init__(self, twist: str = "") -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.norm = nn.BatchNorm1d(16) if twist == "norm" else nn.Identity()
        self.memory = Memory()
        self.twist, self.calls, self.kept = twist, 0, [torch.zeros(1), 0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(x))
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            x = self.twisted(x) if index == 1 else x
        head: torch.Tensor = self.head(x)
        return head

    def twisted(self, x: torch.Tensor) -> torch.Tensor:
        if self.twist == "calls":
            self.calls += 1
            return x / self.calls
        if self.twist == "kept":
            self.kept[1] += 1
            return x / self.kept[1]
        others = {
            "memory": lambda: self.memory(x),
            "centre": lambda: x - x.mean(0),
            "numpy": lambda: x * np.random.rand(),
            "random": lambda: x * random.random(),
            "noise": lambda: x * torch.rand(16, dtype=x.dtype),
        }
        return others[self.twist]() if self.twist in others else x


class Tagger(nn.Module):
    """Takes the length first, then the samples, as torch's layers do."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(src))
        return found


def mean(output: torch.Tensor, inputs: Any) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), inputs["target"].flatten())


def by_hand(output: torch.Tensor, inputs: Any) -> torch.Tensor:
    return ((output - F.one_hot(inputs["target"], 4)) ** 2).sum()


def contrast(output: torch.Tensor, inputs: Any) -> torch.Tensor:
    unit = F.normalize(output, dim=-1)
    return F.cross_entropy(unit @ unit.T, torch.arange(len(output)))


def classes() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(7, 8, generator=generator),
        "target": torch.randint(0, 4, (7,), generator=generator),
    }


def small_gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(n_layer=4, n_embd=32, n_head=4, vocab_size=96, bos_token_id=0, eos_token_id=1, pad_token_id=0)
    )


def texts() -> dict[str, torch.Tensor]:
    """With uneven padding."""
    ids = torch.arange(7 * 12).reshape(7, 12) % 94 + 2
    mask = torch.ones_like(ids)
    mask[1, 5:] = mask[4, 3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def test_a_model_of_transformers_with_dropout_is_exact_in_all() -> None:
    found = penstock.verify(small_gpt2, texts(), config=CONFIG)
    assert [(row.what, row.result) for row in found.rows] == [
        (what, EXACT) for what in ("loss", "gradients", "weights", "evaluation", "tokens", "checkpoint")
    ]
    assert found.exact and all(row.difference is not None and row.difference < 1e-10 for row in found.rows)
    text = str(found)
    assert "dropout and the like set to zero" in text and "float64" in text and "Not looked at: " in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_module_of_ones_own_with_a_criterion_is_exact() -> None:
    found = penstock.verify(Tower, classes, config={**CONFIG, "schedule": "interleaved-1f1b"}, criterion=mean)
    assert {row.what: row.result for row in found.rows} == dict.fromkeys(ALL, EXACT), str(found)


def test_what_no_pipeline_can_keep_differs_with_the_reason() -> None:
    make = functools.partial(Tower, "kept")
    found = penstock.verify(make, classes(), config=CONFIG, criterion=mean, steps=1)
    rows = {row.what: row for row in found.rows}
    assert not found.exact
    for what in ("loss", "gradients", "weights"):
        assert rows[what].result == DIFFERS and REASONS["kept"] in rows[what].reason, str(found)
    assert rows["gradients"].where in dict(Tower().named_parameters())


REASONS = {
    "centre": "the samples of a batch depend on each other",
    "kept": "a forward changes what the next one finds: kept.",
    "memory": "a forward changes what the next one finds: memory.mean.",
    "calls": "a forward changes what the next one finds: calls.",
    "numpy": "random numbers outside of torch",
    "random": "random numbers outside of torch",
    "noise": "random numbers in training that are no dropout",
}


@pytest.mark.parametrize("twist", REASONS)
def test_the_reason_is_what_the_model_does(twist: str) -> None:
    pieces = [(part, len(part["x"]) / 7) for part in cut(classes(), [3, 2, 2])]
    found = reason_of_difference(Tower(twist), classes(), pieces, lambda model, part: mean(model(part["x"]), part))
    assert REASONS[twist] in found


@pytest.mark.parametrize(
    ("twist", "criterion", "reason"),
    [
        ("norm", mean, "batch normalisation (norm)"),
        ("memory", mean, "a forward in training changes buffers (memory.mean)"),
        ("", contrast, "is no mean over tokens or samples"),
        ("", by_hand, 'It is a sum: return the mean, or give the criterion an attribute reduction = "sum"'),
    ],
)
def test_what_training_warns_of_is_exact_against_accumulation(twist: str, criterion: Any, reason: str) -> None:
    found = penstock.verify(functools.partial(Tower, twist), classes(), config=CONFIG, criterion=criterion, steps=1)
    rows = {row.what: row for row in found.rows}
    assert found.exact
    for what in ("loss", "gradients", "weights"):
        assert rows[what].result == ACCUMULATED and reason in rows[what].reason, str(found)
    assert rows["checkpoint"].result == EXACT


def with_a_small_head() -> Tower:
    """All samples have nearly the same loss, and not the same gradients."""
    model = Tower("norm")
    model.head.weight.data.mul_(1e-6)
    model.head.bias.data.zero_()
    return model


def test_losses_nearly_alike_are_weighed_by_tokens_where_the_loss_is() -> None:
    batch = classes()
    batch["target"][:2] = -100
    found = penstock.verify(with_a_small_head, batch, config=CONFIG, criterion=mean, steps=1)
    assert found.exact and {row.what: row.result for row in found.rows}["gradients"] == ACCUMULATED, str(found)


def test_samples_along_the_second_dimension_are_found_and_the_advice_is_right() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = {
        "src": torch.randn(6, 4, 16, generator=generator),
        "target": torch.randint(0, 5, (6, 4), generator=generator),
    }
    found = penstock.verify(Tagger, batch, config=CONFIG, criterion=mean, steps=1)
    advice = {"src": 1, "target": 1}
    assert not found.exact and f"configure batch_dim={advice}" in found.rows[0].reason, str(found)
    again = penstock.verify(Tagger, batch, config={**CONFIG, "batch_dim": advice}, criterion=mean, steps=1)
    assert {row.result for row in again.rows} == {EXACT}, str(again)


@pytest.mark.parametrize("family", ["t5", "mixtral", "vit"])
def test_a_batch_is_made_up_for_a_model_of_transformers(family: str) -> None:
    found = penstock.verify(FAMILIES[family].build, config=CONFIG, steps=1)
    results = {row.what: row.result for row in found.rows}
    assert found.exact and results["checkpoint"] == EXACT, str(found)
    assert results["loss"] == (ACCUMULATED if family == "mixtral" else EXACT)  # a router's loss is no mean
    assert results.get("tokens") == (EXACT if family in ("t5", "mixtral") else None)


class Strange(nn.Module):
    """Linear blocks, of which something is unusual."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        complex_ = how == "complex"
        self.how = how
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.turns = nn.ParameterList(nn.Parameter(torch.eye(8, dtype=torch.complex64)) for _ in range(complex_))
        self.head = nn.Linear(8, 4, dtype=torch.complex64 if complex_ else None)

    def block(self) -> nn.Module:
        if self.how == "weight_norm":
            return nn.utils.weight_norm(nn.Linear(8, 8))
        return nn.Linear(8, 8, dtype=torch.complex64 if self.how == "complex" else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for turn in self.turns:
            x = x.to(torch.complex64) @ turn
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.head(x)
        return (x.abs() if self.how == "complex" else x) * (float("nan") if self.how == "nan" else 1.0)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        return {"layout": 2, "net": dict(state)} if self.how == "layout" else state

    def load_state_dict(self, state: Any, *args: Any, **options: Any) -> Any:
        return super().load_state_dict(state["net"] if self.how == "layout" else state, *args, **options)


@pytest.mark.filterwarnings(
    "ignore:.*weight_norm.*is deprecated:FutureWarning", "ignore:Complex modules are:UserWarning"
)
@pytest.mark.parametrize("how", ["complex", "weight_norm", "layout"])
def test_unusual_weights_are_compared_as_they_are(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The unsplit model in double precision is the oracle: with imaginary parts, whatever its `state_dict` is."""
    found = penstock.verify(functools.partial(Strange, how), classes(), config=CONFIG, criterion=mean, steps=1)
    assert "stage 0 on rank 0" not in capfd.readouterr().err  # the ranks say nothing beside the table
    rows = {row.what: row for row in found.rows}
    assert all(rows[what].result == EXACT for what in ALL[:-1]), str(found)
    assert all(rows[what].where in dict(Strange(how).named_parameters()) for what in ("gradients", "weights"))
    if how == "layout":
        assert rows["checkpoint"].result == REFUSED, str(found)
        assert "layout of its own (layout is a int, net is a dict)" in rows["checkpoint"].reason
        assert "cannot save net: it is a dict that holds blocks" in rows["checkpoint"].reason
    else:
        assert rows["checkpoint"].result == EXACT, str(found)


def test_gradients_that_are_nan_are_called_so() -> None:
    with pytest.raises(ValueError, match=r"gradient of blocks\.0\.weight is not finite \(NaN or infinite\)"):
        penstock.verify(functools.partial(Strange, "nan"), classes(), config=CONFIG, criterion=mean)


class Decides(GPT2LMHeadModel):
    """What it does next depends on what its first block computed."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.transformer.h[0](self.transformer.wte(input_ids))
        hidden = hidden + 1 if hidden.sum() > 0 else hidden
        logits = self.lm_head(self.transformer.h[3](hidden))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class Peeks(GPT2LMHeadModel):
    """Its generate() asks a block past the model's forward."""

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        self.transformer.h[3].ln_1(self.transformer.wte(input_ids))
        return super().prepare_inputs_for_generation(input_ids, **kwargs)


def test_no_rank_leaves_before_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that dropped its model early was lost to a rank that was still in its last call."""
    doing, rows, close = Position.doing, Comparison.rows, watcher._close

    @contextlib.contextmanager
    def slow_on_the_first(self: Position, what: str) -> Iterator[None]:
        with doing(self, what):
            yield
        if what.startswith("putting the files in place") and torch.distributed.get_rank() == 0:
            time.sleep(0.7)

    def dropped_at_once(self: Comparison, folder: Path | None = None) -> Any:
        found = rows(self, folder)
        gc.collect()
        return found

    monkeypatch.setattr(Position, "doing", slow_on_the_first)
    monkeypatch.setattr(Comparison, "rows", dropped_at_once)
    # Soon after its last board is dropped, the watch closes.
    monkeypatch.setattr(watcher, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(watcher, "_close", lambda watch, leave=True: close(watch, leave=False))
    found = penstock.verify(Tower, classes(), config=CONFIG, criterion=mean, steps=1)
    assert {row.result for row in found.rows} == {EXACT}, str(found)


def test_a_refusal_is_told_with_its_reason() -> None:
    config = small_gpt2().config
    ids = {name: value for name, value in texts().items() if name != "attention_mask"}
    found = penstock.verify(lambda: Decides(config), ids, config=CONFIG, steps=1)
    assert not found.exact and [(row.what, row.result) for row in found.rows] == [("training", REFUSED)]
    assert "depends on values computed by transformer.h.0" in found.rows[0].reason
    rows = {row.what: row for row in penstock.verify(lambda: Peeks(config), texts(), config=CONFIG, steps=1).rows}
    assert rows["tokens"].result == REFUSED and "runs a part of the model by itself" in rows["tokens"].reason
    assert {rows[what].result for what in ALL} == {EXACT}


def test_generate_that_does_not_run_unsplit_is_not_tried() -> None:
    model = functools.partial(GPT2LMHeadModel, GPT2Config(**{**small_gpt2().config.to_dict(), "n_positions": 12}))
    batch = {name: value[:, :4] for name, value in texts().items()}

    class Wordless(GPT2LMHeadModel):
        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
            raise LookupError("no cheese")

    rows = {
        row.what: row for row in penstock.verify(lambda: Wordless(model().config), batch, config=CONFIG, steps=1).rows
    }
    assert rows["tokens"].result == NOT_TRIED and "LookupError: no cheese" in rows["tokens"].reason


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="needs a number of stages"):
        penstock.verify(Tower, classes(), config={"pipeline_parallel_size": "auto"})
    with pytest.raises(ValueError, match="your code makes its model itself"):
        penstock.verify(Tower, classes(), config=CONFIG, layers=2)
    with pytest.raises(ValueError, match="computes no loss from"):
        penstock.verify(Tower, classes(), config=CONFIG)
    with pytest.raises(ValueError, match=r"needs about .* GB, and this machine has"):
        penstock.verify("LlamaForCausalLM", config=CONFIG)


SCRIPT = """
import torch
from torch import nn
from tests.checking.test_verify import Tower, classes, mean, small_gpt2

def centred():
    return Tower("centre")
"""


def test_the_command_takes_a_script_and_its_status_is_for_ci(tmp_path: Path) -> None:
    script = tmp_path / "own_script_of_a_test.py"
    script.write_text(SCRIPT)
    options = ["--criterion", f"{script}:mean", "--microbatches", 3, "--steps", 1]
    batch = f"{script}:classes"
    good = run("verify", f"{script}:Tower", "--inputs", batch, *options, "--json")
    assert good.exit_code == 0, good.output
    data = json.loads(good.output)
    assert data["exact"] and [row["what"] for row in data["rows"]] == list(ALL)
    assert "over 2 stages (1f1b)" in data["about"]  # what "auto" has chosen
    bad = run("verify", f"{script}:centred", "--batch", batch, *options)  # its first name
    assert bad.exit_code == 1 and "the samples of a batch depend on each other" in " ".join(bad.output.split())
    assert "warning: --batch is now --inputs" in bad.stderr
    assert run("verify", f"{script}:Absent", *options).exit_code == 1
    assert "there is no file" in run("verify", "absent.py:Tower").stderr


def test_the_command_takes_a_checkpoint_and_fewer_layers(tmp_path: Path) -> None:
    small_gpt2().save_pretrained(tmp_path)
    result = run("verify", tmp_path, "--layers", 2, "--steps", 1)
    assert result.exit_code == 0, result.output
    blocks = sum(each.numel() for each in small_gpt2().transformer.h[2:].parameters())
    whole = sum(each.numel() for each in small_gpt2().parameters())
    assert f"GPT2LMHeadModel, {whole - blocks:,} parameters, over 2 stages" in result.output
    for page in ("README.md", "docs/verify.md"):
        shown = (ROOT / page).read_text().partition("penstock verify ")[2].split("\n```\n")[2]
        assert said(shown) == said(result.output) != [], page


def said(output: str) -> list[list[str]]:
    """The rows of a table of `penstock verify` without its figures: what was compared, and the result."""
    return [re.split(" {2,}", line.strip())[:2] for line in output.splitlines() if re.match(r"  [a-z]+ {2,}", line)]


def test_a_class_by_its_name_is_made_with_fewer_layers() -> None:
    model = build("T5ForConditionalGeneration", 1, 2, False)
    assert (len(model.encoder.block), len(model.decoder.block)) == (1, 1)


def verify_in_a_group() -> str:
    with pytest.raises(RuntimeError) as caught:
        penstock.verify(small_gpt2, config={"model_parallelism": {"pipeline_parallel_size": 2}})
    return str(caught.value)


def test_a_process_that_is_in_a_group_is_told_so(pool: Pool) -> None:
    """Its forks would be in that group, too."""
    assert "call it in a program of its own, or before initialize()" in pool.run(1, verify_in_a_group)[0]
