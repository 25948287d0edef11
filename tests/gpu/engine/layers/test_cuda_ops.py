"""The fused kernels against the plain path in float32."""

import pytest
import torch

from engine.layers.linear import Linear
from engine.layers.norm import Norm, QkNorm, rms_norm
from engine.layers.ops import TorchOps
from engine.layers.rotary import RotaryEmbedding, Rotation, rotate

NUM_PAGES, NUM_LAYERS = 400, 3
EPS = 1e-6


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (9, 3), (16, 8), (32, 8)])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("num_tokens", [30, 300])
@pytest.mark.parametrize("keep_keys", [True, False])
def test_norm_rotate_write(
    keep_keys: bool,
    num_tokens: int,
    head_dim: int,
    num_q_heads: int,
    num_kv_heads: int,
    page_size: int,
    has_norm: bool,
) -> None:
    from engine.layers.cuda_ops import norm_rotate_write

    layer = 1
    generator = torch.Generator("cuda").manual_seed(head_dim + num_q_heads + page_size)
    shape = (num_tokens, num_q_heads + 2 * num_kv_heads, head_dim)
    qkv = torch.randn(shape, device="cuda", generator=generator).bfloat16()
    pool = torch.full((NUM_PAGES, NUM_LAYERS, 2, page_size, num_kv_heads, head_dim), 7.0, device="cuda").bfloat16()
    slots = torch.randperm(NUM_PAGES * page_size, device="cuda", generator=generator)[:num_tokens]
    positions = torch.randint(0, 500, (num_tokens,), device="cuda", generator=generator)
    tables = RotaryEmbedding(head_dim, 1e4, None, 500, torch.device("cuda"))
    weight = torch.randn(2, head_dim, device="cuda", generator=generator).bfloat16()
    rotation = Rotation(tables, positions, torch.float32)
    given = qkv.clone()
    norm = QkNorm(weight, EPS) if has_norm else None
    actual_q = norm_rotate_write(qkv, num_q_heads, rotation, norm, pool, layer, slots, keep_keys=keep_keys)
    q, k, v = given.float().split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    if has_norm:
        q, k = (rms_norm(x, w.float(), EPS) for x, w in zip((q, k), weight, strict=True))
    assert error(actual_q, rotate(q, *rotation.cos_sin)) < 4e-3
    page, place = slots // page_size, slots % page_size
    assert error(pool[page, layer, 0, place], rotate(k, *rotation.cos_sin)) < 4e-3
    assert torch.equal(pool[page, layer, 1, place], v.bfloat16())
    # Nothing else was written.
    if keep_keys:
        given[:, num_q_heads : num_q_heads + num_kv_heads] = pool[page, layer, 0, place]
    assert torch.equal(qkv, given)
    pool[page, layer, :, place] = 7.0
    assert (pool == 7.0).all()


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 16, 17, 300])
@pytest.mark.parametrize(("num_in", "num_out"), [(96, 48), (1024, 1024), (896, 4864), (4096, 6144), (14336, 4096)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_with_what_is_around_them(num_tokens: int, num_in: int, num_out: int, has_bias: bool) -> None:
    from engine.layers.cuda_ops import CudaOps

    device = torch.device("cuda", 0)
    ops, oracle = CudaOps(device), TorchOps()
    linear, exact = (Linear([num_out], num_in, has_bias, t, device) for t in (torch.bfloat16, torch.float64))
    linear.weight.normal_(0, num_in**-0.5)
    exact.weight.copy_(linear.weight)
    if linear.bias is not None and exact.bias is not None:
        linear.bias.normal_()
        exact.bias.copy_(linear.bias)
    x, residual = (torch.randn(num_tokens, size, device="cuda").bfloat16() for size in (num_in, num_out))
    norm = Norm(torch.randn(num_in, device="cuda").bfloat16(), EPS)
    exact_norm = Norm(norm.weight.double(), EPS)
    assert error(ops.norm_linear(x, norm, linear), oracle.norm_linear(x.double(), exact_norm, exact)) < 6e-3
    assert error(ops.norm_gated(x, norm, linear), oracle.norm_gated(x.double(), exact_norm, exact)) < 1e-2
    expected = oracle.linear_add(x.double(), exact, residual.double())
    assert error(ops.linear_add(x, linear, residual.clone()), expected) < 6e-3


def test_a_wide_matrix() -> None:
    """The vocabulary, with a number of rows that no tile divides."""
    from engine.layers.cuda_ops import CudaOps

    device = torch.device("cuda", 0)
    linear = Linear([151_669], 256, False, torch.bfloat16, device)
    linear.weight.normal_(0, 1 / 16)
    norm = Norm(torch.ones(256, device="cuda").bfloat16(), EPS)
    for num_tokens in (1, 8, 9):
        x = torch.randn(num_tokens, 256, device="cuda").bfloat16()
        expected = rms_norm(x.double(), norm.weight.double(), EPS) @ linear.weight.double().t()
        assert error(CudaOps(device).norm_linear(x, norm, linear), expected) < 6e-3


@pytest.mark.parametrize("num_rows", [1, 3, 64, 256])
@pytest.mark.parametrize("vocab_size", [7, 300, 151_669, 151_936])
def test_most_likely(num_rows: int, vocab_size: int) -> None:
    from engine.layers.most_likely import MostLikely

    kernel = MostLikely(vocab_size, num_rows, torch.device("cuda", 0))
    out = torch.full((num_rows,), -1, dtype=torch.int64, device="cuda")
    for scale in (0.0, 1e-3, 1.0, -1.0):
        # Coarse, so that many are equal; with both zeros and infinities among them.
        logits = (torch.randn(num_rows, vocab_size, device="cuda") * 3).round().bfloat16() * scale
        logits[0, vocab_size // 2 :] = -torch.inf
        kernel.find(logits, out)
        largest = logits.amax(dim=1, keepdim=True)
        lowest = torch.where(logits == largest, torch.arange(vocab_size, device="cuda"), vocab_size).amin(dim=1)
        assert torch.equal(out, lowest)
