"""The fused kernels against the plain path in float32."""

import pytest
import torch

from tandem.engine.layers.norm import QkNorm, rms_norm
from tandem.engine.layers.ops import TorchOps
from tandem.engine.layers.rotary import RotaryEmbedding, Rotation, rotate

NUM_PAGES, NUM_LAYERS = 40, 3
EPS = 1e-6


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (9, 3), (16, 8), (32, 8)])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("has_norm", [True, False])
def test_norm_rotate_write(head_dim: int, num_q_heads: int, num_kv_heads: int, page_size: int, has_norm: bool) -> None:
    from tandem.engine.layers.cuda_ops import norm_rotate_write

    num_tokens, layer = 30, 1
    generator = torch.Generator("cuda").manual_seed(head_dim + num_q_heads + page_size)
    shape = (num_tokens, num_q_heads + 2 * num_kv_heads, head_dim)
    qkv = torch.randn(shape, device="cuda", generator=generator).bfloat16()
    pool = torch.full((NUM_PAGES, NUM_LAYERS, 2, page_size, num_kv_heads, head_dim), 7.0, device="cuda").bfloat16()
    slots = torch.randperm(NUM_PAGES * page_size, device="cuda", generator=generator)[:num_tokens]
    positions = torch.randint(0, 500, (num_tokens,), device="cuda", generator=generator)
    tables = RotaryEmbedding(head_dim, 1e4, None, 500, torch.device("cuda"))
    weight = torch.randn(2, head_dim, device="cuda", generator=generator).bfloat16()
    rotation = Rotation(tables, positions, torch.float32)
    actual_q = norm_rotate_write(
        qkv, num_q_heads, rotation, QkNorm(weight, EPS) if has_norm else None, pool, layer, slots
    )
    q, k, v = qkv.float().split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    if has_norm:
        q, k = (rms_norm(x, w.float(), EPS) for x, w in zip((q, k), weight, strict=True))
    assert error(actual_q, rotate(q, *rotation.cos_sin)) < 4e-3
    page, place = slots // page_size, slots % page_size
    assert error(pool[page, layer, 0, place], rotate(k, *rotation.cos_sin)) < 4e-3
    assert torch.equal(pool[page, layer, 1, place], v.bfloat16())
    # Nothing else was written.
    pool[page, layer, :, place] = 7.0
    assert (pool == 7.0).all()


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
@pytest.mark.parametrize("size", [384, 1024, 4096])
def test_norms_and_activation(num_tokens: int, size: int) -> None:
    from tandem.engine.layers.cuda_ops import CudaOps

    ops, oracle = CudaOps(), TorchOps()
    x, residual = (torch.randn(num_tokens, size, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(size, device="cuda").bfloat16()
    assert error(ops.norm(x, weight, EPS), oracle.norm(x.float(), weight.float(), EPS)) < 4e-3
    expected = oracle.add_norm(x.float(), residual.float(), weight.float(), EPS)
    for actual, wanted in zip(ops.add_norm(x.clone(), residual.clone(), weight, EPS), expected, strict=True):
        assert error(actual, wanted) < 5e-3
    gate_up = torch.randn(num_tokens, 2 * size, device="cuda").bfloat16()
    assert error(ops.silu_and_mul(gate_up), oracle.silu_and_mul(gate_up.float())) < 5e-3
