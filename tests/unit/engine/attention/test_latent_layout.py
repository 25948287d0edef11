"""Pages of latents: sizes, tensor view, and the tag that workers compare."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.kvcache.pool import CpuKvPool
from tests.fakes.model_shapes import DEEPSEEK_V2_LITE

LAYOUT = LatentLayout(num_layers=3, page_size=4, kv_rank=16, rope_dim=6, dtype="bfloat16")


def test_page_is_contiguous_in_the_pool() -> None:
    pool = CpuKvPool(LAYOUT, 5, "latent-layout")
    latents = LAYOUT.view(pool.memory)
    assert latents.shape == (5, 3, 4, 22) and latents.dtype is torch.bfloat16
    assert LAYOUT.page_bytes == 3 * 4 * 22 * 2 == replace(LAYOUT, dtype="float32").page_bytes // 2
    latents[2] = 1.5
    assert latents[2].is_contiguous()
    assert pool.memory.any(dim=1).tolist() == [False, False, True, False, False]


def test_tags_are_equal_only_for_equal_layouts() -> None:
    assert LAYOUT.tag == "latent/bfloat16/3x4x16+6"
    changes: dict[str, Any] = {"num_layers": 4, "page_size": 2, "kv_rank": 6, "rope_dim": 16, "dtype": "float16"}
    others = [replace(LAYOUT, **{name: value}) for name, value in changes.items()]
    # As many numbers, otherwise divided.
    others.append(replace(LAYOUT, kv_rank=6, rope_dim=16))
    assert len({layout.tag for layout in (LAYOUT, replace(LAYOUT), *others)}) == 2 + len(changes)


def test_layout_of_a_model() -> None:
    layout = LatentLayout.of(DEEPSEEK_V2_LITE, 16, "bfloat16")
    assert layout == LatentLayout(num_layers=27, page_size=16, kv_rank=512, rope_dim=64, dtype="bfloat16")
    assert layout.page_bytes == 27 * 16 * 576 * 2
    with pytest.raises(ValueError, match=r"^pages of latents cannot be float8_e4m3fn: use kv_cache_dtype auto"):
        LatentLayout.of(DEEPSEEK_V2_LITE, 16, "bfloat16", "float8_e4m3fn")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int4"}, "dtype 'int4' is not one of float32, bfloat16, float16"),
        ({"page_size": 0}, "page_size must be at least 1, not 0"),
        ({"kv_rank": 0}, "kv_rank must be at least 1, not 0"),
    ],
)
def test_impossible_layouts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LAYOUT, **changes)
