"""Folders that stand for a model hub: a script run beside them finds a model called "gpt2" and texts called "squad"."""

import json
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from corpus import END_OF_TEXT, read_texts, train_tokenizer


def local_hub(folder: Path, num_layers: int = 4, num_lines: int = 404) -> GPT2LMHeadModel:
    """Make a tiny GPT-2 with its tokenizer in `folder`/gpt2 and lines of text in `folder`/squad."""
    texts = read_texts(None, 60_000)
    tokenizer = train_tokenizer(texts, 400)
    tokenizer.save_pretrained(folder / "gpt2")
    torch.manual_seed(0)
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    config = GPT2Config(
        vocab_size=400, n_positions=64, n_embd=32, n_layer=num_layers, n_head=2, bos_token_id=end, eos_token_id=end
    )
    model = GPT2LMHeadModel(config)
    model.save_pretrained(folder / "gpt2")
    contexts = [line for text in texts for line in text.splitlines() if len(line) > 20][:num_lines]
    (folder / "squad").mkdir()
    rows = [json.dumps({"context": context}) for context in contexts]
    (folder / "squad" / "train.jsonl").write_text("\n".join(rows))
    return model
