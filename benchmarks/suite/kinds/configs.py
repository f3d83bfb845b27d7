"""The sizes of the benchmark's models, by name."""

from __future__ import annotations

import difflib
import re
from typing import Any, ClassVar

from transformers import GPT2Config, ResNetConfig

SIZES = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "tie_embeddings")


class GPTConfig:
    """The size of a GPT. Subclasses name sizes as class attributes; keyword arguments override them.

    Args:
        vocab_size: tokens in the vocabulary, by default GPT-2's 50257.
        block_size: tokens in a sequence, by default GPT-3's 2048.
        sizes: `n_layer`, `n_head`, `n_embd`, `tie_embeddings`.

    Raises:
        TypeError: an unknown size. ValueError: a size that is no positive integer, or heads that do not divide the
        width.
    """

    vocab_size: int = 50257
    block_size: int = 2048
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    # The output layer is the transposed token embedding, as in GPT-2 and GPT-3.
    tie_embeddings: bool = True

    def __init__(self, vocab_size: int | None = None, block_size: int | None = None, **sizes: Any) -> None:
        given = {"vocab_size": vocab_size, "block_size": block_size}
        sizes |= {name: value for name, value in given.items() if value is not None}
        for name, value in sizes.items():
            if name not in SIZES:
                raise TypeError(f"{type(self).__name__} has no size {name!r}: known are {', '.join(SIZES)}")
            setattr(self, name, value)
        for name in SIZES[:-1]:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, but is {value!r}")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_head ({self.n_head}) must divide n_embd ({self.n_embd}): {self._fitting_heads()} heads would do"
            )

    def _fitting_heads(self) -> str:
        near = sorted(
            (heads for heads in range(1, self.n_embd + 1) if self.n_embd % heads == 0),
            key=lambda heads: abs(heads - self.n_head),
        )
        return " or ".join(map(str, sorted(near[:2])))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={value}" for name, value in self.sizes().items())
        return f"{type(self).__name__}({sizes})"

    def sizes(self) -> dict[str, int | bool]:
        """Every size by name."""
        return {name: getattr(self, name) for name in SIZES}

    @property
    def num_parameters(self) -> int:
        """Logical parameters, in closed form: per block 12 h^2 + 13 h, embeddings (V + s) h, final norm 2 h."""
        width = self.n_embd
        blocks = self.n_layer * (12 * width * width + 13 * width)
        heads = (1 if self.tie_embeddings else 2) * self.vocab_size * width
        return blocks + heads + self.block_size * width + 2 * width

    def to_transformers(self) -> GPT2Config:
        """The same sizes as transformers names them, without dropout, so that every mode computes the same."""
        return GPT2Config(
            vocab_size=self.vocab_size,
            n_positions=self.block_size,
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            # GPT-2's approximate GELU as one kernel; "gelu_new" is the same function in seven.
            activation_function="gelu_pytorch_tanh",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=self.tie_embeddings,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )


class GPTTinyConfig(GPTConfig):
    """For a CPU: under a million parameters, short sequences."""

    vocab_size, block_size = 1024, 128
    n_layer, n_head, n_embd = 4, 4, 128


class GPTSmallConfig(GPTConfig):
    """GPT3-small like network, roughly 125M parameters."""

    n_layer, n_head, n_embd = 12, 12, 768


class GPTMediumConfig(GPTConfig):
    """GPT3-medium like network, roughly 350M parameters."""

    n_layer, n_head, n_embd = 24, 16, 1024


class GPTLargeConfig(GPTConfig):
    """GPT3-large like network, roughly 760M parameters."""

    n_layer, n_head, n_embd = 24, 16, 1536


class GPTXLConfig(GPTConfig):
    """GPT3-XL like network, roughly 1.3B parameters. 16 heads: the 24 of the paper's table do not divide 2048."""

    n_layer, n_head, n_embd = 24, 16, 2048


class GPTXXLConfig(GPTConfig):
    """GPT3-XXL like network, roughly 2.7B parameters."""

    n_layer, n_head, n_embd = 32, 32, 2560


class GPTXXXLConfig(GPTConfig):
    """GPT3-XXXL like network, roughly 6.7B parameters."""

    n_layer, n_head, n_embd = 32, 32, 4096


class GPT13BConfig(GPTConfig):
    """GPT3-13B like network."""

    n_layer, n_head, n_embd = 40, 40, 5120


class GPT175BConfig(GPTConfig):
    """GPT3 like network, roughly 175B parameters."""

    n_layer, n_head, n_embd = 96, 96, 12288


class GPT1TConfig(GPTConfig):
    """Megatron's 1T parameter GPT (Narayanan et al. 2021, SC21, table 1)."""

    n_layer, n_head, n_embd = 128, 160, 25600


class ResNetSize:
    """The size of a ResNet (He et al. 2016, table 1): bottleneck blocks from 50 layers on.

    Args:
        depth: 18, 34, 50, 101 or 152.
        image_size: pixels on each side of a square image.
        num_classes: labels.
    """

    BLOCKS: ClassVar = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}

    def __init__(self, depth: int, image_size: int = 224, num_classes: int = 1000) -> None:
        self.depth, self.image_size, self.num_classes = depth, image_size, num_classes

    def __repr__(self) -> str:
        return f"ResNet{self.depth}(image_size={self.image_size})"

    def sizes(self) -> dict[str, int]:
        """Every size by name."""
        return {"depth": self.depth, "image_size": self.image_size, "num_classes": self.num_classes}

    def to_transformers(self) -> ResNetConfig:
        """The same sizes as transformers names them."""
        bottleneck = self.depth >= 50
        return ResNetConfig(
            layer_type="bottleneck" if bottleneck else "basic",
            depths=list(self.BLOCKS[self.depth]),
            hidden_sizes=[256, 512, 1024, 2048] if bottleneck else [64, 128, 256, 512],
            num_labels=self.num_classes,
        )


ModelConfig = GPTConfig | ResNetSize

# The sizes above, by name.
GPT_CONFIGS: dict[str, type[GPTConfig]] = {
    size.__name__.removesuffix("Config"): size for size in GPTConfig.__subclasses__()
}
MODEL_NAMES = (*GPT_CONFIGS, *(f"ResNet{depth}" for depth in ResNetSize.BLOCKS))


def canonical_name(name: str) -> str:
    """A model's name as in MODEL_NAMES, from any spelling: `GPTSmallConfig`, `gpt-small`, `small`, `resnet50`.

    Raises:
        ValueError: unknown; names all that are known and the nearest.
    """
    plain = re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("config")
    spellings = {known.lower(): known for known in MODEL_NAMES}
    spellings |= {known.lower().removeprefix("gpt"): known for known in GPT_CONFIGS}
    if plain in spellings:
        return spellings[plain]
    close = difflib.get_close_matches(plain, spellings, n=1)
    hint = f"; did you mean {spellings[close[0]]}?" if close else ""
    raise ValueError(f"unknown model {name!r}: known are {', '.join(MODEL_NAMES)}{hint}")


def is_resnet(name: str) -> bool:
    """Whether a canonical name is a ResNet's."""
    return name.startswith("ResNet")
