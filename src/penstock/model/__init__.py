"""The parallelised model that a user holds."""
