"""Pages of latents and index keys: sizes, the two regions, and the tag that workers compare."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.engine.attention.indexed_layout import IndexedLayout
from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.models.latent import IndexerConfig
from tests.fakes.model_shapes import DEEPSEEK_V3

LAYOUT = IndexedLayout(num_layers=3, page_size=4, kv_rank=16, rope_dim=6, index_dim=10, dtype="bfloat16")


def test_regions_share_a_page_without_overlap() -> None:
    pool = CpuKvPool(LAYOUT, 5, "indexed-layout")
    latents, keys = LAYOUT.views(pool.memory)
    assert latents.shape == (5, 3, 4, 22) and keys.shape == (5, 3, 4, 10)
    assert LAYOUT.page_bytes == 3 * 4 * (22 + 10) * 2 == replace(LAYOUT, dtype="float32").page_bytes // 2
    latents[2] = 1.5
    keys[3] = 2.5
    numbers = pool.memory.view(torch.bfloat16)
    assert numbers[2].tolist() == [1.5] * 264 + [0.0] * 120 and numbers[3].tolist() == [0.0] * 264 + [2.5] * 120
    assert pool.memory.any(dim=1).tolist() == [False, False, True, True, False]


def test_tags_are_equal_only_for_equal_layouts() -> None:
    assert LAYOUT.tag == "indexed-latent/bfloat16/3x4x16+6+10"
    changes: dict[str, Any] = {"num_layers": 4, "page_size": 2, "rope_dim": 16, "index_dim": 6, "dtype": "float16"}
    others = [replace(LAYOUT, **{name: value}) for name, value in changes.items()]
    tags = {layout.tag for layout in (LAYOUT, replace(LAYOUT), LAYOUT.latents, *others)}
    assert len(tags) == 2 + len(changes)


def test_layout_of_a_model() -> None:
    model = replace(DEEPSEEK_V3, architecture="DeepseekV32ForCausalLM", indexer=IndexerConfig(64, 128, 2048))
    layout = IndexedLayout.of(model, 16, "bfloat16")
    assert layout.latents == LatentLayout.of(DEEPSEEK_V3, 16, "bfloat16") and layout.index_dim == 128
    with pytest.raises(
        ValueError, match=r"^pages of latents with index keys cannot be float8_e4m3fn: use kv_cache_dtype auto"
    ):
        IndexedLayout.of(model, 16, "bfloat16", "float8_e4m3fn")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int4"}, "dtype 'int4' is not one of float32, bfloat16, float16"),
        ({"index_dim": 0}, "index_dim must be at least 1, not 0"),
        ({"kv_rank": 0}, "kv_rank must be at least 1, not 0"),
    ],
)
def test_impossible_layouts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LAYOUT, **changes)
