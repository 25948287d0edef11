"""Triton kernels of latents against plain softmax attention, over pages full of NaN."""

from collections.abc import Sequence
from typing import cast

import pytest
import torch

from tandem.engine.attention.base import (
    Attention,
    AttentionBackend,
    GraphableBackend,
    GraphedAttention,
    LatentAttention,
    LatentBackend,
    LatentHeads,
)
from tandem.engine.attention.drafted_layout import DraftedLayout
from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.latent_reference import LatentReferenceAttention
from tandem.engine.batch import Batch, ForwardMode
from tandem.engine.kvcache.pool import KvPool, PoolRegion
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.rotary import Rotation
from tandem.engine.token_sequence import TokenSequence
from tests.fakes.latent_attention import LatentOracle

NUM_LAYERS = 2
MAX_ERROR = 0.02
# The sizes of published models: DeepSeek-V2-Lite's and V3's heads, then GLM-4.7-Flash's.
KV_RANK, ROPE_DIM = 512, 64
SIZES = [(16, 128, 128), (128, 128, 128), (20, 192, 256)]
MAX_TOKENS = 4800


class FixedSizeLatents(LatentBackend):
    """Steps with fixed tensors and padding, as graphs have them."""

    def __init__(self, backend: LatentBackend, num_decoded: int, num_prompt_tokens: int) -> None:
        assert isinstance(backend, GraphableBackend)
        self._backend: GraphableBackend = backend
        self._sizes = num_decoded, num_prompt_tokens
        self._decode = backend.for_graphs([1, num_decoded], MAX_TOKENS)[num_decoded]
        self._drafted = backend.for_draft_graphs([2, num_decoded], MAX_TOKENS)[num_decoded]
        self._prefill = backend.for_prefill_graphs([16, num_prompt_tokens], 4, MAX_TOKENS)[num_prompt_tokens]
        self._parts: list[tuple[GraphedAttention, int, int]] = []

    def plan(self, batch: Batch) -> None:
        decode = self._drafted if batch.num_drafts else self._decode
        kinds = (decode, batch.decoded, self._sizes[0]), (self._prefill, batch.prompts, self._sizes[1])
        self._parts = []
        for graphed, sequences, size in kinds:
            if not sequences:
                continue
            graphed.plan(sequences)
            positions = [p for s in sequences for p in range(s.cached_len, s.device_len)]
            assert graphed.positions.tolist() == positions + [0] * (size - len(positions))
            self._parts.append((graphed, len(positions), size))

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, norm: Norm, rotation: Rotation, heads: LatentHeads, layer: int
    ) -> torch.Tensor:
        parts = self._parts
        lengths = [length for _, length, _ in parts]
        q, kv = (
            torch.cat([_padded(piece, size) for piece, (_, _, size) in zip(whole.split(lengths), parts, strict=True)])
            for whole in (q, kv)
        )
        positions = torch.cat([graphed.positions for graphed, _, _ in parts])
        attention: Attention = parts[0][0]
        if len(parts) > 1:
            attention = self._backend.joined(self._decode, self._prefill)
        assert isinstance(attention, LatentAttention)
        out = attention.attend(q, kv, norm, rotation.of(positions), heads, layer)
        # Padding may reach an expert router.
        assert out.isfinite().all()
        pieces = out.split([size for _, _, size in parts])
        return torch.cat([piece[:length] for piece, length in zip(pieces, lengths, strict=True)])


def _padded(rows: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat((rows, rows.new_zeros(size - len(rows), *rows.shape[1:])))


def triton(pool: KvPool, num_q_heads: int) -> LatentBackend:
    from tandem.engine.attention.latent_triton import LatentTritonAttention
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    assert isinstance(pool, CudaKvPool | PoolRegion)
    return LatentTritonAttention(cast(CudaKvPool, pool), num_q_heads)


def new_pool(page_size: int, dtype: str = "bfloat16") -> KvPool:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    layout = LatentLayout(NUM_LAYERS, page_size, KV_RANK, ROPE_DIM, dtype)
    return CudaKvPool(layout, MAX_TOKENS // page_size + 16, torch.device("cuda", 0))


def check_chunks(oracle: LatentOracle) -> tuple[TokenSequence, TokenSequence]:
    """Check chunks, decode steps and a mixed step. Returns a long sequence and one of middle length."""
    long, middle, short = oracle.add(1600), oracle.add(400), oracle.add(9)
    # Many new tokens are expanded, with and without a prefix; few are absorbed.
    oracle.step("prefill", {long: 800, short: 1}, max_error=MAX_ERROR)
    oracle.step("prefill", {middle: 250, long: 600, short: 4}, max_error=MAX_ERROR)
    oracle.step("prefill", {long: 100}, max_error=MAX_ERROR)
    for _ in range(2):
        oracle.step("decode", {short: 1, long: 1, middle: 1}, max_error=MAX_ERROR)
    oracle.step("decode", {long: 1}, max_error=MAX_ERROR)
    oracle.step("mixed", {long: 1, short: 1, middle: 40}, num_mixed=2, max_error=MAX_ERROR)
    return long, middle


def check_fixed_sizes(oracle: LatentOracle) -> None:
    """Check steps of up to 3 decoded sequences and 512 prompt tokens."""
    long, middle, short = oracle.add(2000), oracle.add(515), oracle.add(6)
    oracle.step("prefill", {long: 512}, max_error=MAX_ERROR)
    oracle.step("prefill", {long: 300, short: 1}, max_error=MAX_ERROR)
    oracle.step("prefill", {long: 511}, max_error=MAX_ERROR)
    oracle.step("prefill", {short: 1, long: 1, middle: 509}, max_error=MAX_ERROR)
    oracle.step("decode", {middle: 1, short: 1, long: 1}, max_error=MAX_ERROR)
    oracle.step("decode", {long: 1}, max_error=MAX_ERROR)
    oracle.step("mixed", {short: 1, long: 1, middle: 3}, num_mixed=2, max_error=MAX_ERROR)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("num_heads", "nope_dim", "value_dim"), SIZES)
def test_chunks_decode_and_mixed_steps(page_size: int, num_heads: int, nope_dim: int, value_dim: int) -> None:
    oracle = LatentOracle(new_pool(page_size), triton, num_heads, nope_dim, value_dim)
    long, middle = check_chunks(oracle)
    new = oracle.add(300)
    oracle.step("mixed", {middle: 1, long: 40, new: 290}, num_mixed=1, max_error=MAX_ERROR)


@pytest.mark.parametrize("num_decoded", [3, 40])
@pytest.mark.parametrize(("num_heads", "nope_dim", "value_dim"), SIZES)
def test_steps_of_fixed_sizes(num_decoded: int, num_heads: int, nope_dim: int, value_dim: int) -> None:
    oracle = LatentOracle(
        new_pool(16),
        lambda pool, heads: FixedSizeLatents(triton(pool, heads), num_decoded, 512),
        num_heads,
        nope_dim,
        value_dim,
    )
    check_fixed_sizes(oracle)


@pytest.mark.parametrize("num_fixed", [0, 4, 24], ids=["planned", "few rows", "fixed"])
@pytest.mark.parametrize(("num_heads", "nope_dim", "value_dim"), SIZES)
def test_steps_with_drafts(num_fixed: int, num_heads: int, nope_dim: int, value_dim: int) -> None:
    """In the sizes of published models, with drafts of one sequence in several tiles and parts."""
    oracle = LatentOracle(
        new_pool(16),
        lambda pool, heads: FixedSizeLatents(triton(pool, heads), num_fixed, 512) if num_fixed else triton(pool, heads),
        num_heads,
        nope_dim,
        value_dim,
    )
    long, middle, short = oracle.add(2100), oracle.add(400), oracle.add(30)
    for sequence, num_tokens in ((long, 512), (long, 512), (long, 512), (long, 500), (middle, 317), (short, 1)):
        oracle.step("prefill", {sequence: num_tokens}, max_error=MAX_ERROR)
    for num_new in (1, 2, 5, 8):
        if num_fixed != 4:
            oracle.step("decode", {middle: num_new, short: 1, long: 9 - num_new}, max_error=MAX_ERROR)
    oracle.step("decode", {long: 2, short: 1}, max_error=MAX_ERROR)
    oracle.step("decode", {long: 4}, max_error=MAX_ERROR)
    oracle.step("decode", {middle: 2}, max_error=MAX_ERROR)
    oracle.step("decode", {long: 1}, max_error=MAX_ERROR)


@pytest.mark.parametrize("is_drafter", [False, True])
def test_regions_of_pages(is_drafter: bool) -> None:
    """As the pages of a model and of the layers that draft for it, with states behind both."""
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    own, other = (LatentLayout(num, 16, KV_RANK, ROPE_DIM, "bfloat16") for num in (NUM_LAYERS, 3))
    layout = DraftedLayout(*((other, own) if is_drafter else (own, other)), 256, "bfloat16")
    pool = CudaKvPool(layout, MAX_TOKENS // 16, torch.device("cuda", 0))
    region = PoolRegion(pool, own, layout.drafter_offset if is_drafter else 0)
    oracle = LatentOracle(region, triton, 16, 128, 128)
    long, short = oracle.add(1200), oracle.add(60)
    oracle.step("prefill", {long: 900, short: 1}, max_error=MAX_ERROR)
    oracle.step("prefill", {long: 40, short: 30}, max_error=MAX_ERROR)
    oracle.step("decode", {long: 1, short: 1}, max_error=MAX_ERROR)
    oracle.step("decode", {long: 3, short: 1}, max_error=MAX_ERROR)
    oracle.step("decode", {long: 8, short: 8}, max_error=MAX_ERROR)


@pytest.mark.parametrize("page_size", [1, 16])
def test_other_sequences_change_no_bit(page_size: int) -> None:
    """In batches of one size. Neighbors have other lengths, contents and places."""
    oracle = LatentOracle(new_pool(page_size), triton, 16, 128, 128)
    watched, *others = [oracle.add(n) for n in (1500, 900, 70, 1300)]
    for s in (watched, *others):
        run(oracle, "prefill", [s], len(s.token_ids) - 200 if len(s.token_ids) > 400 else 60)

    def decoded(sequences: Sequence[TokenSequence]) -> torch.Tensor:
        return run(oracle, "decode", sequences, 1, keep=False)[list(sequences).index(watched)]

    first = decoded([watched, others[0], others[1]])
    for sequences in (
        [others[1], watched, others[0]],
        [others[2], others[0], watched],
        [others[2], others[1], watched],
    ):
        assert torch.equal(decoded(sequences), first)

    def continued(sequences: Sequence[TokenSequence]) -> torch.Tensor:
        place = list(sequences).index(watched)
        return run(oracle, "prefill", sequences, 10, keep=False)[place * 10 : place * 10 + 10]

    first = continued([watched, others[0]])
    for sequences in ([others[0], watched], [others[2], watched], [watched, others[1]]):
        assert torch.equal(continued(sequences), first)


def test_scattered_pages_change_no_bit() -> None:
    """Of contiguous pages and of scattered ones, each of one token."""
    outputs = []
    for is_scattered in (False, True):
        oracle = LatentOracle(new_pool(1), triton, 16, 128, 128)
        sequence = oracle.add(1000)
        if not is_scattered:
            sequence.page_ids = sorted(sequence.page_ids)
        outputs += [
            torch.cat((run(oracle, "prefill", [sequence], 600), run(oracle, "prefill", [sequence], 90))),
            run(oracle, "decode", [sequence], 1),
        ]
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])


def run(
    oracle: LatentOracle, mode: ForwardMode, sequences: Sequence[TokenSequence], num_tokens: int, keep: bool = True
) -> torch.Tensor:
    """Returns the last layer's output. Args: keep: False: the tokens are computed again later."""
    for s in sequences:
        s.extend(num_tokens)
    attention: AttentionBackend = oracle.attention
    attention.plan(Batch(mode, list(sequences)))
    for layer in range(NUM_LAYERS):
        out = oracle.attend(sequences, layer)
    for s in sequences:
        if keep:
            s.complete_extend()
        else:
            s.device_len = s.cached_len
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decodes_as_plain_torch(dtype: str) -> None:
    outputs = []
    for make_backend in (triton, LatentReferenceAttention):
        oracle = LatentOracle(new_pool(16, dtype), make_backend, 16, 128, 128)
        sequences = [oracle.add(n) for n in (700, 33)]
        run(oracle, "prefill", sequences, 32)
        run(oracle, "prefill", sequences[:1], 660)
        outputs.append(run(oracle, "decode", sequences, 1).double())
    assert (outputs[0] - outputs[1]).norm() <= MAX_ERROR * outputs[1].norm()


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (LatentLayout(2, 16, 512, 64, "float32"), "compute bfloat16 and float16, not float32"),
        (LatentLayout(2, 16, 192, 64, "bfloat16"), "compute kv_lora_rank 64, 128, 256, 512, not 192"),
        (LatentLayout(2, 16, 512, 8, "bfloat16"), "compute qk_rope_head_dim 16, 32, 64, not 8"),
    ],
)
def test_unsupported_sizes(layout: LatentLayout, reason: str) -> None:
    from tandem.engine.attention.latent_triton import LatentTritonAttention

    assert LatentTritonAttention.why_not(layout, 16, torch.device("cuda", 0)).endswith(reason)
