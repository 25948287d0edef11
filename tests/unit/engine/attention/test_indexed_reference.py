"""Attention over chosen latents against dense attention with the same mask, over pages full of NaN.

Whole models are compared with transformers' in tests/unit/engine/models/test_decoder.py.
"""

import itertools
import math
import random
from typing import NamedTuple

import pytest
import torch

from tandem.engine.attention.base import Index, LatentHeads
from tandem.engine.attention.indexed_layout import IndexedLayout
from tandem.engine.attention.indexed_reference import IndexedReferenceAttention
from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.batch import Batch, ForwardMode
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.rotary import RotaryEmbedding, Rotation, rotate, rotate_pairs
from tandem.engine.token_sequence import TokenSequence

CPU = torch.device("cpu")
NUM_HEADS, NOPE, ROPE, VALUE, RANK = 3, 12, 4, 16, 32
INDEX_HEADS, INDEX_DIM, TOP_K = 5, 10, 8
LAYERS = 2
_names = itertools.count()


class Tokens(NamedTuple):
    """All projections of a sequence, in each layer."""

    q: torch.Tensor
    kv: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    weights: torch.Tensor


class Oracle:
    def __init__(self, page_size: int) -> None:
        self.layout = IndexedLayout(LAYERS, page_size, RANK, ROPE, INDEX_DIM, "float32")
        self.pool = CpuKvPool(self.layout, 200, f"test-indexed-{next(_names)}")
        self.pool.memory.view(torch.float32).fill_(math.nan)
        self.attention = IndexedReferenceAttention(self.pool, NUM_HEADS)
        self._free = random.Random(0).sample(range(200), 200)
        self._random = torch.Generator().manual_seed(0)
        self._tables = RotaryEmbedding(ROPE, 1e4, None, 512, CPU)
        self._heads = LatentHeads(self.normal(NUM_HEADS, NOPE, RANK), self.normal(NUM_HEADS, VALUE, RANK), 0.05)
        self._norm = Norm(1 + self.normal(RANK) / 5, 1e-6)
        self.tokens: dict[int, Tokens] = {}

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random)

    def add(self, length: int) -> TokenSequence:
        pages = [self._free.pop() for _ in range(self.layout.num_pages_for(length))]
        sequence = TokenSequence([0] * length, length, pages)
        self.tokens[id(sequence)] = Tokens(
            self.normal(LAYERS, length, NUM_HEADS, NOPE + ROPE),
            self.normal(LAYERS, length, RANK + ROPE),
            self.normal(LAYERS, length, INDEX_HEADS, INDEX_DIM),
            self.normal(LAYERS, length, INDEX_DIM),
            self.normal(LAYERS, length, INDEX_HEADS),
        )
        return sequence

    def run(self, mode: ForwardMode, extend: dict[TokenSequence, int], num_mixed: int = 0) -> list[torch.Tensor]:
        """Computes one forward pass, and returns each layer's output."""
        for s, count in extend.items():
            s.extend(count)
        self.attention.plan(Batch(mode, list(extend), num_mixed=num_mixed))
        outputs = []
        positions = torch.cat([torch.arange(s.cached_len, s.device_len) for s in extend])
        for layer in range(LAYERS):
            new = [Tokens(*(t[layer, s.cached_len : s.device_len] for t in self.tokens[id(s)])) for s in extend]
            q, kv, queries, keys, weights = (torch.cat(parts) for parts in zip(*new, strict=True))
            index = Index(queries, keys, weights, TOP_K)
            rotation = Rotation(self._tables, positions, torch.float32)
            outputs.append(self.attention.attend(q, kv, self._norm, rotation, self._heads, index, layer))
        return outputs

    def check(self, mode: ForwardMode, extend: dict[TokenSequence, int], num_mixed: int = 0) -> None:
        outputs = self.run(mode, extend, num_mixed)
        for layer, out in enumerate(outputs):
            expected = torch.cat([self.expected(s, layer) for s in extend])
            torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
        for s in extend:
            s.complete_extend()

    def expected(self, s: TokenSequence, layer: int) -> torch.Tensor:
        """One query after another, over the tokens of the largest scores."""
        q, kv, queries, keys, weights = (t[layer, : s.device_len] for t in self.tokens[id(s)])
        rotation = Rotation(self._tables, torch.arange(s.device_len), torch.float32)
        q = torch.cat((q[..., :NOPE], rotate_pairs(q[..., NOPE:], *rotation.cos_sin)), -1)
        k_rope = rotate_pairs(kv[:, None, RANK:], *rotation.cos_sin)[:, 0]
        queries, keys = (
            torch.cat((rotate(x[..., :ROPE], *rotation.cos_sin), x[..., ROPE:]), -1) for x in (queries, keys[:, None])
        )
        latents = kv[:, :RANK] / (kv[:, :RANK].square().mean(-1, keepdim=True) + 1e-6).sqrt() * self._norm.weight
        rows = []
        for position in range(s.cached_len, s.device_len):
            scores = [
                sum(float(w * max(a @ key[0], 0)) for w, a in zip(weights[position], queries[position], strict=True))
                for key in keys[: position + 1]
            ]
            chosen = sorted(range(position + 1), key=lambda token: -scores[token])[:TOP_K]
            for head in range(NUM_HEADS):
                head_keys = torch.cat((latents[chosen] @ self._heads.keys[head].T, k_rope[chosen]), -1)
                share = (head_keys @ q[position, head] * self._heads.scale).softmax(0)
                rows.append(share @ (latents[chosen] @ self._heads.values[head].T))
        return torch.stack(rows).view(s.extend_len, NUM_HEADS * VALUE)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_chunks_decode_and_mixed_steps(page_size: int) -> None:
    oracle = Oracle(page_size)
    long, short, new = oracle.add(40), oracle.add(TOP_K + 2), oracle.add(25)
    oracle.check("prefill", {long: 17, short: 3})
    oracle.check("prefill", {short: TOP_K - 3, long: 9})
    oracle.check("decode", {short: 1, long: 1})
    oracle.check("mixed", {long: 1, new: 20}, num_mixed=1)
    oracle.check("mixed", {short: 1, new: 5, long: 10}, num_mixed=1)


def test_equal_scores_choose_the_first_tokens() -> None:
    oracle = Oracle(4)
    sequence = oracle.add(20)
    for weights in oracle.tokens[id(sequence)].weights:
        weights.zero_()
    oracle.check("prefill", {sequence: 20})


def test_other_sequences_and_places_change_no_bit() -> None:
    outputs = []
    for others in (False, True):
        oracle = Oracle(4)
        watched, other = oracle.add(30), oracle.add(21)
        if others:
            random.Random(1).shuffle(watched.page_ids)  # type: ignore[arg-type]
        steps: list[dict[TokenSequence, int]] = [{watched: 29}, {watched: 1}]
        if others:
            steps = [{other: 20, watched: 29}, {other: 1, watched: 1}]
        for step in steps:
            outputs += [out[-step[watched] :] for out in oracle.run("prefill", step)]
            for s in step:
                s.complete_extend()
    half = len(outputs) // 2
    for a, b in zip(outputs[:half], outputs[half:], strict=True):
        assert torch.equal(a, b)


def test_reads_no_pages_without_index_keys() -> None:
    layout = LatentLayout(LAYERS, 4, RANK, ROPE, "float32")
    reason = "IndexedReferenceAttention reads latents with index keys, not pages of latent/float32/2x4x32+4"
    assert IndexedReferenceAttention.why_not(layout, NUM_HEADS, CPU) == reason
