"""What would go wrong without a word where TRL's own losses run over stages; each against the plain trainer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    CLIPImageProcessor,
    EvalPrediction,
    LlavaProcessor,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, KTOConfig

import penstock
from penstock.integrations.trl import PipelineDPOTrainer, PipelineGRPOTrainer, PipelineKTOTrainer
from penstock.trainer.own_loss import BATCH, SHARES, OwnLoss, Term, join_outputs
from penstock.trainer.trl.fused_head import add_fused_head
from penstock.trainer.trl.pairs import join_pairs
from tests.support.families import FAMILIES
from tests.support.feedback_runs import approve, judge
from tests.support.pool import Pool
from tests.support.preference_runs import SIZES, pairs, policy_arguments, prefer, prefer_all, prompts, reinforce
from tests.support.quantised import quantisation, write_base
from tests.support.trainer_runs import defaults, differences, differences_when_resumed, over, precisely, tokenizer
from tests.support.training import kept_in_double

pytestmark = pytest.mark.slow

TWO: dict[str, Any] = {"pipeline_parallel_size": 2}


OF_THE_BATCH: dict[str, dict[str, Any]] = {
    # After such a step model and reference no longer put pairs that are equally long in the same order.
    "aot": {"loss_type": ["aot"], "eval_strategy": "no", "warmup_steps": 0, "learning_rate": 0.05, "max_length": 6},
    "aot_unpaired": {"loss_type": ["aot_unpaired"], "eval_strategy": "no"},
    "routers": {"family": "mixtral", "router_aux_loss_coef": 0.3, "eval_strategy": "no"},
    "a mean over pairs": {"loss_type": ["sigmoid"], "eval_strategy": "no"},
}


def losses_of_microbatches(folder: Path) -> dict[str, tuple[list[dict[str, float]], list[str]]]:
    """Runs with losses that look at all of a microbatch, and their warnings."""
    runs = {}
    for name, case in OF_THE_BATCH.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            logs = prefer(folder / name, 2, steps=2, parallelism={"num_microbatches": 2}, **case)
        runs[name] = logs, [str(one.message) for one in said]
    return runs


def test_a_loss_of_all_the_batch_equals_an_accumulation_and_is_warned_of(pool: Pool, tmp_path: Path) -> None:
    smaller = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    plain = prefer_all(tmp_path / "plain", 0, 1, 2, {name: {**case, **smaller} for name, case in OF_THE_BATCH.items()})
    for runs in pool.run(2, losses_of_microbatches, tmp_path / "split", init=False, timeout=180):
        for name, (logs, said) in runs.items():
            found = differences((logs, tmp_path / "split" / name), (plain[name], tmp_path / "plain" / name))
            exact = 1e-6 if name == "routers" else 1e-10  # routers' softmax is in single precision
            assert found["weights"] < exact and found["loss"] < exact, name
            warned = [text for text in said if "is no mean over samples" in text]
            assert len(warned) == (name != "a mean over pairs"), name
            assert all("DPOTrainer" in one and "accumulating over the same microbatches" in one for one in warned)


def trained_then_resumed(folder: Path, stages: int, resume: bool) -> dict[str, list[dict[str, float]]]:
    common = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no", "resume": resume}
    cases: dict[str, dict[str, Any]] = {"DPO": {"lora": True}, "GRPO": {"num_generations": 2}}
    return prefer_all(folder, stages, 1, 4, {name: {**common, **case} for name, case in cases.items()})


def test_a_run_goes_on_from_its_checkpoint_over_another_number_of_stages(pool: Pool, tmp_path: Path) -> None:
    """GRPO goes on with the same completions, too."""
    for name, found in differences_when_resumed(pool, tmp_path, trained_then_resumed, 2, 3):
        # TRL counts tokens from where its process began.
        wrong = {figure: value for figure, value in found.items() if value > 1e-10 and figure != "num_tokens"}
        assert not wrong, name


def test_pipelines_that_are_new_in_a_resumed_run_draw_completions_of_their_own(pool: Pool, tmp_path: Path) -> None:
    """All completions are of one prompt, which both pipelines have."""
    run: dict[str, Any] = {"num_generations": 8, "eval_strategy": "no", "save_strategy": "steps", "save_steps": 1}
    pool.run(2, reinforce, tmp_path, 2, 1, 1, init=False, timeout=180, **run)
    for file in tmp_path.glob("asked-*.txt"):
        file.unlink()
    pool.run(4, reinforce, tmp_path, 2, 2, 2, init=False, timeout=180, resume=True, **run)
    first, second = (file.read_text().splitlines() for file in tmp_path.glob("asked-*.txt"))
    assert len(first) == len(second) == 4 and not set(first) & set(second)


def references(folder: Path, stages: int) -> list[list[float]]:
    """The log-probabilities that two references give, which differ in their last layer alone."""
    found = []
    for scale in (1.0, 0.5):
        with precisely(torch.float64):
            model, reference = (FAMILIES["llama"].build(dtype=torch.float64, **SIZES) for _ in range(2))
            with torch.no_grad():
                reference.lm_head.weight.mul_(scale)
            trainer: Any = (PipelineDPOTrainer if stages else DPOTrainer)(
                model,
                ref_model=reference,
                args=DPOConfig(**defaults(folder, 1, 1), bf16=False, precompute_ref_log_probs=True),
                train_dataset=pairs(6, 1),
                eval_dataset=pairs(6, 2),
                processing_class=tokenizer(),
                **over(stages),
            )
        found += [list(trainer.train_dataset["ref_chosen_logps"]), list(trainer.eval_dataset["ref_rejected_logps"])]
    return found


def test_precomputed_figures_are_those_of_their_own_reference(pool: Pool, tmp_path: Path) -> None:
    """TRL's key for its file of them is a hash of the weights, of which rank 0 has the first stage's."""
    plain = torch.tensor(references(tmp_path / "plain", 0))
    assert (plain[0] - plain[2]).abs().min() > 1e-6
    for found in pool.run(2, references, tmp_path / "split", 2, init=False, timeout=180):
        torch.testing.assert_close(torch.tensor(found), plain, rtol=0, atol=1e-5)


def adapted_again(folder: Path, stages: int) -> list[dict[str, float]]:
    """The reference of an adapter that was trained before is a copy of it."""
    with precisely(torch.float64):
        torch.manual_seed(1)
        given = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = get_peft_model(FAMILIES["llama"].build(dtype=torch.float64, **SIZES), given).to(torch.float64)
    return prefer(folder, stages, steps=2, model=model, eval_strategy="no")


def test_an_adapter_is_trained_again_against_a_copy_of_itself(pool: Pool, tmp_path: Path) -> None:
    plain = adapted_again(tmp_path / "plain", 0)
    for logs in pool.run(2, adapted_again, tmp_path / "split", 2, init=False, timeout=180):
        found = differences((logs, tmp_path / "split"), (plain, tmp_path / "plain"))
        assert not {name: value for name, value in found.items() if value > 1e-10}


SINGLE: dict[str, Any] = {"dtype": torch.float32, "optim": "sgd"}
HALF: dict[str, Any] = {"bf16": True, "dtype": torch.float32, "learning_rate": 1e-4}
# Draws completions of which all words are as likely, so that no rounding in half precision makes another one.
ANY_WORD = {"temperature": 1e4}
CASES: dict[str, dict[str, Any]] = {
    # Old log-probabilities are kept, and the order of the data depends on how many ranks are taken for processes.
    "GRPO, several steps of a generation": {"num_generations": 2, "steps_per_generation": 4, "loss_type": "grpo"},
    "GRPO with a reference in a folder": {"num_generations": 4, "loss_type": "dr_grpo", "beta": 0.1},
    "GRPO with a reward model": {"num_generations": 2},
    "DPO, kept up to date": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    # Over one microbatch, as a router's loss depends on which samples are together.
    "DPO, experts": {"family": "mixtral", "router_aux_loss_coef": 0.3, "parallelism": {"num_microbatches": 1}},
    # TRL has no double precision for it. With SGD: Adam divides gradients that are mere rounding by their own size.
    "DPO, alpha divergence": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.6, **SINGLE},
    "DPO, half precision": HALF,
    "GRPO, half precision": {"num_generations": 2, "generation_kwargs": ANY_WORD, **HALF},
}


def test_other_settings_give_the_same_run(pool: Pool, tmp_path: Path) -> None:
    with torch.no_grad():
        (reference := FAMILIES["llama"].build(dtype=torch.float64, **SIZES)).lm_head.weight.mul_(0.9)
    reference.save_pretrained(tmp_path / "reference")
    reference.config.num_labels = 1
    AutoModelForSequenceClassification.from_config(reference.config).save_pretrained(tmp_path / "judge")
    tokenizer().save_pretrained(tmp_path / "judge")
    cases = {name: {"eval_strategy": "no", **case} for name, case in CASES.items()}
    cases["GRPO with a reference in a folder"]["reference"] = tmp_path / "reference"
    cases["GRPO with a reward model"]["rewards"] = str(tmp_path / "judge")
    plain = prefer_all(tmp_path / "plain", 0, 1, 2, cases)
    for runs in pool.run(2, prefer_all, tmp_path / "split", 2, 1, 2, cases, init=False, timeout=240):
        for name, logs in runs.items():
            found = differences((logs, tmp_path / "split" / name), (plain[name], tmp_path / "plain" / name))
            rough = 2e-2 if "half" in name else 1e-5 if "alpha" in name else 1e-10
            assert not {figure: value for figure, value in found.items() if value > rough}, name


def test_rewards_are_asked_for_once_for_each_completion(pool: Pool, tmp_path: Path) -> None:
    run = {"steps": 2, "num_generations": 2, "eval_strategy": "no", "gradient_accumulation_steps": 1}
    pool.run(4, reinforce, tmp_path, 2, 2, init=False, timeout=180, **run)
    asked = [file.read_text().splitlines() for file in tmp_path.glob("asked-*.txt")]
    assert len(asked) == 2, "the first ranks of both pipelines"
    assert [len(one) for one in asked] == [8, 8] and asked[0] != asked[1]


def test_tensor_parallel_ranks_give_the_same_run(pool: Pool, tmp_path: Path) -> None:
    sharded = {"parallelism": {"tensor_parallel_size": 2}, "init": False, "timeout": 180}
    for script in (prefer, reinforce):
        plain, split = tmp_path / script.__name__ / "plain", tmp_path / script.__name__ / "split"
        expected = script(plain, steps=2, eval_strategy="no")
        for logs in pool.run(2, script, split, 1, steps=2, eval_strategy="no", **sharded):
            found = differences((logs, split), (expected, plain))
            assert not {name: value for name, value in found.items() if value > 1e-10}


TWICE = ("first", "second")


def counted(folder: Path) -> tuple[list[str], list[list[dict[str, float]]]]:
    """Warnings and logs of two runs, with the same arguments: the generation_batch_size that GRPOConfig computes for so
    many ranks."""
    kept, logger = BufferingHandler(1000), logging.getLogger("penstock.trainer.trl.grpo")
    logger.addHandler(kept)
    arguments = policy_arguments(folder, 2, 1, generation_batch_size=16, eval_strategy="no")
    logs = [reinforce(folder / name, 2, arguments=arguments) for name in TWICE]
    logger.removeHandler(kept)
    assert arguments.generation_batch_size == 16
    return [record.getMessage() for record in kept.buffer], logs


def test_a_generation_batch_of_ranks_is_warned_of_and_becomes_one_of_pipelines(pool: Pool, tmp_path: Path) -> None:
    """Also where it is what GRPOConfig takes by itself: it does not say which of the two it was."""
    plain = reinforce(tmp_path / "plain", steps=2, eval_strategy="no")
    (warned, runs), (silent, _) = pool.run(2, counted, tmp_path / "split", init=False, timeout=120)
    text, again = warned
    assert text.startswith("generation_batch_size is 8 (") and "not 16" in text and again == text and not silent
    for name, logs in zip(TWICE, runs, strict=True):
        found = differences((logs, tmp_path / "split" / name), (plain, tmp_path / "plain"))
        assert not {name: value for name, value in found.items() if value > 1e-10}


METRICS: dict[str, Callable[..., list[dict[str, float]]]] = {"DPO": prefer, "reward": judge, "KTO": approve}


def sums(found: EvalPrediction) -> dict[str, float]:
    predictions: Any = found.predictions
    return {"mean": float(predictions.mean()), "rows": float(len(predictions)), "last": float(predictions.flat[-1])}


def evaluated_by_metrics(folder: Path, stages: int, pipelines: int) -> dict[str, list[dict[str, float]]]:
    given: dict[str, Any] = {"steps": 1, "eval_steps": 1, "compute_metrics": sums}
    return {name: script(folder / name, stages, pipelines, **given) for name, script in METRICS.items()}


def test_metrics_of_ones_own_see_the_outputs_of_the_plain_trainer(pool: Pool, tmp_path: Path) -> None:
    plain = pool.run(2, evaluated_by_metrics, tmp_path / "plain", 0, 2, init=False, timeout=120)[0]
    for runs in pool.run(4, evaluated_by_metrics, tmp_path / "split", 2, 2, init=False, timeout=180):
        for name, logs in runs.items():
            found = differences((logs, tmp_path / "split" / name), (plain[name], tmp_path / "plain" / name))
            assert found.keys() >= {"eval_mean", "eval_rows", "eval_last"}, name
            assert not {figure: value for figure, value in found.items() if value > 1e-10}, name


def refuse_to_score(completions: list[str], **kwargs: Any) -> list[float]:
    raise LookupError("no judge today")


def without_rewards(folder: Path) -> str:
    with pytest.raises((LookupError, RuntimeError)) as failed:
        reinforce(folder, 2, steps=1, rewards=refuse_to_score)
    return str(failed.value)


def test_a_reward_function_that_fails_is_an_error_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(2, without_rewards, tmp_path, init=False, timeout=120):
        assert "no judge today" in text


def on_a_packed_base(folder: Path, base: Path, stages: int) -> list[list[dict[str, float]]]:
    given: dict[str, Any] = {"steps": 2, "lora": True, "dtype": torch.float32, "eval_strategy": "no"}

    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(base, quantization_config=quantisation("nf4"), dtype=torch.float32)

    return [
        prefer(folder / "DPO", stages, model=model(), **given),
        reinforce(folder / "GRPO", stages, model=model(), generation_kwargs=ANY_WORD, learning_rate=1e-4, **given),
    ]


def test_adapters_on_a_base_in_4_bits(pool: Pool, tmp_path: Path) -> None:
    """TRL has them in bfloat16 there."""
    base, split = write_base("llama", tmp_path / "base", **SIZES), tmp_path / "split"
    preferred, reinforced = on_a_packed_base(tmp_path / "plain", base, 0)
    for runs in pool.run(2, on_a_packed_base, split, base, 2, init=False, timeout=180):
        found = differences((runs[0], split / "DPO"), (preferred, tmp_path / "plain/DPO"))
        assert found["loss"] < 1e-3 and found["logps/chosen"] < 1e-2 and found["weights"] < 1e-2
        found = differences((runs[1], split / "GRPO"), (reinforced, tmp_path / "plain/GRPO"))
        assert not {name: value for name, value in found.items() if value > 2e-2}


def loaded_by_stages(folder: Path, base: Path) -> list[dict[str, float]]:
    """Both models come as each rank's own stages; the trainer is not told of `parallelism`."""
    config = {"model_parallelism": TWO}
    with kept_in_double():
        model, other = (penstock.from_pretrained(base, config=config, dtype=torch.float64) for _ in range(2))
        return prefer(folder, 2, steps=2, model=model, reference=other, eval_strategy="no", is_parallelised=True)


def test_model_and_reference_may_be_loaded_by_stages(pool: Pool, tmp_path: Path) -> None:
    FAMILIES["llama"].build(dtype=torch.float64, **SIZES).save_pretrained(base := tmp_path / "base")
    with kept_in_double():
        model, other = (AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64) for _ in range(2))
        plain = prefer(tmp_path / "plain", steps=2, model=model, reference=other, eval_strategy="no")
    for logs in pool.run(2, loaded_by_stages, tmp_path / "split", base, init=False, timeout=180):
        found = differences((logs, tmp_path / "split"), (plain, tmp_path / "plain"))
        assert not {name: value for name, value in found.items() if value > 1e-10}


def words_in(text: str) -> int:
    """Count words.

    Args:
        text: in which.
    """
    return len(text.split())


class Environment:
    def reset(self, **kwargs: Any) -> None:
        pass

    def count(self, text: str) -> int:
        """Count words.

        Args:
            text: in which.
        """
        return words_in(text)


class GRPOTrainer(PipelineGRPOTrainer):
    """A user's class with the name of TRL's, of whose module something is replaced."""


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("DPO", {"args": {"use_liger_kernel": True}}, "use_liger_kernel"),
    ("GRPO", {"args": {"use_transformers_continuous_batching": True}}, "use_transformers_continuous_batching"),
    ("GRPO", {"args": {"use_vllm": True}}, "use_vllm"),
    ("GRPO", {"args": {"cast_lm_head_to_fp32": True}}, "cast_lm_head_to_fp32"),
    ("GRPO", {"args": {"top_entropy_quantile": 0.2}}, "top_entropy_quantile"),
    ("GRPO", {"args": {"entropy_coef": 0.1}}, "entropy_coef"),
    ("GRPO", {"args": {"use_adaptive_entropy": True}}, "use_adaptive_entropy"),
    ("GRPO", {"rollout_func": len}, "rollout_func"),
    ("GRPO", {"tools": [words_in]}, "tools"),
    ("GRPO", {"environment_factory": Environment}, "environment_factory"),
]


@pytest.mark.parametrize(("kind", "given", "named"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_work_is_refused_by_name(tmp_path: Path, kind: str, given: dict[str, Any], named: str) -> None:
    arguments = {**defaults(tmp_path, 1, 1), "eval_strategy": "no", "bf16": False, **given.get("args", {})}
    words = tokenizer()
    words.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen3.jinja").read_text()  # it can call tools
    common: dict[str, Any] = {"processing_class": words, "parallelism": TWO}
    model = FAMILIES["llama"].build(**SIZES)
    with pytest.raises(ValueError, match=rf"{named}.* does not work over pipelines"):
        if kind == "DPO":
            other = FAMILIES["llama"].build(**SIZES)
            options: Any = DPOConfig(**arguments)
            PipelineDPOTrainer(model, ref_model=other, args=options, train_dataset=pairs(8, 1), **common)
        else:
            options = GRPOConfig(**arguments, num_generations=2)
            further = {name: value for name, value in given.items() if name != "args"}
            GRPOTrainer(model, reward_funcs=len, args=options, train_dataset=prompts(8, 1), **common, **further)


IMAGES: dict[str, tuple[Any, Any, str, dict[str, Any]]] = {
    "DPOTrainer with images": (PipelineDPOTrainer, DPOConfig, "chosen rejected", {}),
    "KTOTrainer with images": (PipelineKTOTrainer, KTOConfig, "completion label", {}),
    "GRPOTrainer with a processor of images": (PipelineGRPOTrainer, GRPOConfig, "answer", {"reward_funcs": len}),
}


@pytest.mark.parametrize("named", IMAGES)
def test_images_are_refused_by_name(tmp_path: Path, named: str) -> None:
    """TRL asks for a processor, and does not look at the model."""
    kind, arguments, columns, further = IMAGES[named]
    options = arguments(**defaults(tmp_path, 1, 1) | {"eval_strategy": "no", "bf16": False})
    data = Dataset.from_list([dict.fromkeys(("prompt", "image", *columns.split()), " w1")] * 8)
    processor = LlavaProcessor(CLIPImageProcessor(), tokenizer(), patch_size=8)
    common = {"args": options, "train_dataset": data, "processing_class": processor, "parallelism": TWO}
    with pytest.raises(ValueError, match=rf"{named} does not work over pipelines: \w+"):
        kind(FAMILIES["llama"].build(**SIZES), **common, **further)


def in_chunks(folder: Path) -> str:
    with pytest.raises(ValueError, match="loss_chunk_tokens with DPOTrainer does not work over pipelines") as refused:
        prefer(folder, 2, parallelism={"loss_chunk_tokens": 8})
    return str(refused.value)


def test_logits_in_chunks_are_refused_with_a_reason(pool: Pool, tmp_path: Path) -> None:
    """They are made in parts as it is, and only a cross-entropy may take those of `loss_chunk_tokens`."""
    assert all("leave it out" in text for text in pool.run(2, in_chunks, tmp_path, init=False))


def test_outputs_of_uneven_microbatches_are_joined_in_all_fields_and_weighted_as_they_were_trained() -> None:
    chosen, rejected = torch.arange(10.0).view(2, 5, 1)
    parts = [torch.cat([half[start:stop] for half in (chosen, rejected)]) for start, stop in ((0, 3), (3, 5))]
    outputs = [
        {"logits": part, "hidden_states": (part, 2 * part), "aux_loss": torch.tensor(float(number))}
        for number, part in enumerate(parts)
    ]
    outputs[1]["later"] = parts[1]
    found = join_outputs(outputs, [0.6, 0.4], join_pairs)
    whole = torch.cat([chosen, rejected])
    assert torch.equal(found["logits"], whole) and float(found["aux_loss"]) == pytest.approx(0.4)
    assert [torch.equal(found["hidden_states"][0], whole), torch.equal(found["hidden_states"][1], 2 * whole)] == [
        True
    ] * 2
    assert torch.equal(found["later"], parts[1])


def logged_and_trained(folder: Path) -> list[tuple[float, float]]:
    """The routers' loss as it is logged, and as it is in the loss of the first step, over microbatches of
    different sizes."""
    found = []
    for script in (prefer, reinforce):
        uneven = {"per_device_train_batch_size": 5 if script is prefer else 6, "parallelism": {"microbatch_size": 4}}
        logs = [
            script(folder, 2, steps=1, family="mixtral", router_aux_loss_coef=weight, eval_strategy="no", **uneven)[0]
            for weight in (0.25, 0.5)
        ]
        found.append((logs[0]["aux_loss"], (logs[1]["loss"] - logs[0]["loss"]) / 0.25))
    return found


def test_the_loss_of_routers_is_logged_as_it_is_trained(pool: Pool, tmp_path: Path) -> None:
    for (logged, trained), (logged_grpo, trained_grpo) in pool.run(2, logged_and_trained, tmp_path, init=False):
        assert trained == pytest.approx(logged, rel=1e-5)
        assert trained_grpo == pytest.approx(logged_grpo, rel=1e-5)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"outputs": ("log_probs", "top_k")}, "top_k"), ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32")],
)
def test_what_the_fused_head_does_not_know_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"{named}.* does not work over pipelines"):
        add_fused_head(FAMILIES["llama"].build(**SIZES), **given)


class Gathering:
    """As much of a trainer as its loss needs, which depends on what it gathers."""

    accelerator = None

    def compute_loss_below(self, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        logits = model()["logits"]
        gathered: torch.Tensor = self.accelerator.gather(logits)  # type: ignore[attr-defined]  # put there by `OwnLoss`
        return (logits - gathered.clamp(min=0)).mean()


def test_a_loss_that_needs_what_other_ranks_have_is_refused_on_whatever_device_the_model_is() -> None:
    """The meta device stands for a GPU, on which what is gathered is not."""
    trainer: Any = Gathering()
    adapter = OwnLoss(trainer, DPOTrainer)
    summed = adapter.loss_of_microbatch({"logits": torch.ones(3)}, {}, {})
    for fails in (
        lambda: adapter.check(torch.tensor(1.0), summed),
        lambda: adapter.loss_of_microbatch({"logits": torch.ones(3, device="meta")}, {}, {}),
    ):
        with pytest.raises(ValueError, match="its loss depends on what it gathers from other processes"):
            fails()


class Failing(Gathering):
    """Its loss logs what it gathers, and has a fault that has nothing to do with it."""

    def compute_loss_below(self, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        logits = model()["logits"]
        self.accelerator.gather(logits.detach())  # type: ignore[attr-defined]  # put there by `OwnLoss`
        return logits @ torch.ones(len(logits) + 1, device=logits.device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_fault_in_a_loss_that_gathers_figures_is_told_as_it_is(device: str) -> None:
    trainer: Any = Failing()
    with pytest.raises(RuntimeError, match=r"size|shape") as failed:
        OwnLoss(trainer, DPOTrainer).loss_of_microbatch({"logits": torch.ones(3, device=device)}, {}, {})
    assert "gathers" not in str(failed.value)


def test_a_mean_that_has_nothing_in_a_microbatch_adds_nothing_to_the_loss() -> None:
    class TwoMeans(OwnLoss):
        def __init__(self) -> None:
            """Without a trainer: only the sum of the terms is looked at."""

        def terms(self) -> Sequence[Term]:
            return [Term(None, {"kept": 0}), Term(None, {"kept": 2})]

        def loss_of_microbatch(
            self, outputs: Any, microbatch: Mapping[str, Any], changes: Mapping[str, Any]
        ) -> torch.Tensor:
            return outputs["logits"][: changes["kept"]].mean()

    logits = torch.ones(4, requires_grad=True)
    loss = TwoMeans().share_of_loss({"logits": logits}, {BATCH: {}, SHARES: [0.0, 0.5]})
    loss.backward()
    assert loss.item() == 0.5
    assert logits.grad is not None and logits.grad.tolist() == [0.25, 0.25, 0.0, 0.0]
