"""Saving and loading models, and the training around them, from all ranks of any layout."""
