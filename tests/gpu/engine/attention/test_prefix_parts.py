"""Pieces behind prefixes of up to 32,000 tokens, whose prefixes are cut into parts, against plain softmax attention."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from tandem.engine.attention.base import HeadAttention
from tandem.engine.attention.flashinfer import FlashInferAttention
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.prefix_parts import CutRule, cut_prefixes
from tandem.engine.batch import Batch
from tandem.engine.kvcache.cuda_pool import CudaKvPool
from tandem.engine.layers.rotary import RotaryEmbedding, Rotation
from tandem.engine.token_sequence import TokenSequence

MAX_ERROR = 5e-3
MAX_LEN = 32_768
HEADS = (32, 8, 128)
DEVICE = torch.device("cuda", 0)
# (new tokens, prefix) of each piece of a batch.
Shapes = Sequence[tuple[int, int]]


class Pieces:
    """One layer's pool, NaN but for the prefixes of some pieces, and their new queries, keys and values."""

    def __init__(self, shapes: Shapes, page_size: int = 16, heads: tuple[int, int, int] = HEADS) -> None:
        """Args: heads: query heads, key heads and their size."""
        self.num_q_heads, num_kv_heads, head_dim = heads
        self.layout = KvHeadLayout(1, page_size, num_kv_heads, head_dim, "bfloat16")
        numbers = [self.layout.num_pages_for(sum(shape)) for shape in shapes]
        self.pool = CudaKvPool(self.layout, sum(numbers), DEVICE)
        self.kv = self.layout.view(self.pool.memory)[:, 0]  # (num_pages, 2, page_size, num_kv_heads, head_dim)
        self.kv.fill_(math.nan)
        generator = torch.Generator().manual_seed(0)
        pages = torch.randperm(sum(numbers), generator=generator).tolist()
        self.sequences = []
        news = []
        for number, ((num_new, prefix_len), num_pages) in enumerate(zip(shapes, numbers, strict=True)):
            page_ids, pages = pages[:num_pages], pages[num_pages:]
            sequence = TokenSequence([0] * (num_new + prefix_len), num_new + prefix_len, page_ids, prefix_len)
            sequence.extend(num_new)
            self.sequences.append(sequence)
            # A piece's numbers depend on its place and shape alone.
            of_piece = torch.Generator(DEVICE).manual_seed(number)
            prefix = torch.randn(2, prefix_len, num_kv_heads, head_dim, generator=of_piece, device=DEVICE)
            news.append(
                torch.randn(
                    num_new, self.num_q_heads + 2 * num_kv_heads, head_dim, generator=of_piece, device=DEVICE
                ).bfloat16()
            )
            places, offsets = self._slots(sequence, prefix_len)
            self.kv[places, :, offsets] = prefix.transpose(0, 1).bfloat16()
        self.qkv = torch.cat(news)
        self.tables = RotaryEmbedding(head_dim, 1e4, None, MAX_LEN + 1024, DEVICE)
        self.tables.cos.fill_(1.0)
        self.tables.sin.fill_(0.0)

    def num_parts(self, num_tokens: int) -> int:
        tile_rows = 192 if self.layout.head_dim == 64 else 128
        num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        rule = CutRule(self.num_q_heads, self.layout.num_kv_heads, tile_rows, num_sms)
        return cut_prefixes(rule, self.layout, self.sequences, num_tokens).num_parts

    def backend(self) -> FlashInferAttention:
        backend = FlashInferAttention(self.pool, self.num_q_heads)
        if not backend.graphs_new_prompts:
            pytest.skip("this GPU has no kernels for Hopper")
        return backend

    def run(self, attention: HeadAttention, size: int) -> torch.Tensor:
        """Args: size: tokens, of which the last are padding."""
        num_padding = size - len(self.qkv)
        qkv = torch.cat((self.qkv, self.qkv.new_zeros(num_padding, *self.qkv.shape[1:])))
        return attention.attend(qkv, self.rotation(size), None, 0)

    def rotation(self, size: int) -> Rotation:
        positions = [p for s in self.sequences for p in range(s.cached_len, s.device_len)]
        padded = torch.tensor(positions + [0] * (size - len(positions)), device=DEVICE)
        return Rotation(self.tables, padded, self.qkv.dtype)

    def launched(self, backend: FlashInferAttention) -> torch.Tensor:
        backend.plan(Batch("prefill", self.sequences))
        return self.run(backend, len(self.qkv))

    def check(self, out: torch.Tensor) -> None:
        start = 0
        for sequence in self.sequences:
            end = start + sequence.extend_len
            expected = self._expected(sequence, self.qkv[start:end, : self.num_q_heads])
            error = (out[start:end].float() - expected).norm() / expected.norm()
            assert error <= MAX_ERROR, f"piece of {sequence.extend_len} behind {sequence.cached_len}: error {error:.4f}"
            start = end

    def _slots(self, sequence: TokenSequence, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(length, device=DEVICE)
        page_ids = torch.tensor(sequence.page_ids, device=DEVICE)
        return page_ids[positions // self.layout.page_size], positions % self.layout.page_size

    def _expected(self, sequence: TokenSequence, q: torch.Tensor) -> torch.Tensor:
        places, offsets = self._slots(sequence, sequence.device_len)
        k, v = self.kv[places, :, offsets].float().unbind(1)  # (length, num_kv_heads, head_dim) each
        future = torch.ones(len(q), len(k), device=DEVICE).triu(len(k) - len(q) + 1).bool()
        group = self.num_q_heads // self.layout.num_kv_heads
        heads = []
        for head in range(self.num_q_heads):
            scores = q[:, head].float() @ k[:, head // group].T / math.sqrt(self.layout.head_dim)
            heads.append(scores.masked_fill(future, -math.inf).softmax(1) @ v[:, head // group])
        return torch.stack(heads, 1).flatten(1)


def graph_of(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


SEVERAL: Shapes = ((96, 16_000), (32, 0), (20, 5), (7, 31_001), (64, 5000))


# Each pair compiles kernels for seconds, so they are not crossed.
@pytest.mark.parametrize(
    ("page_size", "heads"),
    [(1, HEADS), (16, HEADS), (64, HEADS), (16, (9, 3, 64)), (1, (4, 4, 128)), (16, (8, 1, 256))],
)
@pytest.mark.parametrize("shapes", [((32, 32_000),), ((200, 9001),), SEVERAL])
def test_pieces_behind_long_prefixes(page_size: int, heads: tuple[int, int, int], shapes: Shapes) -> None:
    pieces = Pieces(shapes, page_size, heads)
    backend = pieces.backend()
    assert pieces.num_parts(len(pieces.qkv)) > 1
    pieces.check(pieces.launched(backend))


@pytest.mark.parametrize("num_new", [1, 64, 128, 256, 480])
@pytest.mark.parametrize("prefix_len", [0, 15, 1024, 2048, 4100])
def test_pieces_around_the_shortest_cut_prefix(num_new: int, prefix_len: int) -> None:
    pieces = Pieces([(num_new, prefix_len)])
    pieces.check(pieces.launched(pieces.backend()))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_graph_reads_long_and_short_prefixes(page_size: int) -> None:
    """Plans of one graph follow each other: with parts, without, with more, and all padding."""
    size = 128
    batches: list[Shapes] = [
        ((128, 20_000),),
        ((128, 0),),
        ((100, 300), (9, 0)),
        ((40, 9000), (60, 16_000)),
        ((5, 70),),
    ]
    pieces = Pieces([shape for shapes in batches for shape in shapes], page_size)
    backend = pieces.backend()
    graphed = backend.for_prefill_graphs([size, 512], 4, MAX_LEN // page_size)[size]
    graphed.plan(())
    qkv = torch.zeros(size, *pieces.qkv.shape[1:], dtype=pieces.qkv.dtype, device=DEVICE)
    rotation = Rotation(pieces.tables, graphed.positions, qkv.dtype)
    graph, out = graph_of(lambda: graphed.attend(qkv.clone(), rotation, None, 0))
    start = first = 0
    for shapes in batches:
        chosen = pieces.sequences[first : first + len(shapes)]
        first += len(shapes)
        new = pieces.qkv[start : start + sum(num_new for num_new, _ in shapes)]
        start += len(new)
        graphed.plan(chosen)
        qkv.zero_()
        qkv[: len(new)] = new
        for _ in range(3):
            out.fill_(math.nan)
            graph.replay()
        assert out.isfinite().all()
        whole, sequences = pieces.qkv, pieces.sequences
        pieces.qkv, pieces.sequences = new, chosen
        pieces.check(out[: len(new)])
        # A batch of new prompts has another kernel.
        if len(new) == size and any(s.cached_len for s in chosen):
            assert out.equal(pieces.launched(backend)), "a graph has other bits than a single launch"
        pieces.qkv, pieces.sequences = whole, sequences


def test_runs_have_equal_bits() -> None:
    pieces = Pieces([(64, 30_000), (64, 7000)])
    backend = pieces.backend()
    assert pieces.num_parts(128) > 2
    expected = pieces.launched(backend)
    for _ in range(20):
        assert pieces.launched(backend).equal(expected)


def test_neighbours_change_no_bit() -> None:
    alone, *others = (
        Pieces([(64, 16_000), neighbour]) for neighbour in ((64, 0), (64, 30_000), (64, 2100), (64, 16_000))
    )
    expected = alone.launched(alone.backend())[:64]
    for pieces in others:
        assert pieces.launched(pieces.backend())[:64].equal(expected)
