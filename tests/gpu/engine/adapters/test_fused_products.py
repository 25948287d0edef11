"""The kernel of a base's gated product with adapters, against plain torch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tandem.engine.adapters.base import NO_ADAPTER
from tandem.engine.adapters.rows import AdapterRows, GraphedRows
from tandem.engine.layers.linear import Linear
from tests.gpu.engine.adapters.test_triton_products import CUDA, NUM_SLOTS, Case, slots_of

# Outputs, inputs, largest rank.
Shape = tuple[list[int], int, int]
RANK_16, RANK_64, RANK_1 = ([8704, 8704], 256, 16), ([8704, 8704], 384, 64), ([8704, 8704], 256, 1)


class Product:
    def __init__(self, shape: Shape, num_rows: int) -> None:
        from tandem.engine.adapters.fused_products import FusedProducts

        torch.manual_seed(0)
        self.case = Case(shape, torch.bfloat16)
        self.products = FusedProducts(CUDA)
        in_size = shape[1]
        self.linear = Linear(shape[0], in_size, False, torch.bfloat16, CUDA)
        self.linear.weight.normal_(std=in_size**-0.5)
        self.x = torch.randn(num_rows, in_size, device=CUDA).bfloat16()

    def found(self, rows: AdapterRows) -> torch.Tensor:
        shape = self.products.shape(len(self.x), self.linear, self.case.weights)
        assert shape is not None
        self.products.begin()
        return self.products.multiply(self.x, self.linear, self.case.weights, rows, shape)

    def check(self, found: torch.Tensor, slots: np.ndarray) -> None:
        gate, up = (self.x.float() @ self.linear.weight.float().t() + self.case.expected(self.x, slots)).chunk(2, -1)
        expected = F.silu(gate) * up
        # Products of rows and A are rounded, and an error of one factor is multiplied by the other.
        rank = self.case.weights.max_rank
        size = 1 + gate.abs() + up.abs() + expected.abs() + rank**0.5
        assert ((found.float() - expected).abs() / size).max() < 0.02 * max(1, rank / 32)


CASES = [(RANK_16, rows) for rows in (17, 32, 64, 65, 128)] + [(RANK_64, 64), (RANK_1, 32)]


@pytest.mark.parametrize(("shape", "num_rows"), CASES)
def test_products_are_those_of_plain_torch(shape: Shape, num_rows: int) -> None:
    product = Product(shape, num_rows)
    for slots in (
        slots_of(num_rows),
        np.full(num_rows, 1, np.int32),
        np.full(num_rows, NO_ADAPTER, np.int32),
    ):
        rows = GraphedRows(num_rows, NUM_SLOTS, CUDA)
        rows.stage(slots)
        found = product.found(rows.rows)
        product.check(found, slots)
        assert torch.equal(product.found(rows.rows), found)


def test_other_numbers_of_rows_have_other_kernels() -> None:
    product = Product(RANK_16, 32)
    for num_rows in (16, 129):
        assert product.products.shape(num_rows, product.linear, product.case.weights) is None


def test_a_graph_runs_again_with_other_adapters() -> None:
    product = Product(RANK_16, 32)
    graphed = GraphedRows(32, NUM_SLOTS, CUDA)
    product.found(graphed.rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [product.found(graphed.rows) for _ in range(2)]
    for slots in (slots_of(32), np.full(32, 3, np.int32), np.full(32, NO_ADAPTER, np.int32), slots_of(32)[::-1].copy()):
        graphed.stage(slots)
        graph.replay()
        for out in outs:
            product.check(out, slots)


@pytest.mark.parametrize(("capability", "num_multiprocessors"), [((12, 0), 188), ((9, 0), 46)])
def test_other_gpus_take_other_kernels(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], num_multiprocessors: int
) -> None:
    shared_memory = 101_376 if capability[0] > 9 else 232_448
    properties = SimpleNamespace(multi_processor_count=num_multiprocessors, shared_memory_per_block_optin=shared_memory)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    product = Product(RANK_16, 32)
    assert product.products.shape(32, product.linear, product.case.weights) is None
