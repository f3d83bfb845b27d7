"""generate() over the stages of a pipeline."""

from penstock.generation.generate import generate

__all__ = ["generate"]
