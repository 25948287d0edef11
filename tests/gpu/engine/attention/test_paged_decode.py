"""The decode kernel against plain attention: cut sequences, all page sizes, padding."""

import functools
import itertools
import random

import pytest
import torch

from tandem.engine.attention.base import HeadBackend
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.batch import Batch
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import Rotation
from tests.fakes.attention import AttentionOracle

MAX_ERROR = 5e-3
BATCH_SIZE = 5


class GraphedDecode(HeadBackend):
    """FlashInfer's prefill, and the decode kernel with padding rows."""

    def __init__(self, pool: KvPool, num_q_heads: int, batch_size: int = BATCH_SIZE) -> None:
        from tandem.engine.attention.flashinfer import FlashInferAttention
        from tandem.engine.attention.paged_decode import PagedDecode, graphed_paged_decodes
        from tandem.engine.kvcache.cuda_pool import CudaKvPool

        assert isinstance(pool, CudaKvPool)
        self._prefill = FlashInferAttention(pool, num_q_heads)
        self._batch_size = batch_size
        # Smaller sizes share the memory, though their plans may be larger.
        graphed = graphed_paged_decodes(
            PagedDecode(pool, num_q_heads, batch_size), range(1, batch_size + 1), pool.num_pages
        )
        self._decode = graphed[batch_size]
        self._is_decode = False

    def plan(self, batch: Batch) -> None:
        self._is_decode = batch.mode == "decode"
        if self._is_decode:
            self._decode.plan(batch.sequences)
            assert self._decode.positions.tolist() == [s.cached_len for s in batch.sequences] + [0] * (
                self._batch_size - len(batch.sequences)
            )
        else:
            self._prefill.plan(batch)

    def attend(self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int) -> torch.Tensor:
        if not self._is_decode:
            return self._prefill.attend(qkv, rotation, qk_norm, layer)
        padded = torch.cat([qkv, torch.randn_like(qkv[:1]).expand(self._batch_size - len(qkv), -1, -1)])
        return self._decode.attend(padded, rotation, qk_norm, layer)[: len(qkv)]


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 4), (9, 3), (32, 8), (16, 2), (14, 2), (3, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode(page_size: int, num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    lengths = [1, 17, 64, 65, 3000]
    num_steps = 18
    num_pages = sum((n + num_steps) // page_size + 2 for n in lengths)
    layout = KvHeadLayout(2, page_size, num_kv_heads, head_dim, "bfloat16")
    pool = CudaKvPool(layout, num_pages, torch.device("cuda", 0))
    oracle = AttentionOracle(pool, num_q_heads, GraphedDecode)
    sequences = [oracle.add(length + num_steps) for length in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        oracle.step("prefill", {sequence: length}, max_error=MAX_ERROR)
    for step in range(num_steps):
        chosen = sequences[step % 3 : 3 + step % 3]
        oracle.step("decode", dict.fromkeys(chosen, 1), max_error=MAX_ERROR)
    # Only the new slots were written, and of the free pages only the padding's.
    num_written = [s.cached_len for s in sequences]
    finite = torch.isfinite(oracle.kv).movedim(3, 1).flatten(2).all(2)  # (num_pages, page_size)
    expected = torch.zeros_like(finite)
    for sequence, written in zip(sequences, num_written, strict=True):
        for position in itertools.islice(itertools.count(), written):
            expected[sequence.page_ids[position // page_size], position % page_size] = True
    assert torch.equal(finite, expected)


@pytest.mark.parametrize("batch_size", [2, 20, 33, 40, 72, 128])
def test_many_sequences_of_many_lengths(batch_size: int) -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    rng = random.Random(batch_size)
    lengths = [rng.choice((1, 16, 100, 700, rng.randint(1, 3000))) for _ in range(batch_size)]
    num_pages = sum((n + 1) // 16 + 1 for n in lengths)
    pool = CudaKvPool(KvHeadLayout(1, 16, 8, 128, "bfloat16"), num_pages, torch.device("cuda", 0))
    oracle = AttentionOracle(pool, 16, functools.partial(GraphedDecode, batch_size=batch_size))
    sequences = [oracle.add(length + 1) for length in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        oracle.step("prefill", {sequence: length}, max_error=MAX_ERROR)
    oracle.step("decode", dict.fromkeys(sequences, 1), max_error=MAX_ERROR)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_norm_and_rotation_match_the_prefill_kernel(head_dim: int) -> None:
    from tandem.engine.attention.norm_rotate_write import norm_rotate_write
    from tandem.engine.attention.paged_decode import PagedDecode
    from tandem.engine.kvcache.cuda_pool import CudaKvPool
    from tandem.engine.layers.rotary import RotaryEmbedding
    from tandem.engine.models.rope import YarnRopeScaling
    from tandem.engine.token_sequence import TokenSequence

    device = torch.device("cuda", 0)
    layout = KvHeadLayout(3, 16, 2, head_dim, "bfloat16")
    pools = [CudaKvPool(layout, 8, device) for _ in range(2)]
    qkv = torch.randn(2, 12, head_dim, device=device).bfloat16()
    norm = QkNorm(torch.randn(2, head_dim, device=device).bfloat16(), 1e-6)
    sequences = [
        TokenSequence([0] * (n + 1), n + 1, [1 + i * 3, 2 + i * 3], cached_len=n) for i, n in enumerate((5, 31))
    ]
    for sequence in sequences:
        sequence.extend(1)
    positions = torch.tensor([5, 31], device=device)
    tables = RotaryEmbedding(head_dim, 1e4, YarnRopeScaling(4.0, 16), 64, device)
    rotation = Rotation(tables, positions, torch.bfloat16)
    kv, kv_of_other = (layout.view(pool.memory) for pool in pools)
    decode = PagedDecode(pools[0], 8, 2)
    decode.launch(decode.plan(sequences, 2).to(device)[0], qkv, rotation, norm, 1)
    slots = torch.tensor([16 + 5, 5 * 16 + 15], device=device)
    norm_rotate_write(qkv, 8, rotation, norm, layout.view(pools[1].memory_and_dummy), 1, slots)
    # Both kernels compute new keys in float32 and round once; values are copied.
    torch.testing.assert_close(kv[:, :, 0].float(), kv_of_other[:, :, 0].float(), rtol=1e-2, atol=1e-6)
    assert torch.equal(kv[:, :, 1], kv_of_other[:, :, 1])
    assert kv[:, 1].any() and not kv[:, [0, 2]].any()
