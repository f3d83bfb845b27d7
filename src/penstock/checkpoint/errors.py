"""The error of this package."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message names the file and the rank."""
