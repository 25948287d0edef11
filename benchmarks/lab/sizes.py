"""How much each experiment sends, on a CPU and on GPUs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths are in tokens.

    Attributes:
        num_burst, burst_input, burst_output: prompts that come at once, and their lengths.
        num_streams, stream_input, stream_output: streams that run meanwhile.
        lead_s: how long they run before, in seconds.
        chunk: of a chunked prefill; prompts of the burst are longer.
        whole: of one that is not: no prompt is longer.
        num_alone, num_beside: requests one after the other, and eight at a time.
        request_input, request_output: their lengths.
        num_prompts: whose answers are asked for again and again in the experiment of the cache.
        cached_input, cached_output, tail: lengths there; `tail` is of what differs between prompts of one prefix.
        cache_pages: of each pool there, few enough to be filled.
        max_model_len: there; a sequence must fit the pool.
    """

    num_streams: int
    stream_output: int
    burst_input: int
    burst_output: int
    chunk: int
    whole: int
    num_alone: int
    request_input: int
    request_output: int
    cached_input: int
    cache_pages: int
    max_model_len: int
    start_timeout_s: float
    run_timeout_s: float
    num_warmup: int = 4
    num_burst: int = 50
    stream_input: int = 32
    lead_s: float = 2.0
    num_beside: int = 16
    num_prompts: int = 4
    cached_output: int = 16
    tail: int = 16


DEFAULTS = {
    "cpu": Sizes(
        num_streams=4,
        stream_output=448,
        burst_input=96,
        burst_output=8,
        chunk=32,
        whole=512,
        num_alone=3,
        request_input=128,
        request_output=32,
        cached_input=192,
        cache_pages=256,
        max_model_len=512,
        start_timeout_s=120.0,
        run_timeout_s=120.0,
    ),
    "cuda": Sizes(
        num_streams=32,
        stream_output=4096,
        burst_input=2048,
        burst_output=64,
        chunk=512,
        whole=8192,
        num_alone=6,
        request_input=2048,
        request_output=128,
        cached_input=4096,
        cache_pages=4096,
        max_model_len=16_384,
        start_timeout_s=75.0,
        run_timeout_s=40.0,
        num_warmup=8,
    ),
}
# As `tandem serve` has it unless it is told otherwise.
PAGE_SIZE = 16
