"""Mixed attention into one output, with the reference backend for each kind."""

import itertools
from collections.abc import Sequence

import pytest
import torch

from tandem.engine.attention.base import HeadBackend, PlannedAttention
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.mixed import plan_by_kind
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.attention.scales import KvScales
from tandem.engine.batch import Batch
from tandem.engine.kvcache.pool import CpuKvPool, KvPool
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import Rotation
from tandem.engine.token_sequence import TokenSequence
from tests.fakes.attention import AttentionOracle

CPU = torch.device("cpu")
HEAD_DIM = 16
_names = itertools.count()


class Planned(PlannedAttention):
    def __init__(self, reference: ReferenceAttention, batch: Batch, asked: list[bool]) -> None:
        """Args: asked: collects per call whether `out` was given."""
        self._reference = reference
        self._positions = [p for s in batch.sequences for p in range(s.cached_len, s.device_len)]
        self._asked = asked
        reference.plan(batch)

    def attend(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert rotation.positions.tolist() == self._positions and len(qkv) == len(self._positions)
        assert qkv.is_contiguous()
        attended = self._reference.attend(qkv, rotation, qk_norm, layer)
        self._asked.append(out is not None)
        if out is None:
            return attended
        assert out.is_contiguous()
        return out.copy_(attended)


class ByKind(HeadBackend):
    def __init__(self, pool: KvPool, num_q_heads: int, kv_scales: KvScales | None = None) -> None:
        self._kinds = ReferenceAttention(pool, num_q_heads), ReferenceAttention(pool, num_q_heads)
        self._num_columns = num_q_heads * HEAD_DIM
        self.asked: list[bool] = []

    def plan(self, batch: Batch) -> None:
        decode, prefill = self._kinds

        def plan_decode(sequences: Sequence[TokenSequence]) -> PlannedAttention:
            return Planned(decode, Batch.of(sequences, ()), self.asked)

        def plan_prefill(sequences: Sequence[TokenSequence]) -> PlannedAttention:
            return Planned(prefill, Batch.of((), sequences), self.asked)

        self._planned = plan_by_kind(batch, plan_decode, plan_prefill, self._num_columns, CPU)

    def attend(self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int) -> torch.Tensor:
        return self._planned.attend(qkv, rotation, qk_norm, layer)


@pytest.mark.parametrize("page_size", [1, 16])
def test_each_kind_writes_its_rows(page_size: int) -> None:
    pool = CpuKvPool(KvHeadLayout(2, page_size, 2, HEAD_DIM, "float32"), 120, f"test-mixed-{next(_names)}")
    made: list[ByKind] = []

    def make(pool: KvPool, num_q_heads: int) -> HeadBackend:
        made.append(ByKind(pool, num_q_heads))
        return made[0]

    oracle = AttentionOracle(pool, 4, make)
    a, b, c = oracle.add(30), oracle.add(23), oracle.add(40)
    oracle.step("prefill", {a: 27, b: 5}, max_error=1e-6)
    oracle.step("decode", {b: 1, a: 1}, max_error=1e-6)
    # A single kind allocates its own output.
    assert not any(made[0].asked)
    made[0].asked.clear()
    oracle.step("mixed", {b: 1, c: 20}, max_error=1e-6, num_mixed=1)
    oracle.step("mixed", {a: 1, c: 1, b: 16}, max_error=1e-6, num_mixed=2)
    assert all(made[0].asked) and len(made[0].asked) == 2 * 2 * 2
