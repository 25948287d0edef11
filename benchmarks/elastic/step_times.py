"""Times of a simulated worker's forward passes, from the estimate of a GPU (docs/estimate.md)."""

from bisect import bisect_left

from tandem.deploy.estimate.gpus import GPUS, Gpu
from tandem.deploy.estimate.worker import Worker
from tandem.engine.mixed_sizes import NUM_PROMPT_TOKENS
from tandem.messages import ForwardTimes
from tests.fakes.model_shapes import LLAMA_8B

# Seconds of a handover besides its last chunk's copies (router/workers/rates.py).
HANDOVER_S = 3e-3
# Chunks above the largest graph, and forward passes without decoding, are looked up at this distance.
GRID = 128
# Lengths from which a constant slope is measured.
_LONG = 4096


def worker_of(gpu: Gpu = GPUS["h200"]) -> Worker:
    """Returns a worker of Llama-3.1-8B."""
    return Worker(LLAMA_8B, gpu)


class StepTimes:
    """Seconds of forward passes, looked up instead of computed anew.

    Attributes:
        decode: seconds of a step of 0, 1, ... sequences, without their KV.
        kv_token_s: seconds more per token of KV in a step.
        pool_tokens: size of the pool.
        chunk_size: largest number of prompt tokens in a forward pass.
        sizes: ascending sizes of chunks beside a step.
    """

    def __init__(self, worker: Worker, longest: int = 131_072) -> None:
        """Args: longest: tokens of the largest request."""
        self._worker = worker
        self.max_batch_size = worker.max_batch_size
        self.chunk_size = worker.chunk_size
        self.pool_tokens = worker.pool_tokens("decode", longest)
        self.decode = [0.0, *(worker.decode_step(size, 0) for size in range(1, self.max_batch_size + 1))]
        self.kv_token_s = (worker.decode_step(1, _LONG) - worker.decode_step(1, 0)) / _LONG
        squared = float(_LONG * _LONG)
        self._attended_s = (worker.chunk(_LONG, _LONG) - worker.chunk(_LONG, 0)) / squared
        self._mixed_attended_s = (worker.mixed_step(1, 0, _LONG, _LONG) - worker.mixed_step(1, 0, _LONG, 0)) / squared
        beyond = range(NUM_PROMPT_TOKENS[-1] + 2 * GRID, worker.chunk_size + 1, 2 * GRID)
        self.sizes = [*NUM_PROMPT_TOKENS, *beyond]
        self._prefills: dict[int, float] = {}
        self._mixed: dict[tuple[int, int], float] = {}

    def prefill(self, num_tokens: int, num_attended: float) -> float:
        """Returns the seconds of a forward pass without decoding.

        Args:
            num_attended: tokens that all of them attend to: n behind m attend to n * m + n * n / 2.
        """
        padded = -(-num_tokens // GRID) * GRID
        whole = self._prefills.get(padded)
        if whole is None:
            whole = self._prefills[padded] = self._worker.chunk(padded, 0)
        return whole + self._attended_s * (num_attended - num_tokens * num_tokens / 2)

    def mixed(self, batch_size: int, num_tokens: int, num_attended: float) -> float:
        """Returns the seconds of a step with a chunk, without the KV of the decoding sequences."""
        padded = self.sizes[min(bisect_left(self.sizes, num_tokens), len(self.sizes) - 1)]
        whole = self._mixed.get((batch_size, padded))
        if whole is None:
            whole = self._mixed[batch_size, padded] = self._worker.mixed_step(batch_size, 0, padded, 0)
        together = whole + self._mixed_attended_s * (num_attended - num_tokens * num_tokens / 2)
        # Without a graph, one mixed forward is no faster than two.
        return min(together, self.decode[batch_size] + self.prefill(num_tokens, num_attended))

    def handover(self, num_tokens: int) -> float:
        """Args: num_tokens: those to ship after the last chunk."""
        return HANDOVER_S + self._worker.transfer(num_tokens)

    def linear(self) -> ForwardTimes:
        """Returns the linear times that a worker's heartbeats carry."""
        many = self.max_batch_size // 2
        token_s = (self._worker.chunk(2 * _LONG, 0) - self._worker.chunk(_LONG, 0)) / _LONG
        token_s -= self._attended_s * 1.5 * _LONG
        request_s = (self.decode[many] - self.decode[1]) / (many - 1)
        return ForwardTimes(
            prefill_s=max(0.0, self._worker.chunk(GRID, 0) - token_s * GRID),
            prompt_token_s=token_s,
            attended_token_s=self._attended_s,
            step_s=self.decode[1] - request_s,
            request_s=request_s,
            kv_token_s=self.kv_token_s,
        )
