"""Weights in a few bits a number: layers and stacks of experts that libraries keep packed."""
