import json
from pathlib import Path

import pytest

from tandem.engine.attention.indexed_layout import IndexedLayout
from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.families.table import ARCHITECTURES
from tandem.engine.page_layout import page_layout_of
from tests.fakes.model_config import TINY_EXPERTS, TINY_LLAMA


@pytest.mark.parametrize(("kv_cache_dtype", "quantized_to"), [("auto", ""), ("fp8_e4m3", "float8_e4m3fn")])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_has_a_layout(
    architecture: str, kv_cache_dtype: str, quantized_to: str, tmp_path: Path
) -> None:
    raw = {**TINY_LLAMA, **TINY_EXPERTS, "architectures": [architecture], "head_dim": 8, "sliding_window": None}
    if ARCHITECTURES[architecture].experts is None:
        raw = {key: value for key, value in raw.items() if key not in TINY_EXPERTS}
    if ARCHITECTURES[architecture].latent is not None:
        del raw["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_dir(tmp_path)
    if ARCHITECTURES[architecture].latent is not None:
        if quantized_to and config.indexer is not None:
            with pytest.raises(ValueError, match=r"^pages of latents with index keys cannot be float8_e4m3fn"):
                page_layout_of(config, 4, "float32", kv_cache_dtype)
            return
        latents = page_layout_of(config, 4, "float32", kv_cache_dtype)
        expected = LatentLayout(
            num_layers=2, page_size=4, kv_rank=512, rope_dim=64, dtype="float32", quantized_to=quantized_to
        )
        if isinstance(latents, IndexedLayout):
            assert config.indexer is not None and latents.index_dim == 128
            latents = latents.latents
        assert latents == expected
        return
    layout = page_layout_of(config, 4, "float32", kv_cache_dtype)
    assert layout == KvHeadLayout(
        num_layers=2, page_size=4, num_kv_heads=1, head_dim=8, dtype="float32", quantized_to=quantized_to
    )
