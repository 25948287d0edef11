"""Pieces behind prefixes of up to 32,000 tokens, whose prefixes are cut into parts, against plain softmax attention."""

import math
from collections.abc import Sequence

import pytest
import torch

from tandem.engine.attention.base import GraphableHeadBackend, GraphedHeadAttention
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.prefix_parts import MAX_TOKENS, CutRule, cut_prefixes
from tandem.engine.batch import Batch
from tandem.engine.layers.rotary import RotaryEmbedding, Rotation
from tandem.engine.token_sequence import TokenSequence

MAX_ERROR = 5e-3
MAX_LEN = 32_768
HEADS = (32, 8, 128)
DEVICE = torch.device("cuda", 0)
# Cycles of the device, about 3 ms: more than a plan takes.
REPLAY_DELAY = 5_000_000
# (new tokens, prefix) of each piece of a batch.
Shapes = tuple[tuple[int, int], ...]


class Pieces:
    """One layer's pool, NaN but for the prefixes of some pieces, and their new queries, keys and values."""

    def __init__(self, shapes: Shapes, page_size: int = 16, heads: tuple[int, int, int] = HEADS) -> None:
        """Args: heads: query heads, key heads and their size."""
        self.num_q_heads, num_kv_heads, head_dim = heads
        self.layout = KvHeadLayout(1, page_size, num_kv_heads, head_dim, "bfloat16")
        numbers = [self.layout.num_pages_for(sum(shape)) for shape in shapes]
        from tandem.engine.kvcache.cuda_pool import CudaKvPool

        self.pool = CudaKvPool(self.layout, sum(numbers), DEVICE)
        self.kv = self.layout.view(self.pool.memory)[:, 0]  # (num_pages, 2, page_size, num_kv_heads, head_dim)
        self.kv.fill_(math.nan)
        generator = torch.Generator().manual_seed(0)
        pages = torch.randperm(sum(numbers), generator=generator).tolist()
        self.sequences = []
        self.news = []
        for (num_new, prefix_len), num_pages in zip(shapes, numbers, strict=True):
            page_ids, pages = pages[:num_pages], pages[num_pages:]
            sequence = TokenSequence([0] * (num_new + prefix_len), num_new + prefix_len, page_ids, prefix_len)
            sequence.extend(num_new)
            self.sequences.append(sequence)
            of_piece = torch.Generator(DEVICE).manual_seed(len(self.news))
            prefix = torch.randn(2, prefix_len, num_kv_heads, head_dim, generator=of_piece, device=DEVICE)
            num_heads = self.num_q_heads + 2 * num_kv_heads
            new = torch.randn(num_new, num_heads, head_dim, generator=of_piece, device=DEVICE)
            self.news.append(new.bfloat16())
            places, offsets = self._slots(sequence, prefix_len)
            self.kv[places, :, offsets] = prefix.transpose(0, 1).bfloat16()
        self.tables = RotaryEmbedding(head_dim, 1e4, None, MAX_LEN + 1024, DEVICE)
        self.tables.cos.fill_(1.0)
        self.tables.sin.fill_(0.0)

    def num_parts(self, chosen: Sequence[int]) -> int:
        tile_rows = 192 if self.layout.head_dim == 64 else 128
        num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        rule = CutRule(self.num_q_heads, self.layout.num_kv_heads, tile_rows, num_sms)
        sequences = [self.sequences[number] for number in chosen]
        return cut_prefixes(rule, self.layout, sequences, sum(s.extend_len for s in sequences)).num_parts

    def backend(self) -> GraphableHeadBackend:
        from tandem.engine.attention.flashinfer import FlashInferAttention

        backend = FlashInferAttention(self.pool, self.num_q_heads)
        if not backend.graphs_new_prompts:
            pytest.skip("this GPU has no kernels for Hopper")
        return backend

    def qkv(self, chosen: Sequence[int]) -> torch.Tensor:
        return torch.cat([self.news[number] for number in chosen])

    def rotation(self, positions: torch.Tensor) -> Rotation:
        return Rotation(self.tables, positions, self.news[0].dtype)

    def launched(self, backend: GraphableHeadBackend, chosen: Sequence[int]) -> torch.Tensor:
        sequences = [self.sequences[number] for number in chosen]
        backend.plan(Batch("prefill", sequences))
        positions = torch.cat([torch.arange(s.cached_len, s.device_len, device=DEVICE) for s in sequences])
        return backend.attend(self.qkv(chosen), self.rotation(positions), None, 0)

    def check(self, out: torch.Tensor, chosen: Sequence[int]) -> None:
        start = 0
        for number in chosen:
            sequence, new = self.sequences[number], self.news[number]
            end = start + len(new)
            expected = self._expected(sequence, new[:, : self.num_q_heads])
            error = (out[start:end].float() - expected).norm() / expected.norm()
            assert error <= MAX_ERROR, f"piece of {len(new)} behind {sequence.cached_len}: error {error:.4f}"
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


class Graph:
    """One layer's attention in a CUDA graph, of pieces with padding."""

    def __init__(self, pieces: Pieces, graphed: GraphedHeadAttention) -> None:
        self._pieces = pieces
        self._graphed = graphed
        graphed.plan(())
        new = pieces.news[0]
        self._qkv = torch.zeros(len(graphed.positions), *new.shape[1:], dtype=new.dtype, device=DEVICE)
        self._run()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = self._run()

    def replay(self, chosen: Sequence[int]) -> torch.Tensor:
        """Returns the pieces' rows, then padding; computed later."""
        self._graphed.plan([self._pieces.sequences[number] for number in chosen])
        new = self._pieces.qkv(chosen)
        self._qkv.zero_()
        self._qkv[: len(new)] = new
        # The host makes the next plan while this replay waits.
        torch.cuda._sleep(REPLAY_DELAY)
        for _ in range(2):
            self._out.fill_(math.nan)
            self._graph.replay()
        return self._out.clone()

    def _run(self) -> torch.Tensor:
        return self._graphed.attend(self._qkv.clone(), self._pieces.rotation(self._graphed.positions), None, 0)


SEVERAL: Shapes = ((96, 16_000), (32, 0), (20, 5), (7, 31_001), (64, 5000))


# Each kind of heads compiles kernels for seconds.
@pytest.mark.parametrize(("page_size", "heads"), [(1, HEADS), (16, (9, 3, 64)), (64, (8, 1, 256))])
def test_pieces_behind_long_prefixes(page_size: int, heads: tuple[int, int, int]) -> None:
    pieces = Pieces(((32, 32_000), (200, 9001), *SEVERAL), page_size, heads)
    backend = pieces.backend()
    for chosen in ([0], [1], range(2, 2 + len(SEVERAL))):
        assert pieces.num_parts(chosen) > 1
        pieces.check(pieces.launched(backend, chosen), chosen)


def test_pieces_around_the_shortest_cut_prefix() -> None:
    shapes = tuple((num_new, prefix_len) for num_new in (1, 64, 128, 256, 272) for prefix_len in (0, 15, 2048, 8000))
    pieces = Pieces(shapes)
    backend = pieces.backend()
    for number in range(len(shapes)):
        pieces.check(pieces.launched(backend, [number]), [number])


@pytest.mark.parametrize("is_queued", [False, True])
def test_graphs_read_long_and_short_prefixes_in_turns(is_queued: bool) -> None:
    """Graphs of two sizes share one plan: with parts, without, with more, and again. A queued plan is made before the
    replay before it ends."""
    shapes = ((128, 20_000), (256, 8000), (128, 100), (100, 300), (9, 0), (40, 9000), (60, 16_000), (5, 70))
    pieces = Pieces(shapes)
    backend = pieces.backend()
    sizes = (128, MAX_TOKENS)
    attention = backend.for_prefill_graphs(sizes, 4, MAX_LEN // pieces.layout.page_size)
    graphs = {size: Graph(pieces, attention[size]) for size in sizes}
    replayed = []
    for size, chosen in (
        (128, [0]),
        (256, [2, 3, 4]),
        (256, [1]),
        (128, [0]),
        (128, [2]),
        (128, [5, 6]),
        (256, [5, 6, 0]),
        (128, [7]),
        (128, [0]),
        (256, [1]),
    ):
        replayed.append((graphs[size].replay(chosen), chosen))
        if not is_queued:
            torch.cuda.synchronize()
    for out, chosen in replayed:
        assert out.isfinite().all()
        pieces.check(out, chosen)
        # Padding may change the cut.
        if len(out) == len(pieces.qkv(chosen)):
            assert out.equal(pieces.launched(backend, chosen)), "a graph has other bits than a single launch"


def test_memory_of_parts_is_taken_before_the_first_cut() -> None:
    """The first short pieces of a worker measure its memory."""
    pieces = Pieces(((64, 0), (64, 16), (64, 16_000)))
    backend = pieces.backend()
    taken = []
    for number in range(3):
        pieces.launched(backend, [number])
        taken.append(torch.cuda.memory_allocated())
    assert taken[1] - taken[0] > 16 * 2**20
    assert taken[2] - taken[1] < 2**20


def test_neither_runs_nor_neighbours_change_a_bit() -> None:
    pieces = Pieces(((64, 16_000), (64, 0), (64, 30_000), (64, 2100), (64, 16_000)))
    backend = pieces.backend()
    assert pieces.num_parts([0, 1]) > 1
    expected = pieces.launched(backend, [0, 1])[:64]
    for neighbour in (1, 2, 3, 4, 2, 1):
        for _ in range(4):
            assert pieces.launched(backend, [0, neighbour])[:64].equal(expected)


def test_memory_made_in_inference_mode_is_planned_outside_of_it() -> None:
    """As by an engine: forward passes run in inference mode, start-up plans outside of it."""
    pieces = Pieces(((64, 16_000),))
    backend = pieces.backend()
    with torch.inference_mode():
        expected = pieces.launched(backend, [0]).clone()
    assert pieces.launched(backend, [0]).equal(expected)
    pieces.check(expected, [0])
