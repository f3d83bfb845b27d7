"""On each rank of a pipeline: one class of transformers against itself unsplit; see `coverage.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tiny_diffusion import build_diffusion, to_a_constant
from tiny_models import build_running

from penstock.checking.compare import ACCUMULATED, DIFFERS, EXACT, FAILED, NOT_TRIED, REFUSED, Comparison, Row
from penstock.checking.double import kept_in_double
from penstock.config.configuration import Configuration

NUM_MICROBATCHES = 4
GENERATIVE = ("causal-lm", "seq2seq-lm", "speech-seq2seq", "image-text", "image-text with images")
DIFFUSION = "diffusion"  # a task of diffusers' classes
# The page's words, from good to bad.
WORDS = {
    EXACT: "exact",
    ACCUMULATED: "warned",
    NOT_TRIED: "unsplit",
    REFUSED: "refused",
    DIFFERS: "wrong",
    FAILED: "crash",
}
FEATURES = {"evaluation": "evaluate", "tokens": "generate"}


def examine(class_name: str, task: str, num_stages: int, tensor_parallel_size: int = 1) -> dict[str, str]:
    """Train, evaluate and generate with a tiny model of a class; say for each what came out.

    Returns:
        "train", "evaluate" and, for generative tasks, "generate", each `exact`, `warned: <why>` (exact against the
        unsplit model accumulating over the same microbatches), `refused: <why>`, `wrong: <what differs>` or
        `crash: <error>`; or only "unsplit", why the class does not run unsplit.
    """
    with kept_in_double():
        configuration = Configuration(
            pipeline_parallel_size=num_stages,
            tensor_parallel_size=tensor_parallel_size,
            num_microbatches=NUM_MICROBATCHES,
        )
        try:
            of_diffusers = task == DIFFUSION
            model, inputs = build_diffusion(class_name) if of_diffusers else build_running(class_name, task)
            compared = Comparison(model, inputs, configuration, to_a_constant if of_diffusers else None)
        except Exception as error:
            return {"unsplit": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]}
        results: dict[str, str] = {}
        order = list(WORDS)
        for row in sorted(compared.rows(), key=lambda row: order.index(row.result)):
            if row.what != "tokens" or task in GENERATIVE:
                results[FEATURES.get(row.what, "train")] = _in_words(row)  # of several, the worst
        return results


def _in_words(row: Row) -> str:
    if row.result == ACCUMULATED and row.what in FEATURES:
        return "exact"  # of weights that training, where it is told, has left so
    word, why = WORDS[row.result], row.reason
    if row.result == DIFFERS:
        why = f"{row.what} differs by {row.difference:.1e} ({row.where}): {row.reason}"
    return f"{word}: {why}" if why else word
