"""Copies of many pages in one call, which the copy engines or the device do. Imported on CUDA machines alone."""

from collections.abc import Sequence

from cuda.bindings import runtime

from tandem.engine.kvcache.cuda_pool import check


class PageCopies:
    """Copies of pages of one size, between memories that this process's device can reach."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        # All copies of a batch read their source in the stream's order.
        self._attributes = runtime.cudaMemcpyAttributes()
        self._attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream

    def copy(self, dst: int, dst_pages: Sequence[int], src: int, src_pages: Sequence[int], stream: int) -> None:
        """Copies pages, the first of `src_pages` to the first of `dst_pages` and so on, in a stream's order.

        Args:
            dst, src: address of the first page of either memory.
            stream: any but the legacy one, which batched copies refuse.

        Raises:
            RuntimeError: CUDA refused.
        """
        size, num_pages = self._page_bytes, len(src_pages)
        # CUDA 12 returns one value more than CUDA 13, the copy that failed; the arguments are the same.
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
