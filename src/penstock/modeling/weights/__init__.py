"""Weights of the stages held here: their names, made at random, or loaded from a checkpoint."""
