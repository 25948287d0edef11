"""Triton kernels of adapters against plain torch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tandem.engine.adapters.base import NO_ADAPTER
from tandem.engine.adapters.products import ReferenceProducts
from tandem.engine.adapters.rows import AdapterRows, GraphedRows
from tandem.engine.adapters.weights import AdapterWeights

CUDA = torch.device("cuda")
NUM_SLOTS = 6
# Outputs, inputs, largest rank.
QKV, GATE_UP, DOWN, ODD = (
    ([2048, 512, 512], 1024, 64),
    ([1536, 1536], 1024, 16),
    ([1024], 3584, 128),
    ([72, 24], 100, 8),
)
# Of tiles of each size, not full and full.
NUM_ROWS = (1, 32, 130, 700, 2304)
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
# Exact kernels take long to compile.
CASES = [*((shape, rows, BFLOAT16) for shape in (QKV, DOWN, ODD) for rows in NUM_ROWS), (ODD, 5, FLOAT32)]


class Case:
    def __init__(self, shape: tuple[list[int], int, int], dtype: torch.dtype) -> None:
        out_sizes, in_size, max_rank = shape
        draw = np.random.default_rng(0)
        self.weights = AdapterWeights(out_sizes, in_size, NUM_SLOTS, max_rank, dtype, CUDA)
        # Rows beyond a rank must have no effect.
        self.weights.a.fill_(float("nan"))
        for slot in range(1, NUM_SLOTS):
            for part, out_size in enumerate(out_sizes):
                rank = int(draw.integers(0, max_rank + 1))
                self.weights.ranks[slot, part] = rank
                self.weights.a[slot, part, :rank] = torch.randn(rank, in_size, device=CUDA) * in_size**-0.5
                self.weights.b_of(slot, part)[:rank] = torch.randn(rank, out_size, device=CUDA)

    def expected(self, x: torch.Tensor, slots: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> torch.Tensor:
        """Returns the products, (num_rows, num_outputs) float32."""
        weights = self.weights
        exact = AdapterWeights(weights.out_sizes, x.shape[1], NUM_SLOTS, weights.max_rank, torch.float32, CUDA)
        exact.a, exact.b, exact.ranks = weights.a.float(), weights.b.float(), weights.ranks
        out = torch.zeros(len(x), sum(weights.out_sizes), device=CUDA)
        products, rows = ReferenceProducts(), AdapterRows.of(slots, CUDA)
        products.expand(products.shrink(x.float(), exact, rows), exact, rows, out)
        return out


def slots_of(num_rows: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    # Slot 0 has rank 0.
    return np.random.default_rng(num_rows).integers(NO_ADAPTER, NUM_SLOTS, num_rows).astype(np.int32)


@pytest.mark.parametrize(("shape", "num_rows", "dtype"), CASES)
def test_products_are_those_of_plain_torch(
    shape: tuple[list[int], int, int], num_rows: int, dtype: torch.dtype
) -> None:
    from tandem.engine.adapters.triton_products import TritonProducts

    torch.manual_seed(0)
    case, products, slots = Case(shape, dtype), TritonProducts(CUDA), slots_of(num_rows)
    x = torch.randn(num_rows, shape[1], device=CUDA).to(dtype)
    before = torch.randn(num_rows, sum(shape[0]), device=CUDA).to(dtype)
    expected = case.expected(x, slots)
    tolerance = 1e-4 if dtype is torch.float32 else 0.02
    graphed = GraphedRows(num_rows + 3, NUM_SLOTS, CUDA)
    graphed.stage(slots)
    for rows, num_padding in ((AdapterRows.of(slots, CUDA), 0), (graphed.rows, 3)):
        padded, out = (F.pad(numbers, (0, 0, 0, num_padding), value=7.0) for numbers in (x, before))
        products.expand(products.shrink(padded, case.weights, rows), case.weights, rows, out)
        without = torch.tensor(slots < 1, device=CUDA)
        assert torch.equal(out[:num_rows][without], before[without]) and (out[num_rows:] == 7).all()
        # Products of rows and A are rounded.
        size = 1 + shape[2] ** 0.5 + expected.abs()
        error = (out[:num_rows].float() - (before.float() + expected)).abs() / size
        assert error.max() < tolerance
        again = F.pad(before, (0, 0, 0, num_padding), value=7.0)
        products.expand(products.shrink(padded, case.weights, rows), case.weights, rows, again)
        assert torch.equal(again, out)


@pytest.mark.parametrize(("num_rows", "dtype"), [*((rows, BFLOAT16) for rows in NUM_ROWS), (5, FLOAT32)])
def test_gated_products_cover_rows_without_an_adapter(num_rows: int, dtype: torch.dtype) -> None:
    from tandem.engine.adapters.triton_products import TritonProducts

    torch.manual_seed(0)
    case, products, slots = Case(GATE_UP, dtype), TritonProducts(CUDA), slots_of(num_rows)
    x = torch.randn(num_rows, GATE_UP[1], device=CUDA).to(dtype)
    before = torch.randn(num_rows, sum(GATE_UP[0]), device=CUDA).to(dtype)
    gate, up = (before.float() + case.expected(x, slots)).chunk(2, -1)
    expected = F.silu(gate) * up
    rows = AdapterRows.of(slots, CUDA)
    found = products.expand_gated(products.shrink(x, case.weights, rows), case.weights, rows, before)
    error = (found.float() - expected).abs() / (1 + GATE_UP[2] ** 0.5 + expected.abs() + gate.abs() + up.abs())
    assert error.max() < (1e-4 if dtype is torch.float32 else 0.02)
    nobody = AdapterRows.of(np.full(num_rows, NO_ADAPTER, np.int32), CUDA)
    plain = products.expand_gated(products.shrink(x, case.weights, nobody), case.weights, nobody, before)
    gate, up = before.float().chunk(2, -1)
    torch.testing.assert_close(plain.float(), F.silu(gate) * up, atol=1e-5, rtol=1e-2)


def test_one_graph_serves_every_mix_of_adapters() -> None:
    from tandem.engine.adapters.triton_products import TritonProducts

    torch.manual_seed(0)
    case, products = Case(QKV, torch.bfloat16), TritonProducts(CUDA)
    graphed = GraphedRows(32, NUM_SLOTS, CUDA)
    x = torch.randn(32, QKV[1], device=CUDA).bfloat16()
    weight = torch.randn(sum(QKV[0]), QKV[1], device=CUDA).bfloat16()
    out = torch.empty(32, sum(QKV[0]), device=CUDA, dtype=torch.bfloat16)

    def run() -> None:
        shrunk = products.shrink(x, case.weights, graphed.rows)
        torch.mm(x, weight.t(), out=out)
        products.expand(shrunk, case.weights, graphed.rows, out)

    graphed.stage(slots_of(32))
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    mixes = [slots_of(32), slots_of(20), np.full(32, 3, np.int32), np.full(32, NO_ADAPTER, np.int32), slots_of(1)]
    for slots in mixes:
        graphed.stage(slots)
        graph.replay()
        whole = np.full(32, NO_ADAPTER, np.int32)
        whole[: len(slots)] = slots
        expected = x.float() @ weight.float().t() + case.expected(x, whole)
        assert ((out.float() - expected).abs() / (16 + expected.abs())).max() < 0.02
