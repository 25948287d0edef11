"""Packed arrays come out unchanged."""

import numpy as np
import torch

from tandem.engine.upload import ALIGNMENT, Numbers, Packed

ARRAYS: tuple[Numbers, ...] = (
    np.array([2**40, -1, 3], np.int64),
    np.array([7], np.int32),
    np.array([], np.int64),
    np.array([0.1, -2.5], np.float64),
    np.array([4, 5, 6], np.int32),
)


def test_arrays_keep_their_values_and_types() -> None:
    uploaded = Packed(*ARRAYS).to(torch.device("cpu"))
    for tensor, numbers in zip(uploaded, ARRAYS, strict=True):
        assert tensor.numpy().dtype == numbers.dtype
        assert tensor.tolist() == numbers.tolist()


def test_arrays_are_aligned_and_the_last_takes_the_rest() -> None:
    packed = Packed(*ARRAYS)
    memory = torch.zeros(packed.num_bytes + 64, dtype=torch.uint8)
    views = packed.views(memory)
    offsets = [view.storage_offset() * view.element_size() for view in views]
    assert offsets == [0, 32, 48, 48, 64] and not any(offset % ALIGNMENT for offset in offsets)
    assert [len(view) for view in views] == [3, 1, 0, 2, (len(memory) - offsets[-1]) // 4]
