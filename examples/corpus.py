"""Real text without a download: Python's own standard library, and a byte-level BPE tokenizer trained on it."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def read_texts(source: str | None, limit: int) -> list[str]:
    """The documents of ``source``, in a fixed order, until about ``limit`` characters.

    Args:
        source: None for the standard library's .py files; a text file; a folder, whose files are read if they are
            text; or else the name of a dataset for ``datasets.load_dataset`` with a column "text" or "content".

    Raises:
        ValueError: there is no text in the source.
    """
    if source is None:
        documents = _files(Path(sysconfig.get_paths()["stdlib"]), "*.py")
    elif Path(source).is_file():
        documents = iter([Path(source).read_text(errors="replace")])
    elif Path(source).is_dir():
        documents = _files(Path(source), "*")
    else:
        documents = _dataset(source)
    texts: list[str] = []
    length = 0
    for text in documents:
        texts.append(text[: limit - length])
        length += len(texts[-1])
        if length >= limit:
            break
    if not length:
        raise ValueError(f"no text in {source or 'the standard library'}")
    return texts


def _files(folder: Path, pattern: str) -> Iterator[str]:
    unwanted = {"site-packages", "test", "tests", "encodings", "pydoc_data", "__pycache__", ".git"}
    for path in sorted(folder.iterdir()):
        if path.name in unwanted:
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _files(path, pattern)
        elif path.is_file() and path.match(pattern):
            try:
                yield path.read_text()
            except UnicodeDecodeError:
                continue  # no text


def _dataset(name: str) -> Iterator[str]:
    from datasets import load_dataset

    dataset = load_dataset(name, split="train", streaming=True)
    for row in dataset:
        column = next((column for column in ("text", "content") if column in row), None)
        if column is None:
            raise ValueError(f'dataset {name} has no column "text" or "content", but {", ".join(row)}')
        yield row[column]


def train_tokenizer(texts: list[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer as GPT-2's. Equal texts give equal tokenizers, so every rank may train its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def token_blocks(tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int) -> torch.Tensor:
    """All texts, each followed by the end-of-text token, split into rows: [rows, length], the rest dropped."""
    tokens = [token for ids in tokenizer(texts)["input_ids"] for token in [*ids, tokenizer.eos_token_id]]
    num_rows = len(tokens) // length
    return torch.tensor(tokens[: num_rows * length]).view(num_rows, length)
