"""Argmax of each row of logits, by several blocks per row. Needs CUDA."""

import torch

from tandem.engine.layers.cuda_kernel import CudaKernel

THREADS = 256
BLOCKS = 512
MAX_BLOCKS_OF_ROW = 64


class MostLikely:
    """The kernel and its scratch memory; one launch may run at a time."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        macros = {"VOCAB_SIZE": vocab_size, "THREADS": THREADS}
        self._kernel = CudaKernel(__package__, "most_likely", macros, device)
        self._best = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._arrivals = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def find(self, logits: torch.Tensor, out: torch.Tensor) -> None:
        """
        Args:
            logits: (num_rows, vocab_size) bfloat16, contiguous.
            out: (num_rows,) int64, token ids; the lowest wins ties.
        """
        num_rows = len(logits)
        assert logits.is_contiguous() and out.is_contiguous() and logits.dtype is torch.bfloat16
        num_blocks = max(1, min(MAX_BLOCKS_OF_ROW, BLOCKS // num_rows))
        self._kernel.launch((num_blocks, num_rows), THREADS, logits, self._best, self._arrivals, out)
