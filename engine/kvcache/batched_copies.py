"""Batched page copies by the device's copy engines. Needs CUDA."""

from collections.abc import Sequence

from cuda.bindings import runtime

from tandem.engine.kvcache.cuda_pool import check


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
