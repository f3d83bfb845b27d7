"""Adapters for trainers of TRL. Importing them does not import TRL: a class is known by its module and name."""
