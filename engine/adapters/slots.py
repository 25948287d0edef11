"""Device memory of adapters."""

from collections.abc import Sequence

import torch

from tandem.engine.adapters.host import HostAdapter
from tandem.engine.adapters.ops import AdapterBatch
from tandem.engine.adapters.products import AdapterProducts, ReferenceProducts
from tandem.engine.adapters.rows import AdapterRows, GraphedRows, Int32s
from tandem.engine.adapters.weights import AdapterWeights
from tandem.engine.models.base import Model


class AdapterSlots:
    """Matrices of `num_slots` adapters beside a model's own. Allocates them all at once.

    Attributes:
        num_bytes: of the memory.
    """

    def __init__(self, model: Model, num_slots: int, max_rank: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self._device = device
        self._products = _products(device)
        self.held = list(model.adaptable())
        self._weights = [
            AdapterWeights(held.linear.out_sizes, held.linear.in_size, num_slots, max_rank, model.dtype, device)
            for held in self.held
        ]
        for held, weights in zip(self.held, self._weights, strict=True):
            held.linear.adapters = weights
        self.num_bytes = sum(weights.num_bytes for weights in self._weights)

    def batch(self, token_slots: Int32s, rows: Sequence[int] | None) -> AdapterBatch:
        """Args: token_slots: of each token; rows: that the last layer computes to the end; None: all."""
        tokens = AdapterRows.of(token_slots, self._device)
        selected = tokens if rows is None else AdapterRows.of(token_slots[list(rows)], self._device)
        return AdapterBatch(self._products, tokens, selected)

    def graphed(self, num_tokens: int, num_rows: int) -> "GraphedAdapters":
        """Args: num_rows: that the last layer computes to the end."""
        return GraphedAdapters(self._products, num_tokens, num_rows, self.num_slots, self._device)

    @torch.inference_mode()
    def write(self, slot: int, adapter: HostAdapter) -> None:
        """Copies an adapter on the current stream. No forward pass may use the slot."""
        for weights, parts, ranks in zip(self._weights, adapter.parts, adapter.ranks, strict=True):
            for part, matrices in enumerate(parts):
                if matrices is not None:
                    weights.a[slot, part, : matrices.rank].copy_(matrices.a, non_blocking=True)
                    weights.b_of(slot, part)[: matrices.rank].copy_(matrices.b, non_blocking=True)
            weights.ranks[slot].copy_(ranks, non_blocking=True)


class GraphedAdapters:
    """Adapters of one graph."""

    def __init__(
        self, products: AdapterProducts, num_tokens: int, num_rows: int, num_slots: int, device: torch.device
    ) -> None:
        self._tokens = GraphedRows(num_tokens, num_slots, device)
        self._selected = GraphedRows(num_rows, num_slots, device)
        self.batch = AdapterBatch(products, self._tokens.rows, self._selected.rows)

    def stage(self, token_slots: Int32s, rows: Sequence[int]) -> None:
        """Args: as AdapterSlots.batch; padding comes last or has NO_ADAPTER."""
        self._tokens.stage(token_slots)
        self._selected.stage(token_slots[list(rows)])


def _products(device: torch.device) -> AdapterProducts:
    if device.type != "cuda":
        return ReferenceProducts()
    from tandem.engine.adapters.triton import TritonProducts

    return TritonProducts(device)
