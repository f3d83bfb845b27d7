"""The benchmark's entry point for torchrun; see `penstock.bench.trainer`, or `--help`."""

from penstock.bench.trainer import run

if __name__ == "__main__":
    run()
