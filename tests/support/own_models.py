"""Models of a user's own, which transformers does not know: what they return, and how their loss is found, differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import GPT2Config, GPT2Model

VOCABULARY, WIDTH, CLASSES = 23, 16, 5


@dataclass
class Shape:
    """A configuration as nanoGPT has it, which is none of transformers'."""

    layers: int = 4
    dropout: float = 0.0


class Block(nn.Module):
    """A transformer block whose layers are a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.register_buffer("mask", torch.triu(torch.ones(64, 64, dtype=torch.bool), 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        mask = self.mask[: x.shape[1], : x.shape[1]]
        x = x + self.attention(hidden, hidden, hidden, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class GPT(nn.Module):
    """Returns (logits, loss), the loss None without targets; embedding and head are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Shape()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(32, WIDTH),
                "drop": nn.Dropout(self.config.dropout),
                "h": nn.ModuleList(Block() for _ in range(self.config.layers)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        _, length = idx.shape
        positions = torch.arange(length, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx: torch.Tensor, tokens: int) -> torch.Tensor:
        """Greedy, as nanoGPT writes it."""
        for _ in range(tokens):
            logits, _ = self(idx)
            idx = torch.cat([idx, logits[:, -1].argmax(-1, keepdim=True)], 1)
        return idx


def layer(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = layer(inputs, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1), nn.GroupNorm(2, outputs))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.second(self.first(x)) + self.shortcut(x))


class Level(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 2, 2), nn.ReLU())
        self.blocks = nn.Sequential(*(Residual(outputs, outputs) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.downsample(x))


class ConvNet(nn.Module):
    """A stem, levels of blocks, a head, as timm's are; returns logits. Batch normalisation, pooling, in-place ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = layer(3, 4)
        self.stages = nn.Sequential(Level(4, 6), Level(6, 8))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.stages(self.stem(x))))


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, CLASSES)
    )


@dataclass
class Answer:
    """What `Regression` returns."""

    values: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    loss: torch.Tensor | None = None


class Regression(nn.Module):
    """Returns a dataclass, one of whose fields has a name that dictionaries use. Keeps a list of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        hidden = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            hidden.append(x)
        return self.answer(x, tuple(hidden), None if y is None else functional.mse_loss(x, y))

    def answer(self, x: torch.Tensor, hidden: tuple[torch.Tensor, ...], loss: torch.Tensor | None) -> Any:
        return Answer(x, hidden, loss)


class Pair(NamedTuple):
    loss: torch.Tensor | None
    values: torch.Tensor


class NamedRegression(Regression):
    def answer(self, x: torch.Tensor, hidden: tuple[torch.Tensor, ...], loss: torch.Tensor | None) -> Any:
        return Pair(loss, x)


class MappedRegression(Regression):
    def answer(self, x: torch.Tensor, hidden: tuple[torch.Tensor, ...], loss: torch.Tensor | None) -> Any:
        return {"loss": loss, "values": x, "inner": {"hidden": hidden}}


class BareLoss(Regression):
    """Its forward returns the loss and nothing else."""

    def answer(self, x: torch.Tensor, hidden: tuple[torch.Tensor, ...], loss: torch.Tensor | None) -> Any:
        return loss


class Wrapped(nn.Module):
    """A model of transformers with a head of one's own."""

    def __init__(self) -> None:
        super().__init__()
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(n_layer=3, n_embd=WIDTH, n_head=2, vocab_size=VOCABULARY, n_positions=32, **quiet)
        self.backbone = GPT2Model(config)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.backbone(input_ids, use_cache=False).last_hidden_state.mean(1))
        return functional.cross_entropy(logits, labels), logits


def classified(outputs: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
    return functional.cross_entropy(outputs, inputs["target"])


def summed(outputs: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
    return functional.cross_entropy(outputs, inputs["target"], reduction="sum")


@dataclass(frozen=True)
class OwnModel:
    """A model, how it is called, and what gives its loss, if not itself. `per_microbatch`: it depends on which samples
    are in one microbatch."""

    make: Callable[[], nn.Module]
    criterion: Callable[[Any, Mapping[str, Any]], torch.Tensor] | None = None
    per_microbatch: bool = False

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().double()

    def inputs(self, size: int = 6) -> dict[str, torch.Tensor]:
        """A batch; of the tokens in it, some do not count."""
        random = torch.Generator().manual_seed(1)
        classes = torch.randint(0, CLASSES, (size,), generator=random)
        if self.make is GPT:
            tokens = torch.randint(0, VOCABULARY, (size, 9), generator=random)
            targets = tokens[:, 1:].clone()
            targets[0, 2:] = -1
            return {"idx": tokens[:, :-1], "targets": targets}
        if self.make is ConvNet:
            return {"x": torch.randn(size, 3, 8, 8, generator=random, dtype=torch.float64), "target": classes}
        if self.make is mlp:
            return {"input": torch.randn(size, 6, generator=random, dtype=torch.float64), "target": classes}
        if self.make is Wrapped:
            return {"input_ids": torch.randint(0, VOCABULARY, (size, 7), generator=random), "labels": classes}
        x, y = torch.randn(2, size, 6, generator=random, dtype=torch.float64)
        return {"x": x, "y": y}

    def call(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """The unsplit model's output."""
        return model(**{name: value for name, value in inputs.items() if self.criterion is None or name != "target"})


OWN_MODELS = {
    "gpt": OwnModel(GPT),
    "convnet": OwnModel(ConvNet, classified, per_microbatch=True),
    "sequential": OwnModel(mlp, classified),
    "sequential, summed": OwnModel(mlp, summed),
    "dataclass": OwnModel(Regression),
    "named tuple": OwnModel(NamedRegression),
    "dictionary": OwnModel(MappedRegression),
    "loss alone": OwnModel(BareLoss),
    "around transformers": OwnModel(Wrapped),
}
