"""Batched page copies by the device's copy engines. Needs CUDA."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from cuda.bindings import runtime

from tandem.engine.kvcache.cuda_pool import check
from tandem.engine.kvcache.page_part import PagePart

if TYPE_CHECKING:
    from tandem.engine.kvcache.part_copies import PartCopies


def copies_between(source: PagePart, destination: PagePart, device: torch.device) -> "PageCopies | PartCopies":
    """Returns the copies of one part of pages to another. Only parts need a kernel, which takes 0.1 s to compile."""
    if source.is_whole and destination.is_whole:
        return PageCopies(source.page_bytes)
    from tandem.engine.kvcache.part_copies import PartCopies

    return PartCopies(destination, source, device)


class PageCopies:
    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        # Copies of a batch read their source in stream order.
        self._attributes = runtime.cudaMemcpyAttributes()
        self._attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream

    def copy(self, dst: int, dst_pages: Sequence[int], src: int, src_pages: Sequence[int], stream: int) -> None:
        """Copies src_pages[i] to dst_pages[i] in stream order.

        Args:
            dst, src: address of each memory's first page.
            stream: not the legacy stream, which batched copies reject.

        Raises:
            RuntimeError: CUDA rejected the copies.
        """
        size, num_pages = self._page_bytes, len(src_pages)
        # CUDA 12 also returns the failed copy's index.
        check(
            runtime.cudaMemcpyBatchAsync(
                [dst + page * size for page in dst_pages],
                [src + page * size for page in src_pages],
                [size] * num_pages,
                num_pages,
                [self._attributes],
                [0],
                1,
                stream,
            )
        )
