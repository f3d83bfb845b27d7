"""The benchmark's models; see `kinds.models`."""

from kinds.configs import (
    GPT1TConfig,
    GPT13BConfig,
    GPT175BConfig,
    GPTConfig,
    GPTLargeConfig,
    GPTMediumConfig,
    GPTSmallConfig,
    GPTTinyConfig,
    GPTXLConfig,
    GPTXXLConfig,
    GPTXXXLConfig,
    ResNetSize,
)
from kinds.models import GPT, ShardedGPT, resnet, sequential_gpt, sharded_resnet

__all__ = [
    "GPT",
    "GPT1TConfig",
    "GPT13BConfig",
    "GPT175BConfig",
    "GPTConfig",
    "GPTLargeConfig",
    "GPTMediumConfig",
    "GPTSmallConfig",
    "GPTTinyConfig",
    "GPTXLConfig",
    "GPTXXLConfig",
    "GPTXXXLConfig",
    "ResNetSize",
    "ShardedGPT",
    "resnet",
    "sequential_gpt",
    "sharded_resnet",
]
