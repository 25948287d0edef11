"""Norms, rotation and the write into pages, against plain float32."""

import pytest
import torch

from tandem.engine.layers.norm import QkNorm, rms_norm
from tandem.engine.layers.rotary import RotaryEmbedding, Rotation, rotate
from tandem.engine.models.rope import YarnRopeScaling

NUM_PAGES, NUM_LAYERS = 400, 3
EPS = 1e-6


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (9, 3), (16, 8), (32, 8)])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("num_tokens", [30, 300])
@pytest.mark.parametrize("keep_kv", [True, False])
def test_norm_rotate_write(
    keep_kv: bool,
    num_tokens: int,
    head_dim: int,
    num_q_heads: int,
    num_kv_heads: int,
    page_size: int,
    has_norm: bool,
) -> None:
    from tandem.engine.attention.norm_rotate_write import norm_rotate_write

    layer = 1
    generator = torch.Generator("cuda").manual_seed(head_dim + num_q_heads + page_size)
    shape = (num_tokens, num_q_heads + 2 * num_kv_heads, head_dim)
    qkv = torch.randn(shape, device="cuda", generator=generator).bfloat16()
    pool = torch.full((NUM_PAGES, NUM_LAYERS, 2, page_size, num_kv_heads, head_dim), 7.0, device="cuda").bfloat16()
    slots = torch.randperm(NUM_PAGES * page_size, device="cuda", generator=generator)[:num_tokens]
    positions = torch.randint(0, 500, (num_tokens,), device="cuda", generator=generator)
    # Scales heads besides rotating them.
    scaling = YarnRopeScaling(4.0, 125)
    tables = RotaryEmbedding(head_dim, 1e4, scaling, 500, torch.device("cuda"))
    weight = torch.randn(2, head_dim, device="cuda", generator=generator).bfloat16()
    rotation = Rotation(tables, positions, torch.float32)
    given = qkv.clone()
    norm = QkNorm(weight, EPS) if has_norm else None
    actual_q = norm_rotate_write(qkv, num_q_heads, rotation, norm, pool, layer, slots, keep_kv=keep_kv)
    q, k, v = given.float().split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    if has_norm:
        q, k = (rms_norm(x, w.float(), EPS) for x, w in zip((q, k), weight, strict=True))
    assert error(actual_q, rotate(q, *rotation.cos_sin)) < 4e-3
    page, place = slots // page_size, slots % page_size
    assert error(pool[page, layer, 0, place], rotate(k, *rotation.cos_sin)) < 4e-3
    assert torch.equal(pool[page, layer, 1, place], v.bfloat16())
    if keep_kv:
        given[:, num_q_heads : num_q_heads + num_kv_heads] = pool[page, layer, 0, place]
    assert torch.equal(qkv, given)
    pool[page, layer, :, place] = 7.0
    assert (pool == 7.0).all()
