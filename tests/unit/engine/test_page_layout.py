import json
from pathlib import Path

import pytest

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
    (tmp_path / "config.json").write_text(json.dumps(raw))
    layout = page_layout_of(ModelConfig.from_dir(tmp_path), 4, "float32", kv_cache_dtype)
    assert layout == KvHeadLayout(
        num_layers=2, page_size=4, num_kv_heads=1, head_dim=8, dtype="float32", quantized_to=quantized_to
    )
