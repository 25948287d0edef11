"""One matrix of a model, multiplied by every kernel. Importing it needs CUDA's libraries, but no GPU."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from benchmarks.kernels.balanced_table import MatrixSizes
from benchmarks.kernels.graph_time import median_us
from tandem.engine.floors import FP8_SPEED, Limits
from tandem.engine.layers.balanced_products import BalancedProducts
from tandem.engine.layers.balanced_tiles import BalancedTile
from tandem.engine.layers.fp8 import FP8_MAX
from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.fp8_products import multiply_by_library
from tandem.engine.layers.fp8_quantize import quantize, quantize_rows
from tandem.engine.layers.gated_products import GatedProducts
from tandem.engine.layers.linear import Linear, LinearBase
from tandem.engine.layers.products import Products
from tandem.engine.models.quantization import Quantization

# Minimum size of all matrices of a graph, so that no cache holds them, and its time.
MIN_BYTES = 2**28
MIN_US = 300.0
WEIGHT_SCALE = 0.02
# FP8 numbers of usual size.
FP8_NUMBERS = 80.0
MAX_ERROR = 0.03

Run: TypeAlias = Callable[[LinearBase], object]


class Case:
    """Times include the sum with a residual and the gate's product, and with FP8 the quantizing of that product."""

    def __init__(self, matrix: MatrixSizes, limits: Limits) -> None:
        self.matrix = matrix
        self._limits = limits
        self._is_fp8 = matrix.kind != "plain"
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._balanced = BalancedProducts(self._device)
        self._products = Products(self._device)
        self._gated = GatedProducts(self._device)
        self._num_rows = matrix.num_rows
        self._num_bytes = matrix.num_rows * matrix.in_size * matrix.number_size
        self._linears = [self._linear() for _ in range(max(2, -(-MIN_BYTES // self._num_bytes)))]

    def prepare(self, num_tokens: int) -> None:
        """Makes the inputs of the next calls."""
        rate = self._limits.matmul_rate * (FP8_SPEED if self._is_fp8 else 1)
        flops = 2 * self._num_rows * self.matrix.in_size * num_tokens
        self.floor = max(self._num_bytes / self._limits.copy_bandwidth, flops / rate) * 1e6
        x = self._random(num_tokens, self.matrix.in_size)
        others = x.clone()
        others[num_tokens // 2 :] = self._random(num_tokens - num_tokens // 2, self.matrix.in_size)
        first = self._linears[0]
        # Tensors, or Quantized for FP8 weights.
        self._x: Any
        self._others: Any
        self._x, self._others = (quantize(a, first) if isinstance(first, Fp8Linear) else a for a in (x, others))
        self._num_tokens = num_tokens
        self._residual = self._random(num_tokens, self.matrix.out_size) if self.matrix.adds else None
        self._sums = None if self._residual is None else self._residual.clone()
        self._expected = self._by_torch()

    def balanced(self, tile: BalancedTile) -> Run:
        def run(linear: LinearBase) -> object:
            out = self._balanced.multiply(self._x, linear, tile, self._sums, is_gated=self.matrix.is_gated)
            return quantize_rows(out, "token") if self._is_fp8 and self.matrix.is_gated else out

        return run

    def others(self) -> dict[str, Run]:
        """Returns the kernels that take this number of tokens."""
        found: dict[str, Run] = {"library": self._by_library}
        first, is_gated = self._linears[0], self.matrix.is_gated
        tile = self._products.tile(self._num_tokens, first, is_gated=is_gated)
        if tile is not None:
            found["triton"] = lambda w: self._finished(
                self._products.multiply(self._x, w, tile, self._sums, is_gated=is_gated)
            )
        gated = self._gated.tile(self._num_tokens, first) if is_gated and not self._is_fp8 else None
        if gated is not None:
            found["tma"] = lambda w: self._gated.multiply(self._x, w, gated)
        return found

    def wrong(self, tile: BalancedTile) -> str:
        """Returns why results are wrong or vary with other rows or the run; "" if they are right."""
        linear, residual = self._linears[0], self._residual

        def run(x: Any) -> torch.Tensor:
            added = None if residual is None else residual.clone()
            return self._balanced.multiply(x, linear, tile, added, is_gated=self.matrix.is_gated)

        result = run(self._x)
        expected = self._expected
        errors = (result.float() - expected).abs() / (expected.abs() + expected.std())
        if not errors.max().item() < MAX_ERROR:
            wrong = (~(errors < MAX_ERROR)).nonzero()
            return f"error {errors.max().item()}, {len(wrong)} wrong, the first at {wrong[:3].tolist()}"
        half = self._num_tokens // 2
        if not torch.equal(run(self._others)[:half], result[:half]) or not torch.equal(run(self._x), result):
            return "results vary"
        return ""

    def _by_torch(self) -> torch.Tensor:
        """Returns the first matrix's results, (num_tokens, out_size) float32."""
        linear = self._linears[0]
        expected = self._library_product(linear).float()
        if self.matrix.is_gated:
            gate, up = expected.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * up
        return expected if self._residual is None else expected + self._residual.float()

    def time(self, run: Run) -> float:
        repeats = max(1, round(MIN_US / (self.floor * len(self._linears))))

        def run_all() -> None:
            for _ in range(repeats):
                for linear in self._linears:
                    run(linear)

        return median_us(run_all) / (repeats * len(self._linears))

    def _by_library(self, linear: LinearBase) -> object:
        if self._sums is None:
            return self._finished(self._library_product(linear))
        if self._is_fp8:
            return self._sums.add_(self._library_product(linear))
        return torch.addmm(self._sums, self._x, linear.weight.t(), out=self._sums)

    def _library_product(self, linear: LinearBase) -> torch.Tensor:
        if isinstance(linear, Fp8Linear):
            return multiply_by_library(self._x, linear)
        return torch.mm(self._x, linear.weight.t())

    def _finished(self, product: torch.Tensor) -> object:
        """Returns the product with the gate's product and quantized, where that follows."""
        # Importing it may use CUDA.
        from flashinfer.activation import silu_and_mul

        if not self.matrix.is_gated:
            return product
        is_gated = product.shape[1] == self._num_rows
        if self._is_fp8:
            return quantize_rows(product, "token", is_gated=is_gated)
        return silu_and_mul(product) if is_gated else product

    def _linear(self) -> LinearBase:
        sizes = [self._num_rows], self.matrix.in_size, False
        if not self._is_fp8:
            plain = Linear(*sizes, torch.bfloat16, self._device)
            plain.weight.normal_(0, WEIGHT_SCALE)
            return plain
        linear = Fp8Linear(["matrix"], *sizes, Quantization(), torch.bfloat16, self._device)
        numbers = torch.randn(linear.weight.shape, device=self._device) * FP8_NUMBERS
        linear.weight.copy_(numbers.clamp_(-FP8_MAX, FP8_MAX))
        linear.scale.fill_(WEIGHT_SCALE / FP8_NUMBERS)
        return linear

    def _random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=self._device).bfloat16()
