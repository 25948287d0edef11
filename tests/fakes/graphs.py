"""CUDA graphs in plain torch: a replay calls the captured function again."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tandem.engine import draft_graphs, graph_runner, mixed_graphs, prefill_graphs
from tandem.engine.attention.base import GraphableHeadBackend, GraphedAttention, GraphedHeadAttention, HeadAttention
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.mixed import graphed_by_kind
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.batch import Batch, ForwardMode
from tandem.engine.draft_models import pass_graphs
from tandem.engine.draws import Draws, draw
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import Rotation
from tandem.engine.output import Feed, ForwardOutput
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import Packed
from tandem.sampling_params import SamplingParams
from tests.fakes.model_config import TINY_LLAMA

NUM_HEADS = cast(int, TINY_LLAMA["num_attention_heads"])


class FixedSize(GraphedHeadAttention):
    """Attention of one kind by the reference backend; padding rows write nowhere and give zeros."""

    def __init__(self, pool: KvPool, mode: ForwardMode, size: int, num_heads: int) -> None:
        self._reference = ReferenceAttention(pool, num_heads)
        self._num_heads = num_heads
        self._mode = mode
        self._num_tokens = 0
        self.positions = torch.zeros(size, dtype=torch.int32)

    def plan(self, sequences: Sequence[TokenSequence]) -> None:
        positions = [p for s in sequences for p in range(s.cached_len, s.device_len)]
        self._num_tokens = len(positions)
        self.positions.zero_()
        self.positions[: len(positions)] = torch.tensor(positions, dtype=torch.int32)
        if sequences:
            rows = [0 if s.num_pending else -1 for s in sequences]
            feed = Feed(cast(ForwardOutput, None), rows) if max(rows) == 0 else None
            self._reference.plan(Batch(self._mode, sequences, feed))

    def attend(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert rotation.positions is self.positions and len(qkv) == len(self.positions)
        if out is None:
            out = qkv.new_empty(len(qkv), self._num_heads * qkv.shape[-1])
        assert len(out) == len(qkv)
        out.zero_()
        if n := self._num_tokens:
            out[:n] = self._reference.attend(qkv[:n], rotation.of(self.positions[:n]), qk_norm, layer)
        return out


class FixedSizes(ReferenceAttention, GraphableHeadBackend):
    def for_graphs(self, batch_sizes: Sequence[int], max_pages_per_sequence: int) -> dict[int, GraphedHeadAttention]:
        return {size: FixedSize(self.pool, "decode", size, self._num_heads) for size in batch_sizes}

    def for_prefill_graphs(
        self, sizes: Sequence[int], max_sequences: int, max_pages_per_sequence: int
    ) -> dict[int, GraphedHeadAttention]:
        return {size: FixedSize(self.pool, "prefill", size, self._num_heads) for size in sizes}

    def for_new_prompt_graphs(self, sizes: Sequence[int], max_sequences: int) -> dict[int, GraphedHeadAttention]:
        return {size: FixedSize(self.pool, "prefill", size, self._num_heads) for size in sizes}

    def for_draft_graphs(self, sizes: Sequence[int], max_pages_per_sequence: int) -> dict[int, GraphedHeadAttention]:
        return {size: FixedSize(self.pool, "decode", size, self._num_heads) for size in sizes}

    def joined(self, decode: GraphedAttention, prefill: GraphedAttention) -> HeadAttention:
        assert isinstance(self.pool.layout, KvHeadLayout)
        return graphed_by_kind(decode, prefill, self._num_heads * self.pool.layout.head_dim)

    def __init__(self, pool: KvPool, num_heads: int = NUM_HEADS) -> None:
        super().__init__(pool, num_heads)
        self.pool = pool
        self._num_heads = num_heads


class Capture:
    """A graph that runs the captured function again."""

    def __init__(self, device: torch.device) -> None:
        pass

    def __enter__(self) -> "Capture":
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def capture(self, run: Callable[[], None], warm_up: Callable[[], None]) -> Any:
        warm_up()
        run()
        return SimpleNamespace(replay=run)


class MostLikely:
    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        pass

    def find(self, logits: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(logits.argmax(dim=-1))


def draw_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    u: torch.Tensor,
    number: torch.Tensor,
    out: torch.Tensor,
    drawn: torch.Tensor,
    has_filters: bool,
) -> None:
    """As the kernel, by the sampler."""
    params = zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    for row, (t, k, p, m) in enumerate(params):
        out[row] = logits[row].argmax()
        if t > 0:
            assert has_filters or (k <= 0 and p == 1)
            sequence = TokenSequence([0], 1, (), sampling=SamplingParams(1, t, k, p, m))
            draws = Draws.of([sequence], logits.shape[1], logits.device)
            uniform = u[number, row].view(1, 1)
            out[row] = draw(logits[row : row + 1].float(), replace(draws, u=uniform))[0]
    drawn[number, : len(out)] = out


def replay_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("tandem.engine.layers.most_likely")
    module.MostLikely = MostLikely  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module = ModuleType("tandem.engine.draft_models.draw_kernel")
    module.draw_tokens = draw_tokens  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for graphs in (draft_graphs, graph_runner, prefill_graphs, mixed_graphs, pass_graphs):
        monkeypatch.setattr(graphs, "GraphCapture", Capture)

    def copy_to(self: Packed, memory: torch.Tensor) -> None:
        memory[: self.num_bytes].copy_(self._on_host(pinned=False))

    monkeypatch.setattr(Packed, "copy_to", copy_to)
