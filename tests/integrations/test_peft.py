"""PEFT over stages: the same script on a PeftModel with and without a split gives the same run and the same folders."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, PromptTuningConfig, VeraConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import penstock
from penstock.checkpoint.untrusted import CheckpointError
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import (
    EXACT,
    assert_same_gradients,
    gradients_of,
    kept_in_double,
    parallelize,
    rows,
    run_step,
)

pytestmark = pytest.mark.slow

STEPS = ("default", "other", "default")


def adapted(dropout: float = 0.0, base: Any = None, **options: Any) -> Any:
    """GPT-2, whose input embedding is the output's weight, with two adapters; one trains a layer norm as a whole."""
    model = FAMILIES["gpt2"].build() if base is None else base
    torch.manual_seed(1)
    shared = {"task_type": "CAUSAL_LM", "init_lora_weights": False}  # so that both factors have gradients at once
    options = {"target_modules": ["c_attn", "c_proj", "wte"], "lora_dropout": dropout, **options}
    model = get_peft_model(model, LoraConfig(r=2, **shared, **options))
    model.add_adapter("other", LoraConfig(r=3, target_modules=["c_fc"], modules_to_save=["ln_f"], **shared))
    return model.double()


def story(model: Any, step: Callable[[Any, Any], Any], folder: Path) -> dict[str, Any]:
    """The script, the same for both: `step` is the loop over a batch. At last the adapters become part of the model."""
    told, printed = [], io.StringIO()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for seed, adapter in enumerate(STEPS):
        model.set_adapter(adapter)
        optimizer.zero_grad()
        loss = step(model, batch("causal", 4, seed=seed))
        told.append((loss, gradients_of(model)))
        optimizer.step()
    with torch.no_grad():
        evaluated = model(**batch("causal", 4)).loss.item()
        with model.disable_adapter():
            without = model(**batch("causal", 4)).loss.item()
        tokens = model.generate(batch("causal", 2)["input_ids"][:, :4], max_new_tokens=4, do_sample=False)
    with contextlib.redirect_stdout(printed):
        model.print_trainable_parameters()
    model.save_pretrained(folder, safe_serialization=not folder.name.endswith("bin"))
    counted = model.get_nb_trainable_parameters()
    merged = model.merge_and_unload()
    merged.requires_grad_(True)
    told.append((step(merged, batch("causal", 4)), gradients_of(merged)))
    merged.save_pretrained(folder / "merged")
    return {
        "steps": told,
        "losses": (evaluated, without),
        "tokens": tokens,
        "printed": printed.getvalue(),
        "counted": counted,
    }


def plain_step(model: Any, inputs: Any) -> float:
    loss = model(**inputs).loss
    loss.backward()
    return float(loss.detach())


def split_step(model: Any, inputs: Any) -> float:
    run_step(model, rows(inputs, model.data_parallel_rank, model.data_parallel_size))
    return float(model.pipeline.last_step.global_loss)


def split_story(folder: Path, stages: int, schedule: str) -> dict[str, Any]:
    with kept_in_double():
        model = adapted()
        same = parallelize(model, stages, schedule=schedule)
        assert same is model and isinstance(model, PeftModel | penstock.PipelineModel)
        return story(model, split_step, folder)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("plain")
    with kept_in_double():
        return story(adapted(), plain_step, folder), folder


@pytest.mark.parametrize(("ranks", "stages", "schedule"), [(3, 3, "zb-h1"), (4, 2, "1f1b")])
def test_the_same_script_gives_the_same_run_and_the_same_folders(
    pool: Pool, expected: tuple[dict[str, Any], Path], tmp_path: Path, ranks: int, stages: int, schedule: str
) -> None:
    plain, folder = expected
    saved = tmp_path / ("bin" if stages == 3 else "safe")
    runs = pool.run(ranks, split_story, saved, stages, schedule, timeout=120)
    for number, (loss, gradients) in enumerate(plain["steps"]):
        for run in runs:
            assert run["steps"][number][0] == pytest.approx(loss, rel=EXACT)
            assert_same_gradients(run["steps"][number][1], gradients, 1e-9)  # after steps, rounding has grown
        together: set[str] = set().union(*(run["steps"][number][1] for run in runs))
        assert together == set(gradients)
    assert plain["losses"][0] != pytest.approx(plain["losses"][1], rel=1e-5), "the adapters change the loss"
    for run in runs:
        assert run["losses"] == pytest.approx(plain["losses"], rel=EXACT)
        assert torch.equal(run["tokens"], plain["tokens"]) and run["counted"] == plain["counted"]
    assert [run["printed"] for run in runs] == [plain["printed"]] + [""] * (ranks - 1)
    merged = [AutoModelForCausalLM.from_pretrained(where / "merged") for where in (saved, folder)]
    written = [(where / "merged/config.json").read_text() for where in (saved, folder)]
    assert written[0] == written[1] and merged[0].config.tie_word_embeddings
    for name, value in merged[0].state_dict().items():
        torch.testing.assert_close(value, merged[1].get_parameter(name), atol=1e-9, rtol=0)
    for adapter in ("", "other"):
        assert_same_adapter(saved / adapter, folder / adapter)
    again = PeftModel.from_pretrained(FAMILIES["gpt2"].build(), saved)
    again.load_adapter(saved / "other", "other")
    with torch.no_grad(), kept_in_double():
        assert again.double()(**batch("causal", 4)).loss.item() == pytest.approx(plain["losses"][0], rel=EXACT)


def assert_same_adapter(found: Path, expected: Path, tolerance: float = 1e-9) -> None:
    names = {path.name for path in expected.iterdir() if path.is_file()}
    of_format = {name.replace(".safetensors", ".bin") for name in names}
    assert {path.name for path in found.iterdir() if path.is_file()} in (names, of_format)
    settings = [json.loads((folder / "adapter_config.json").read_text()) for folder in (found, expected)]
    for one in settings:
        one["target_modules"] = sorted(one["target_modules"])  # PEFT writes a set
    assert settings[0] == settings[1]
    weights = [
        load_file(folder / "adapter_model.safetensors")
        if (folder / "adapter_model.safetensors").exists()
        else torch.load(folder / "adapter_model.bin", weights_only=True)
        for folder in (found, expected)
    ]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], atol=tolerance, rtol=0)


def train_with_dropout(stages: int) -> list[float]:
    with kept_in_double():
        torch.manual_seed(7)  # decides the run's dropout
        model = parallelize(adapted(dropout=0.4), stages, num_microbatches=2)
        return [split_step(model, batch("causal", 4)) for _ in range(2)]


def test_the_adapters_dropout_is_that_of_one_stage(pool: Pool) -> None:
    (alone,) = pool.run(1, train_with_dropout, 1)
    assert alone[0] != alone[1], "there is dropout"
    for losses in pool.run(2, train_with_dropout, 2):
        assert losses == pytest.approx(alone, rel=EXACT)


def train_the_last_block(stages: int) -> list[tuple[float, float, bool]]:
    """Adapters in the last block only, and a loss that overflows at the second step."""
    model = FAMILIES["gpt2"].build(dtype=torch.float32)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], layers_to_transform=[3]))
    parallelize(model, stages)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    seen = []
    for step in range(3):
        before = [parameter.detach().clone() for parameter in trainable]
        for out in model(**batch("causal", 4, dtype=torch.float32)):
            scaler.scale(out.loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(old, new) for old, new in zip(before, trainable, strict=True))
        seen.append((model.pipeline.last_step.global_loss, scaler.get_scale(), moved))
    return seen


def test_a_rank_with_nothing_to_train_has_an_optimizer_and_a_scaler(pool: Pool) -> None:
    first, last = pool.run(2, train_the_last_block, 2)
    assert [step[1] for step in first] == [step[1] for step in last] == [2.0**10, 2.0**9, 2.0**9]
    assert [step[2] for step in last] == [True, False, True]
    assert last[2][0] < last[0][0] and not any(step[2] for step in first)


def copied(model: Any, step: Callable[[Any, Any], float], folder: Path) -> tuple[list[float], dict[str, Any]]:
    """What is done to a copy of a model that was trained: compiled, trained, clipped, loaded, merged."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step(model, batch("causal", 4))
    optimizer.step()
    made = copy.deepcopy(model)
    if isinstance(made, penstock.PipelineModel):
        made.compile(backend="eager")
    made.zero_grad()
    losses = [step(made, batch("causal", 4, seed=1))]
    clip = made.clip_grad_norm_ if hasattr(made, "clip_grad_norm_") else None
    norm = clip(0.1) if clip else torch.nn.utils.clip_grad_norm_(made.parameters(), 0.1)
    torch.optim.SGD(made.parameters(), lr=0.5).step()
    made.save_pretrained(folder)
    with torch.no_grad():
        losses += [float(norm), float(made(**batch("causal", 4)).loss), float(model(**batch("causal", 4)).loss)]
    merged = made.merge_and_unload()
    merged.requires_grad_(True)
    return [*losses, step(merged, batch("causal", 4, seed=2))], gradients_of(merged)


def split_copied(folder: Path) -> tuple[list[float], dict[str, Any]]:
    with kept_in_double():
        return copied(parallelize(adapted(base=FAMILIES["gpt2"].build(n_layer=2)), 2), split_step, folder)


def test_a_copy_is_compiled_trained_saved_and_merged(pool: Pool, tmp_path: Path) -> None:
    with kept_in_double():
        losses, gradients = copied(adapted(base=FAMILIES["gpt2"].build(n_layer=2)), plain_step, tmp_path / "plain")
    assert len(set(losses)) == len(losses)
    for found, theirs in pool.run(4, split_copied, tmp_path / "split", timeout=120):
        assert found == pytest.approx(losses, rel=1e-9)
        assert_same_gradients(theirs, gradients, 1e-9)
    for adapter in ("", "other"):
        assert_same_adapter(tmp_path / "split" / adapter, tmp_path / "plain" / adapter)


def reload(folder: Path) -> None:
    model = parallelize(adapted(), 2)
    model.save_pretrained(folder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if "lora" in name or "modules_to_save" in name:
            parameter.data.zero_()
    with pytest.raises(CheckpointError, match="lacks weights of the adapter default"):
        model.load_ordinary(folder / "other")
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.load_ordinary(folder)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer = torch.optim.AdamW(model.parameters())
    penstock.save_checkpoint(folder / "run", model=model, optimizer=optimizer)
    for parameter in model.parameters():
        parameter.data.zero_()
    penstock.load_checkpoint(folder / "run", model=model, optimizer=optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_adapters_are_loaded_back(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, reload, tmp_path)


def injected(folder: Path, stages: int) -> None:
    torch.manual_seed(1)
    model: Any = FAMILIES["llama"].build(dtype=torch.float32)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    if stages:
        parallelize(model, stages)
    model.save_pretrained(folder)
    if stages:
        value = next(value for name, value in model.named_parameters() if "lora_B" in name)
        before = value.clone()
        value.data.zero_()
        model.load_ordinary(folder)
        assert torch.equal(value, before)


def test_an_adapter_that_transformers_injected_is_saved_whole(pool: Pool, tmp_path: Path) -> None:
    injected(tmp_path / "plain", 0)
    pool.run(2, injected, tmp_path / "split", 2)
    assert_same_adapter(tmp_path / "split", tmp_path / "plain", tolerance=0)


def test_what_cannot_be_split_is_refused_by_name() -> None:
    config = {"model_parallelism": {"pipeline_parallel_size": 2}}
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(NotImplementedError, match="PROMPT_TUNING put tokens before the input"):
        penstock.initialize(get_peft_model(FAMILIES["gpt2"].build(), prompts), config)
    ranks = AdaLoraConfig(task_type="CAUSAL_LM", total_step=10, target_modules=["c_attn"])
    with pytest.raises(NotImplementedError, match="ADALORA do more in a forward"):
        penstock.initialize(get_peft_model(FAMILIES["gpt2"].build(), ranks), config)
    vera = VeraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"])
    with pytest.raises(NotImplementedError, match="VERA share tensors between layers"):
        penstock.initialize(get_peft_model(FAMILIES["gpt2"].build(), vera), config)


# What a method needs on a model this small, and to name what it adapts.
NEEDED: dict[str, dict[str, Any]] = {
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 8},
    "FOURIERFT": {"n_frequency": 10},
    "IA3": {"feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MISS": {"r": 4},
    "OFT": {"oft_block_size": 4},
    "RANDLORA": {"r": 4},
    "ROAD": {"group_size": 4},
    "SHIRA": {"r": 4},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [*range(30)]},
    "VBLORA": {"vector_length": 8, "num_vectors": 16},
    "WAVEFT": {"n_frequency": 16},
}


def with_method(method: str) -> Any:
    """Llama with adapters of a method in PEFT's registry."""
    make: Any = PEFT_TYPE_TO_CONFIG_MAPPING[method]
    taken = inspect.signature(make).parameters
    usual = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "num_virtual_tokens": 2}
    given = {name: value for name, value in usual.items() if name in taken}
    model = FAMILIES["llama"].build(num_hidden_layers=2)
    torch.manual_seed(1)
    model = get_peft_model(model, make(**{**given, **NEEDED.get(method, {})})).double()
    generator = torch.Generator().manual_seed(2)  # both factors have gradients at once
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) / 20)
    return model


def plain_method(method: str, folder: Path) -> Any:
    """Loss, gradients and saved tensors; None where the method needs another batch or package, or single precision."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            model = with_method(method)
            loss = plain_step(model, batch("causal", 4))
            model.save_pretrained(folder / method)
    except (ImportError, TypeError, ValueError, AttributeError, RuntimeError):
        return None
    return loss, gradients_of(model), load_file(folder / method / "adapter_model.safetensors")


def split_methods(methods: list[str], folder: Path) -> dict[str, Any]:
    """The same over two stages, by method; or the error that refuses it."""
    found: dict[str, Any] = {}
    for method in methods:
        with kept_in_double():
            try:
                model = parallelize(with_method(method), 2)
            except NotImplementedError as error:
                found[method] = str(error)
                continue
            loss = split_step(model, batch("causal", 4))
            model.save_pretrained(folder / method)
            found[method] = loss, gradients_of(model), load_file(folder / method / "adapter_model.safetensors")
    return found


def test_every_method_of_peft_is_exact_or_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    with kept_in_double():
        plain = {str(one.value): plain_method(one, tmp_path / "plain") for one in PEFT_TYPE_TO_CONFIG_MAPPING}
    methods = [name for name, found in plain.items() if found is not None]
    runs = pool.run(2, split_methods, methods, tmp_path / "split", timeout=240)
    exact = {name for name in methods if not isinstance(runs[0][name], str)}
    assert len(exact) >= 20 and {"LORA", "IA3", "OFT", "TRAINABLE_TOKENS"} <= exact
    for method in methods:
        if method not in exact:
            assert all(method in run[method] for run in runs), runs[0][method]
            continue
        loss, gradients, saved = plain[method]
        together: set[str] = set().union(*(run[method][1] for run in runs))
        assert together == set(gradients), method
        for run in runs:
            assert run[method][0] == pytest.approx(loss, rel=1e-9), method
            if run[method][1]:  # a stage may have nothing to train
                assert_same_gradients(run[method][1], gradients, 1e-7)
            assert run[method][2].keys() == saved.keys(), method
            assert all(torch.equal(value, saved[name]) for name, value in run[method][2].items()), method


def tied_tokens(stages: int, folder: Path) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Rows of a tied embedding are trained: the head has them, too."""
    with kept_in_double():
        torch.manual_seed(1)
        options = LoraConfig(r=2, target_modules=["c_attn"], trainable_token_indices=[1, 2, 5], task_type="CAUSAL_LM")
        model = get_peft_model(FAMILIES["gpt2"].build(), options).double()
        step = split_step if stages else plain_step
        if stages:
            parallelize(model, stages)
        loss, gradients = step(model, batch("causal", 4)), gradients_of(model)
        model.save_pretrained(folder)
        return loss, gradients, load_file(folder / "adapter_model.safetensors")


def test_trained_rows_of_a_tied_embedding_are_exact(pool: Pool, tmp_path: Path) -> None:
    loss, gradients, saved = tied_tokens(0, tmp_path / "plain")
    assert any("trainable_tokens" in name for name in gradients)
    for mine, theirs, written in pool.run(2, tied_tokens, 2, tmp_path / "split"):
        assert mine == pytest.approx(loss, rel=EXACT)
        assert_same_gradients(theirs, gradients, 1e-9)
        assert written.keys() == saved.keys()
        assert all(torch.equal(value, saved[name]) for name, value in written.items())


def refusals(folder: Path) -> list[str]:
    model = parallelize(adapted(), 1)
    calls: list[Callable[[], Any]] = [
        lambda: model(**batch("causal", 2), adapter_names=["default", "other"]),
        lambda: model.add_adapter("third", LoraConfig()),
        lambda: model.delete_adapter("other"),
        lambda: model.save_pretrained(folder, selected_adapters=["third"]),
        lambda: model.save_pretrained(folder, push_to_hub=True),
        lambda: parallelize(get_peft_model(parallelize(FAMILIES["gpt2"].build(), 1), LoraConfig()), 1),
        lambda: parallelize(adapted(), 1, tensor_parallel_size=2),
    ]
    said = []
    for call in calls:
        with pytest.raises((NotImplementedError, ValueError)) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_what_needs_the_whole_model_is_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    expected = [
        "adapter_names chooses adapters sample by sample",
        "add the adapter third before penstock.initialize()",
        "delete the adapter other before penstock.initialize()",
        "there is no adapter third: the model has default, other",
        "push_to_hub does not work on a parallelised model",
        "adapters come first",
        "PEFT has put adapters around some",
    ]
    for said in pool.run(2, refusals, tmp_path):
        assert len(said) == len(expected)
        assert all(part in text for part, text in zip(expected, said, strict=True)), said
