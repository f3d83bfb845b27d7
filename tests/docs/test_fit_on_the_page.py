"""The example of docs/qlora.md is what the command prints."""

from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig
from typer.testing import CliRunner

from penstock.cli import app
from tests.docs.test_docs import blocks_of
from tests.support.launch import ROOT

QWEN3_30B_A3B = Qwen3MoeConfig(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
    norm_topk_prob=True, max_position_embeddings=40960, architectures=["Qwen3MoeForCausalLM"],
)  # fmt: skip


@pytest.mark.slow
def test_the_blocks_are_what_fit_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, *shown = [one for one in blocks_of(ROOT / "docs/qlora.md") if one.heading.startswith("Does it fit?")]
    QWEN3_30B_A3B.save_pretrained(tmp_path / "qwen3-30b-a3b")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command.text.split()[2:], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    printed = [line.rstrip() for line in result.output.splitlines()]
    verdict, configuration = (block.text.rstrip().splitlines() for block in shown)
    assert all(line in printed for line in verdict)
    assert printed[-len(configuration) :] == configuration
