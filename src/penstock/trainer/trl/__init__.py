"""An adapter for each trainer of TRL. Imports nothing of TRL: a class is known by its module and name."""
