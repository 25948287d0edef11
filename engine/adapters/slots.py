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
        dtype: of the matrices.
        held: the merged matrices that adapters change.
        num_bytes: of the memory.
    """

    def __init__(self, model: Model, num_slots: int, max_rank: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self._device = device
        self._products = _products(device)
        self.dtype = model.dtype
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

    def graphed(self, num_tokens: int, num_rows: int | None) -> "GraphedAdapters":
        """Args: num_rows: that the last layer computes to the end; None: all."""
        tokens = GraphedRows(num_tokens, self.num_slots, self._device)
        selected = tokens if num_rows is None else GraphedRows(num_rows, self.num_slots, self._device)
        return GraphedAdapters(self._products, tokens, selected)

    def fence(self) -> torch.cuda.Event | None:
        """Returns an event behind all launched forward passes; None on a CPU, where they have ended."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def new_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @torch.inference_mode()
    def write(self, slot: int, adapter: HostAdapter) -> None:
        """Copies an adapter on the current stream. No forward pass uses the slot."""
        for weights, parts, ranks in zip(self._weights, adapter.parts, adapter.ranks, strict=True):
            weights.b[slot].zero_()
            for part, matrices in enumerate(parts):
                if matrices is not None:
                    weights.a[slot, part, : matrices.rank].copy_(matrices.a, non_blocking=True)
                    weights.b_of(slot, part)[: matrices.rank].copy_(matrices.b, non_blocking=True)
            weights.ranks[slot].copy_(ranks, non_blocking=True)

    def write_after(
        self, slot: int, adapter: HostAdapter, stream: torch.cuda.Stream | None, after: torch.cuda.Event | None
    ) -> None:
        """Copies an adapter beside forward passes, and waits for the end.

        Args:
            stream: of `new_stream`; after: of `fence`, since when no forward pass uses the slot.
        """
        if stream is None or after is None:
            self.write(slot, adapter)
            return
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            self.write(slot, adapter)
        stream.synchronize()


class GraphedAdapters:
    """Adapters of one graph."""

    def __init__(self, products: AdapterProducts, tokens: GraphedRows, selected: GraphedRows) -> None:
        """Args: selected: `tokens` if the last layer computes all."""
        self._tokens = tokens
        self._selected = selected
        self.batch = AdapterBatch(products, tokens.rows, selected.rows)

    def stage(self, token_slots: Int32s, row_slots: Int32s) -> None:
        """Args: of each token, and of each row that the last layer computes to the end; missing ones have none."""
        self._tokens.stage(token_slots)
        if self._selected is not self._tokens:
            self._selected.stage(row_slots)


def _products(device: torch.device) -> AdapterProducts:
    if device.type != "cuda":
        return ReferenceProducts()
    from tandem.engine.adapters.triton_products import TritonProducts

    return TritonProducts(device)
