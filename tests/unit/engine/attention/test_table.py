"""Every backend in the table exists at its path."""

import importlib.util

import pytest
import torch

from tandem.engine.attention.indexed_layout import IndexedLayout
from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.table import ATTENTION_BACKENDS
from tests.fakes.page_layout import OpaqueLayout

HAS_CUDA_PACKAGES = all(importlib.util.find_spec(name) for name in ("cuda", "flashinfer", "triton"))
BY_HEAD = KvHeadLayout(num_layers=2, page_size=16, num_kv_heads=2, head_dim=64, dtype="bfloat16")
LATENT = LatentLayout(num_layers=2, page_size=16, kv_rank=64, rope_dim=16, dtype="bfloat16")
INDEXED = IndexedLayout(num_layers=2, page_size=16, kv_rank=64, rope_dim=16, index_dim=32, dtype="bfloat16")
# Pages of backends without keys and values by head.
LAYOUTS = {"latent_triton": LATENT, "latent_reference": LATENT, "indexed_reference": INDEXED, "indexed_triton": INDEXED}


@pytest.mark.parametrize("name", ATTENTION_BACKENDS.names)
def test_backend_reports_unsupported_models(name: str) -> None:
    if name not in ATTENTION_BACKENDS.for_device("cpu") and not HAS_CUDA_PACKAGES:
        pytest.skip("the packages for GPUs are not here")
    backend = ATTENTION_BACKENDS.load(name)
    read = LAYOUTS.get(name, BY_HEAD)
    for device in ("cpu", "cuda"):
        works = name in ATTENTION_BACKENDS.for_device(device)
        assert (backend.why_not(read, 4, torch.device(device)) == "") == works
        for other in (BY_HEAD, LATENT, INDEXED):
            if other != read:
                assert f", not pages of {other.tag}" in backend.why_not(other, 4, torch.device(device))
        assert "opaque/16x64" in backend.why_not(OpaqueLayout(16, 64), 4, torch.device(device))
