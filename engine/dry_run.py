"""What a GPU's memory is needed for beside weights and pool: found by running the largest forwards before there is a
pool, which also sets up kernels and libraries before the first request."""

from collections.abc import Callable

import torch

from engine.batch import Batch
from engine.config import MAX_PREFILL_BATCH_SIZE, EngineConfig
from engine.engine import Engine
from engine.graph_runner import graph_sizes
from engine.kvcache.sizing import DeviceMemory
from engine.token_sequence import TokenSequence
from tandem.sampling_params import MAX_LOGPROBS, SamplingParams

# Graphs up to this batch size are captured to see what one takes by itself. There are graphs of few sequences among
# them, which run kernels of our own, and graphs of more.
TRIAL_BATCH_SIZE = 24
# Prefills of as few tokens as these, in as many prompts, run other kernels than large ones.
SMALL_PREFILLS = (1, 8, 16, 64)

_GREEDY = SamplingParams(max_tokens=1)
# These parameters ask for everything that takes memory when a token is chosen, or a prompt's are looked at.
_SAMPLED = SamplingParams(
    max_tokens=1,
    temperature=1.0,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    num_logprobs=MAX_LOGPROBS,
    num_prompt_logprobs=MAX_LOGPROBS,
)


def free_bytes() -> int:
    """Of the current device, once torch has given back what it only keeps for later."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def measure_memory(
    engine: Engine, config: EngineConfig, free_at_start: int, capture: Callable[[int], object] | None
) -> DeviceMemory:
    """Runs the largest prefill and the largest decode step that `config` allows, and captures a few small graphs.

    Args:
        engine: with its weights, on a pool that need not have more than one page: every page table names that one
            again and again, for what is computed means nothing and takes the memory that it always takes.
        free_at_start: free_bytes before the engine's model was made.
        capture: makes the decode graphs up to a batch size and returns what keeps them; None: there are to be none.

    Raises:
        torch.OutOfMemoryError: a forward does not fit beside the weights.
    """
    forward = graphs = 0
    if config.max_chunk_tokens:
        longest = engine.model.config.max_position_embeddings
        # Prompts that go on run other kernels than new ones.
        for cached_len in (0, 1):
            for num_tokens in SMALL_PREFILLS:
                engine.forward(_prefill(num_tokens, longest, cached_len)).logprobs()
            forward = max(forward, _peak_bytes(engine, _prefill(config.max_chunk_tokens, longest, cached_len)))
    batch_size = max(config.max_batch_size, config.cuda_graph_max_bs)
    if batch_size:
        forward = max(forward, _peak_bytes(engine, _decode(batch_size, _SAMPLED)))
    if capture is not None:
        # All graphs share the memory that the largest step needs; each takes something of its own beside.
        num_tokens = config.max_model_len or engine.model.config.max_position_embeddings
        page_tables = 4 * config.cuda_graph_max_bs * engine.pool.layout.num_pages_for(num_tokens)
        graphs = _peak_bytes(engine, _decode(config.cuda_graph_max_bs, _GREEDY)) + page_tables
        trial_size = min(TRIAL_BATCH_SIZE, config.cuda_graph_max_bs)
        before = free_bytes()
        captured = capture(trial_size)
        each = (before - free_bytes()) // len(graph_sizes(trial_size))
        del captured
        graphs += max(0, each) * len(graph_sizes(config.cuda_graph_max_bs))
    free = free_bytes()
    total = torch.cuda.mem_get_info()[1]
    return DeviceMemory(total, free, max(0, free_at_start - free), graphs, forward)


def _peak_bytes(engine: Engine, batch: Batch) -> int:
    """What torch takes from the device for one forward, and what it leaves unused between tensors."""
    free_bytes()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    engine.forward(batch).logprobs()
    return torch.cuda.max_memory_reserved() - before


def _prefill(num_tokens: int, longest: int, cached_len: int) -> Batch:
    """So many new tokens of prompts of about equal lengths, at most `longest`, as many as may come together."""
    num_rows = max(min(MAX_PREFILL_BATCH_SIZE, num_tokens), -(-num_tokens // (longest - cached_len)))
    shortest, num_longer = divmod(num_tokens, num_rows)
    lengths = [cached_len + shortest + (row < num_longer) for row in range(num_rows)]
    return Batch("prefill", [_sequence(length, cached_len, _SAMPLED) for length in lengths])


def _decode(batch_size: int, sampling: SamplingParams) -> Batch:
    return Batch("decode", [_sequence(2, 1, sampling) for _ in range(batch_size)])


def _sequence(num_tokens: int, cached_len: int, sampling: SamplingParams) -> TokenSequence:
    """A sequence all of whose tokens the next forward computes, past `cached_len`; all its pages are page 0."""
    sequence = TokenSequence([0] * num_tokens, num_tokens, [0] * num_tokens, cached_len, sampling)
    sequence.extend(num_tokens - cached_len)
    return sequence
