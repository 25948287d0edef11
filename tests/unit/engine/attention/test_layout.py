"""Page layout: sizes, tensor view, and the tag that workers compare."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.head_slice import HeadSlice

LAYOUT = KvHeadLayout(num_layers=3, page_size=4, num_kv_heads=2, head_dim=8, dtype="bfloat16")


def test_page_is_contiguous_in_the_pool() -> None:
    pool = CpuKvPool(LAYOUT, 5, "layout")
    kv = LAYOUT.view(pool.memory)
    assert kv.shape == (5, 3, 2, 4, 2, 8) and kv.dtype is torch.bfloat16
    assert LAYOUT.page_bytes == 3 * 2 * 4 * 2 * 8 * 2
    kv[2] = 1.5
    assert kv[2].is_contiguous()
    assert pool.memory.any(dim=1).tolist() == [False, False, True, False, False]


def test_tags_are_equal_only_for_equal_layouts() -> None:
    assert LAYOUT.tag == "kv-by-head/bfloat16/3x2x4x2x8"
    changes: dict[str, Any] = {
        "num_layers": 4,
        "page_size": 2,
        "num_kv_heads": 8,
        "head_dim": 2,
        "dtype": "float16",
        "quantized_to": "float8_e4m3fn",
    }
    others = [replace(LAYOUT, **{name: value}) for name, value in changes.items()]
    assert len({layout.tag for layout in (LAYOUT, replace(LAYOUT), *others)}) == 1 + len(changes)


def test_quantized_pages_take_a_byte_per_number_in_any_compute_dtype() -> None:
    quantized = replace(LAYOUT, quantized_to="float8_e4m3fn")
    pool = CpuKvPool(quantized, 5, "quantized-layout")
    assert quantized.page_bytes == LAYOUT.page_bytes // 2 == replace(quantized, dtype="float32").page_bytes
    assert quantized.view(pool.memory).shape == (5, 3, 2, 4, 2, 8)
    assert quantized.view(pool.memory).dtype is torch.float8_e4m3fn
    assert quantized.tag == "kv-by-head/float8_e4m3fn/3x2x4x2x8" == replace(quantized, dtype="float32").tag


def test_a_ranks_pages_hold_its_heads() -> None:
    whole = replace(LAYOUT, num_kv_heads=4)
    first, second = (whole.shard(rank, 2) for rank in range(2))
    assert second.num_kv_heads == 2 and second.page_bytes == whole.page_bytes // 2
    assert second.heads == HeadSlice(2, 2, 4) and second.whole == whole == whole.shard(0, 1)
    # Heads of another rank are another format.
    assert len({whole.tag, first.tag, second.tag, LAYOUT.tag}) == 4
    assert second.tag == "kv-by-head/bfloat16/3x2x4x2x8/2-3 of 4"
    replicas = [whole.shard(rank, 8) for rank in range(8)]
    assert [layout.heads.first for layout in replicas] == [0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(ValueError, match="3 ranks cannot share 4 KV heads"):
        whole.shard(0, 3)


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_pages_for_tokens(num_tokens: int, num_pages: int) -> None:
    assert LAYOUT.num_pages_for(num_tokens) == num_pages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int4"}, "dtype 'int4' is not one of float32, bfloat16, float16"),
        ({"quantized_to": "int4"}, "quantized_to 'int4' is not one of float8_e4m3fn"),
        ({"page_size": 0}, "page_size must be at least 1, not 0"),
    ],
)
def test_impossible_layouts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LAYOUT, **changes)
