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
    latents, keys = LAYOUT.views(pool.memory)
    assert (latents.shape, keys.shape) == ((5, 3, 4, 16), (5, 3, 4, 6))
    assert latents.dtype is keys.dtype is torch.bfloat16
    assert LAYOUT.page_bytes == 3 * 4 * 22 * 2 == replace(LAYOUT, dtype="float32").page_bytes // 2
    latents[2], keys[2] = 1.5, 2.5
    rows = pool.memory.view(torch.bfloat16).view(5, 12, 22)
    assert rows[2].tolist() == [[1.5] * 16 + [2.5] * 6] * 12
    assert pool.memory.any(dim=1).tolist() == [False, False, True, False, False]


def test_only_latents_are_quantized() -> None:
    layout = replace(LAYOUT, quantized_to="float8_e4m3fn")
    pool = CpuKvPool(layout, 5, "quantized-latent-layout")
    latents, keys = layout.views(pool.memory)
    assert latents.dtype is torch.float8_e4m3fn and keys.dtype is torch.bfloat16
    assert layout.row_bytes == 16 + 6 * 2 and layout.page_bytes == 3 * 4 * 28
    latents[1:3], keys[2] = torch.tensor(1.0), 1.0
    one, both = [0x38] * 16, [0x80, 0x3F] * 6
    assert pool.memory[1].tolist() == (one + [0] * 12) * 12
    assert pool.memory[2].tolist() == (one + both) * 12


def test_tags_are_equal_only_for_equal_layouts() -> None:
    assert LAYOUT.tag == "latent/bfloat16/3x4x16+6"
    changes: dict[str, Any] = {"num_layers": 4, "page_size": 2, "kv_rank": 6, "rope_dim": 16, "dtype": "float16"}
    changes["quantized_to"] = "float8_e4m3fn"
    others = [replace(LAYOUT, **{name: value}) for name, value in changes.items()]
    # As many numbers, otherwise divided.
    others.append(replace(LAYOUT, kv_rank=6, rope_dim=16))
    assert len({layout.tag for layout in (LAYOUT, replace(LAYOUT), *others)}) == 2 + len(changes)


def test_layout_of_a_model() -> None:
    layout = LatentLayout.of(DEEPSEEK_V2_LITE, 16, "bfloat16")
    assert layout == LatentLayout(num_layers=27, page_size=16, kv_rank=512, rope_dim=64, dtype="bfloat16")
    assert layout.page_bytes == 27 * 16 * 576 * 2
    quantized = LatentLayout.of(DEEPSEEK_V2_LITE, 16, "bfloat16", "float8_e4m3fn")
    assert quantized == replace(layout, quantized_to="float8_e4m3fn")
    assert quantized.page_bytes == 27 * 16 * 640


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int4"}, "dtype 'int4' is not one of float32, bfloat16, float16"),
        ({"page_size": 0}, "page_size must be at least 1, not 0"),
        ({"kv_rank": 0}, "kv_rank must be at least 1, not 0"),
        ({"quantized_to": "int4"}, "quantized_to 'int4' is not one of float8_e4m3fn"),
        (
            {"quantized_to": "float8_e4m3fn", "kv_rank": 15},
            "latents of 15 numbers cannot be float8_e4m3fn beside bfloat16",
        ),
    ],
)
def test_impossible_layouts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LAYOUT, **changes)
