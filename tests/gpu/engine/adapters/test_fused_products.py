"""The kernel of a base's product with adapters, against plain torch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tandem.engine.adapters.base import NO_ADAPTER
from tandem.engine.adapters.rows import AdapterRows, GraphedRows
from tandem.engine.layers.linear import Linear
from tests.gpu.engine.adapters.test_triton_products import CUDA, NUM_SLOTS, Case, slots_of

# Outputs, inputs, largest rank; gated, with a residual, with a bias.
QKV = ([2048, 512, 512], 1024, 64), False, False, True
O = ([1024], 2048, 16), False, True, False  # noqa: E741
GATE_UP = ([8704, 8704], 256, 16), True, False, False
DOWN = ([1024], 3584, 128), False, True, False
OF_RANK_1 = ([512, 256, 256], 256, 1), False, False, False


class Product:
    def __init__(self, kind: tuple[tuple[list[int], int, int], bool, bool, bool], num_rows: int) -> None:
        from tandem.engine.adapters.fused_products import FusedProducts

        torch.manual_seed(0)
        shape, self.is_gated, adds, has_bias = kind
        self.case = Case(shape, torch.bfloat16)
        self.products = FusedProducts(CUDA)
        out_size, in_size = sum(shape[0]), shape[1]
        self.linear = Linear(shape[0], in_size, has_bias, torch.bfloat16, CUDA)
        self.linear.weight.normal_(std=in_size**-0.5)
        if self.linear.bias is not None:
            self.linear.bias.normal_()
        self.x = torch.randn(num_rows, in_size, device=CUDA).bfloat16()
        self.residual = torch.randn(num_rows, out_size, device=CUDA).bfloat16() if adds else None

    def found(self, rows: AdapterRows) -> torch.Tensor:
        residual = None if self.residual is None else self.residual.clone()
        shape = self.products.shape(len(self.x), self.linear, self.case.weights, is_gated=self.is_gated)
        assert shape is not None
        self.products.begin()
        return self.products.multiply(
            self.x, self.linear, self.case.weights, rows, shape, residual, is_gated=self.is_gated
        )

    def check(self, found: torch.Tensor, slots: np.ndarray) -> None:
        expected = self.x.float() @ self.linear.weight.float().t() + self.case.expected(self.x, slots)
        if self.linear.bias is not None:
            expected += self.linear.bias.float()
        size = expected.abs()
        if self.is_gated:
            gate, up = expected.chunk(2, -1)
            expected, size = F.silu(gate) * up, gate.abs() + up.abs()
        if self.residual is not None:
            expected += self.residual.float()
        # Products of rows and A are rounded.
        size += self.case.weights.max_rank**0.5
        assert ((found.float() - expected).abs() / (1 + size + expected.abs())).max() < 0.02


CASES = [(kind, rows) for kind in (QKV, O, GATE_UP, DOWN) for rows in (1, 32, 64)] + [
    (GATE_UP, 65),
    (GATE_UP, 128),
    (OF_RANK_1, 32),
]


@pytest.mark.parametrize(("kind", "num_rows"), CASES)
def test_products_are_those_of_plain_torch(
    kind: tuple[tuple[list[int], int, int], bool, bool, bool], num_rows: int
) -> None:
    product = Product(kind, num_rows)
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


def test_more_rows_of_other_projections_have_another_kernel() -> None:
    product = Product(QKV, 65)
    assert product.products.shape(65, product.linear, product.case.weights) is None
    assert product.products.shape(129, product.linear, product.case.weights, is_gated=True) is None


def test_a_graph_runs_again_with_other_adapters() -> None:
    product = Product(GATE_UP, 32)
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
    for kind in (QKV, O, GATE_UP, DOWN):
        product = Product(kind, 32)
        assert product.products.shape(32, product.linear, product.case.weights, is_gated=product.is_gated) is None
