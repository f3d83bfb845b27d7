"""The fingerprint of a batch: equal for equal batches in every process, different for different ones."""

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from penstock.data.batch import MicrobatchedBatch
from penstock.data.fingerprint import WHOLE_BYTES, fingerprint
from tests.support.pool import Pool

IDS = torch.arange(16 * 128).view(16, 128) * 7919 % 50257


def test_equal_batches_agree_whatever_their_container_and_order():
    batch = {"input_ids": IDS, "labels": IDS.clone(), "use_cache": False}
    turned = {"use_cache": False, "labels": IDS.clone(), "input_ids": IDS.T.contiguous().T}
    assert fingerprint(batch) == fingerprint(turned) == fingerprint(BatchEncoding(batch))
    assert 0 <= fingerprint(batch) < 2**63


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.bool, torch.uint8])
def test_every_single_element_of_a_small_tensor_counts(dtype):
    tensor = torch.zeros(3, 7, dtype=dtype)
    seen = {fingerprint({"x": tensor})}
    for position in range(tensor.numel()):
        changed = tensor.clone()
        changed.view(-1)[position] = 1
        seen.add(fingerprint({"x": changed}))
    assert len(seen) == tensor.numel() + 1


def test_what_else_differs_counts():
    nan = float("nan")
    batches = [
        {"input_ids": IDS},
        {"labels": IDS},
        {"input_ids": IDS[:8]},
        {"input_ids": IDS.view(8, 256)},
        {"input_ids": IDS.int()},
        {"input_ids": IDS.roll(1, 0)},
        {"input_ids": IDS, "use_cache": True},
        {"input_ids": IDS, "use_cache": False},
        {"input_ids": IDS, "use_cache": None},
        {"input_ids": IDS, "use_cache": nan},
        {"input_ids": (IDS, IDS + 1)},
        {"input_ids": (IDS + 1, IDS)},
        {"a": IDS, "b": IDS + 1},
        {"a": IDS + 1, "b": IDS},
        {"input_ids": {"a": IDS}},
        {"input_ids": IDS.numpy()},
        {"input_ids": "text"},
        {"input_ids": np.ones(3)},
        {"input_ids": torch.empty(0)},
        {},
    ]
    assert len({fingerprint(batch) for batch in batches}) == len(batches)
    assert fingerprint({"x": nan}) == fingerprint({"x": nan})


def test_values_that_are_made_on_access_count_each_by_its_own_content():
    """Such a value is gone when the next is asked for, and its address may be the next one's."""

    def batch(*steps: int) -> MicrobatchedBatch:
        return MicrobatchedBatch([{f"input {number}": IDS + step for number, step in enumerate(steps)}], 16)

    for changed in range(5):
        steps = [0] * 5
        steps[changed] = 1
        assert fingerprint(batch(*steps)) != fingerprint(batch(0, 0, 0, 0, 0))
        assert fingerprint(batch(*steps)) == fingerprint(dict(batch(*steps)))


@pytest.mark.parametrize("dtype", ["float32", "complex64", ">i4", "<U3", "datetime64[s]"])
def test_large_arrays_are_sampled_as_tensors_are(dtype: str) -> None:
    array = np.zeros((4096, 64), dtype="int64").astype(dtype)
    other = array.copy()
    other[:, 1:] = np.int64(5).astype(dtype)
    assert array.nbytes > WHOLE_BYTES
    assert fingerprint({"x": array}) != fingerprint({"x": other})
    assert fingerprint({"x": array}) == fingerprint({"x": np.asfortranarray(array)})


def test_arrays_that_hold_objects_count_by_their_class() -> None:
    """Their memory holds addresses, which differ between processes."""
    first, second = (np.array([(1, [text])], dtype=[("number", "i4"), ("object", "O")]) for text in "ab")
    assert fingerprint({"x": first}) == fingerprint({"x": second})


def test_large_tensors_are_sampled_in_every_column():
    padded = torch.zeros(4096, 512, dtype=torch.long)
    assert padded.numel() * 8 > WHOLE_BYTES
    other = padded.clone()
    other[:, 1:] = 5  # the first column, where each sequence begins, stays equal
    assert fingerprint({"input_ids": padded}) != fingerprint({"input_ids": other})
    assert fingerprint({"input_ids": padded}) == fingerprint({"input_ids": padded.clone()})


@pytest.mark.parametrize("count", [8193, 20000, 16384, 16400, 8191 * 3])
def test_any_size_and_dtype_can_be_sampled(count):
    for dtype in (torch.float32, torch.float64, torch.uint8, torch.float16):
        tensor = torch.arange(count).to(dtype)
        assert fingerprint({"x": tensor}) != fingerprint({"x": tensor + 1})


def test_accelerators_and_unusual_tensors_count_by_shape_and_dtype():
    makers = (
        lambda n: torch.empty(n, device="meta"),
        lambda n: torch.full((n,), 1j),
        lambda n: torch.eye(n).to_sparse(),
    )
    for make in makers:
        assert fingerprint({"x": make(3)}) == fingerprint({"x": make(3)}) != fingerprint({"x": make(4)})


def test_objects_count_by_class_and_tensors_that_require_gradients_as_others() -> None:
    class Thing:
        pass

    assert fingerprint({"x": Thing()}) == fingerprint({"x": Thing()})
    plain = fingerprint({"x": torch.ones(3)})
    assert plain == fingerprint({"x": torch.ones(3, requires_grad=True)})
    assert plain == fingerprint({"x": torch.nn.Parameter(torch.ones(3))})


def of_mixed_values() -> int:
    return fingerprint({"input_ids": torch.arange(2048).view(16, 128), "name": "text", "ids": (1, 2.5, None)})


def test_every_process_finds_the_same_number(pool: Pool) -> None:
    """Python's own hash of strings differs between the two: tests/test_zygote.py."""
    assert pool.run(2, of_mixed_values, init=False) == [of_mixed_values()] * 2
