"""TRL's SFTTrainer with and without pipelines: the same script must give the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from penstock.data.packed import cut_packed, is_packed
from penstock.integrations.transformers import PipelineTrainerMixin
from pool import Pool

TOLERANCE = 1e-5  # single precision; TRL's loss is computed in tiles, the model's own at once


class PipelineSFTTrainer(PipelineTrainerMixin, SFTTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *(f"w{n}" for n in range(60))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def texts(count: int) -> Dataset:
    """Sentences of very different lengths: a mean over samples, or over pipelines, would not do."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 14, (count,), generator=generator).tolist()
    words = [torch.randint(60, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_list([{"text": " ".join(f"w{word}" for word in row)} for row in words])


def fine_tune(folder: Path, stages: int, packing: bool, lora: bool, accumulation: int = 2) -> list[dict[str, float]]:
    AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 62, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64))
    kind: Any = PipelineSFTTrainer if stages else SFTTrainer
    options = SFTConfig(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-2,
        adam_epsilon=1e-3,  # gradients of nothing but rounding make no steps
        logging_steps=1,
        max_length=16,
        packing=packing,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = kind(
        model,
        options,
        train_dataset=texts(80),
        eval_dataset=texts(12),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]) if lora else None,
        **({"parallelism": {"pipeline_parallel_size": stages}} if stages else {}),
    )
    trainer.train()
    trainer.evaluate()
    trainer.save_model(str(folder / "final"))
    return [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]


CASES = [(False, True), (True, False), (True, True)]


def fine_tune_all(folder: Path, stages: int) -> list[list[dict[str, float]]]:
    return [
        fine_tune(folder / f"{packing}-{lora}", stages, packing, lora, 1 if stages == 1 else 2)
        for packing, lora in (CASES if stages != 1 else CASES[-1:])
    ]


@pytest.mark.parametrize("stages", [2, 1], ids=["stages", "pipelines"])
def test_fine_tuning_is_the_same_with_and_without_pipelines(pool: Pool, tmp_path: Path, stages: int) -> None:
    cases = CASES if stages > 1 else CASES[-1:]
    plain = [fine_tune(tmp_path / f"plain-{packing}-{lora}", 0, packing, lora) for packing, lora in cases]
    for run in pool.run(2, fine_tune_all, tmp_path, stages, init=False, timeout=240):
        for mine, theirs in zip(run, plain, strict=True):
            assert len(mine) == len(theirs) == 5
            for found, expected in zip(mine, theirs, strict=True):
                for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
                    if name in expected and not (name == "eval_loss" and stages == 1):  # its batches are others there
                        assert found[name] == pytest.approx(expected[name], abs=TOLERANCE), (found, expected)
    for packing, lora in cases:
        name = "adapter_model.safetensors" if lora else "model.safetensors"
        folders = [tmp_path / f"{prefix}{packing}-{lora}" / "final" for prefix in ("", "plain-")]
        mine, theirs = (load_file(folder / name) for folder in folders)
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            torch.testing.assert_close(value, theirs[key], atol=TOLERANCE, rtol=0)
    if stages > 1:
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "True-False/final")
        PeftModel.from_pretrained(whole, tmp_path / "True-True/final")


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
