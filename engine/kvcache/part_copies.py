"""Copies of some heads of pages, by a kernel. Needs CUDA."""

from collections.abc import Sequence
from math import gcd

import numpy as np
import torch

from tandem.engine.kvcache.page_part import PagePart
from tandem.engine.layers.cuda_kernel import CudaKernel
from tandem.engine.upload import to_device

THREADS = 512
# Enough to fill a link between GPUs; an H100 has 132 multiprocessors.
NUM_BLOCKS = 32
BATCH = 4
# In 32 bits, with room for the kernel's last step.
MAX_WORDS = 2**31


class PartCopies:
    def __init__(self, destination: PagePart, source: PagePart, device: torch.device) -> None:
        """Args: destination, source: places of the same pieces."""
        assert (destination.num_pieces, destination.piece_bytes) == (source.num_pieces, source.piece_bytes)
        self._destination = destination
        self._source = source
        self._device = device
        lengths = [n for part in (destination, source) for n in (part.offset, part.stride, part.piece_bytes)]
        self._word_bytes = gcd(16, *lengths)
        macros = {"WORD_BYTES": self._word_bytes, "THREADS": THREADS, "BATCH": BATCH}
        self._kernel = CudaKernel(__package__, "part_copies", macros, device)

    def copy(self, dst: int, dst_pages: Sequence[int], src: int, src_pages: Sequence[int], stream: int) -> None:
        """Copies the part of src_pages[i] to dst_pages[i] in stream order.

        Args:
            dst, src: address of each memory's first page: a multiple of 16.

        Raises:
            RuntimeError: CUDA rejected the launch.
        """
        to, of = self._destination, self._source
        addresses = np.empty((len(src_pages), 2), np.int64)
        addresses[:, 0] = np.asarray(dst_pages, np.int64) * to.page_bytes + (dst + to.offset)
        addresses[:, 1] = np.asarray(src_pages, np.int64) * of.page_bytes + (src + of.offset)
        word = self._word_bytes
        assert len(src_pages) * of.num_bytes // word < MAX_WORDS
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, self._device)):
            self._kernel.launch(
                (NUM_BLOCKS, 1),
                THREADS,
                to_device(addresses.reshape(-1), self._device),
                len(src_pages),
                of.num_pieces,
                of.piece_bytes // word,
                to.stride // word,
                of.stride // word,
            )
