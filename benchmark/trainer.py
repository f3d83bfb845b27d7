"""The benchmark's entry point for torchrun; see `penstock.benchmark.trainer`, or `--help`."""

from penstock.benchmark.trainer import run

if __name__ == "__main__":
    run()
