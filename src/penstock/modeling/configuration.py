"""A model's configuration, where it has one of transformers'."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


def configuration_of(model: Any) -> PretrainedConfig | None:
    """The configuration of a model of transformers. What other models call `config` is theirs: a dictionary, a text, an
    object that raises when it is asked for what it lacks."""
    config = getattr(model, "config", None)
    return config if isinstance(config, PretrainedConfig) else None
