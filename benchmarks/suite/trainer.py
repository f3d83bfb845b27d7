"""The benchmark's entry point for torchrun; see `kinds.trainer`, or `--help`."""

from kinds.trainer import run

if __name__ == "__main__":
    run()
