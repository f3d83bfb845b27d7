"""TRL's SFTTrainer with and without pipelines: the same script must give the same run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Trainer
from trl.trainer.utils import add_fused_lm_head

from penstock.data.packed import cut_packed, is_packed
from penstock.runtime.options import EngineOptions
from penstock.trainer.trainer_adapter import TrainerAdapter
from penstock.trainer.trl.sft import following_labels, token_sums
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.trainer_runs import differences, fine_tune, train_all
from tests.support.training import kept_in_double, parallelize, run_step

TOLERANCE = 1e-8  # double precision, but TRL divides its counts in single
SMALL: dict[str, Any] = {"eval_steps": 2, "settings": {"num_hidden_layers": 2}}
CASES: dict[str, dict[str, Any]] = {
    "adapters": {"packing": False, "lora": True, **SMALL},
    "packed, in chunks": {"packing": True, "eval_packing": True, "parallelism": {"loss_chunk_tokens": 7}, **SMALL},
    "packed adapters": {"packing": True, "lora": True, **SMALL},
    "smoothing": {"packing": False, "label_smoothing_factor": 0.1, **SMALL},
}
LOGGED = {"loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens", "weights"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "cases"),
    [(2, ["adapters", "packed, in chunks", "smoothing"]), (1, ["packed adapters", "smoothing"])],
    ids=["stages", "pipelines"],
)
def test_fine_tuning_is_the_same_with_and_without_pipelines(
    pool: Pool, tmp_path: Path, stages: int, cases: list[str]
) -> None:
    """Several pipelines are held to as many processes of the plain trainer."""
    chosen, pipelines = {case: CASES[case] for case in cases}, 2 // stages
    given = pipelines, 4, chosen
    plain = pool.run(pipelines, train_all, tmp_path / "plain", 0, *given, init=False, timeout=240)[0]
    for run in pool.run(2, train_all, tmp_path, stages, *given, init=False, timeout=240):
        for case in cases:
            assert ["loss" in entry for entry in plain[case]] == [True, True, False] * 2
            found = differences((run[case], tmp_path / case), (plain[case], tmp_path / "plain" / case))
            assert LOGGED | {"eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens"} <= found.keys()
            # The Trainer adds up what it logs of losses in single precision, and transformers' smoother its labels.
            rough = [] if case != "smoothing" else [*found]
            assert not {n: v for n, v in found.items() if v > (1e-6 if n in ("loss", *rough) else TOLERANCE)}, case
    if stages > 1:
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "packed, in chunks/final")
        PeftModel.from_pretrained(whole, tmp_path / "adapters/final")


def test_a_mixture_of_experts_is_weighed_as_trl_weighs_it(pool: Pool, tmp_path: Path) -> None:
    """Over one microbatch, as a router's loss depends on which samples are together."""
    case: dict[str, Any] = {"packing": False, "family": "mixtral", "parallelism": {"num_microbatches": 1}, **SMALL}
    given = 1, 2, {"experts": {**case, "warmup_steps": 0, "router_aux_loss_coef": 0.3}}
    plain = train_all(tmp_path / "plain", 0, *given)["experts"]
    for run in pool.run(2, train_all, tmp_path, 2, *given, init=False, timeout=120):
        found = differences((run["experts"], tmp_path / "experts"), (plain, tmp_path / "plain/experts"))
        assert LOGGED | {"eval_loss", "aux_loss", "eval_aux_loss"} <= found.keys()
        assert not {name: value for name, value in found.items() if value > 1e-6}  # routers' softmax is in single


def test_the_entropy_and_the_right_tokens_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.trainer.trl.sft.PART", 200)  # 4 tokens
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 50, generator=generator)
    logits[..., 5] = -torch.inf
    labels = torch.randint(6, 50, (3, 7), generator=generator)
    labels[0, :4] = -100
    for sample, token in ((0, 4), (2, 2)):
        logits[sample, token - 1, labels[sample, token]] = 50.0
    entropy, right, count = token_sums(logits, following_labels({"labels": labels})).tolist()
    kept = (labels[:, 1:] != -100).nonzero().tolist()
    alone = [torch.distributions.Categorical(logits=logits[i, j].double()).entropy() for i, j in kept]
    assert count == len(kept) == 15 and right == 2
    assert entropy == pytest.approx(float(sum(alone)), rel=1e-5)


def test_a_packed_row_is_cut_between_its_sequences() -> None:
    lengths = [3, 5, 1, 4, 2]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = torch.arange(15)[None]
    edges = torch.tensor([0, 3, 8, 9, 13, 15], dtype=torch.int32)
    number = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))[None]
    row = {"input_ids": ids, "labels": ids, "position_ids": positions, "cu_seq_lens_q": edges, "max_length_q": 5}
    assert is_packed(row) and not is_packed({**row, "attention_mask": torch.ones_like(ids)})
    for count in (1, 2, 3, 5, 9):
        pieces = cut_packed({**row, "seq_idx": number}, count).microbatches
        assert len(pieces) == (count if count < 5 else 5)
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(torch.cat([piece[name] for piece in pieces], 1), row[name])
        for piece in pieces:
            assert int(piece["position_ids"][0, 0]) == 0 and int(piece["seq_idx"][0, 0]) == 0
            starts = (piece["position_ids"][0] == 0).nonzero().flatten().tolist()
            assert piece["cu_seq_lens_q"].tolist() == [*starts, piece["input_ids"].shape[1]]
            assert piece["max_length_q"] == 5
    sizes = [piece["input_ids"].shape[1] for piece in cut_packed(row, 2).microbatches]
    assert sizes == [8, 7]


@pytest.mark.parametrize(
    ("options", "pieces"),
    [({}, 8), ({"num_microbatches": 2}, 2), ({"microbatch_size": 1}, 6), ({"microbatch_size": 4}, 2)],
)
def test_a_packed_row_has_as_many_microbatches_as_its_samples_would(options: dict[str, int], pieces: int) -> None:
    """Six samples of a batch were packed into one row; two ranks have eight microbatches by default."""
    place = SimpleNamespace(pipeline=SimpleNamespace(num_ranks=2), replica=0)
    engine = SimpleNamespace(options=EngineOptions(**options), context=place)
    trainer: Any = SimpleNamespace(
        model=torch.nn.Linear(1, 1), model_accepts_loss_kwargs=False, pipelines=SimpleNamespace(engine=engine),
        args=SimpleNamespace(per_device_train_batch_size=6),
    )  # fmt: skip
    positions = torch.arange(2).repeat(12)[None]
    row = {"input_ids": positions, "labels": positions, "position_ids": positions}
    cut = TrainerAdapter(trainer, Trainer).step_inputs(row, None)
    assert [len(cut[name]) for name in row] == [pieces] * 3


def fused() -> list[str]:
    """What training says to TRL's fused head, called by hand."""
    model = FAMILIES["llama"].build()
    add_fused_lm_head(model)
    model = parallelize(model, 2)
    with pytest.raises(NotImplementedError) as refused:
        model(**batch("causal", 4), fused_lm_head=True)
    losses = run_step(model, batch("causal", 4))
    return [str(refused.value), f"{sum(losses):.9f}"]


def test_the_fused_head_is_refused_with_what_to_write_instead(pool: Pool) -> None:
    """The SFTTrainer's own runs go without it: `test_fine_tuning_is_the_same_with_and_without_pipelines`."""
    with kept_in_double():
        expected = FAMILIES["llama"].build()(**batch("causal", 4)).loss
    for text, loss in pool.run(2, fused):
        assert 'Leave fused_lm_head out, and write "loss_chunk_tokens": 1024' in text
        assert float(loss) == pytest.approx(float(expected), abs=1e-6)


def offloading(folder: Path) -> str:
    with pytest.raises(ValueError, match="does not work over pipelines") as refused:
        fine_tune(folder, packing=False, stages=2, activation_offloading=True)
    return str(refused.value)


def test_offloading_of_activations_is_refused_with_what_to_do_instead(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(2, offloading, tmp_path, init=False):
        assert "activation_offloading" in text and "torch.autograd.graph.save_on_cpu() around train()" in text
