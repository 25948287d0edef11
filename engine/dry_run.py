"""What a GPU's memory is needed for beside weights and pool: found by running the largest forwards before there is a
pool, which also sets up kernels and libraries before the first request."""

from collections.abc import Callable, Sequence

import torch

from engine.batch import Batch
from engine.config import MAX_PREFILL_BATCH_SIZE, EngineConfig
from engine.engine import Engine
from engine.graph_runner import graph_sizes
from engine.kvcache.sizing import DeviceMemory
from engine.prefill_graphs import launch_bound_sizes
from engine.token_sequence import TokenSequence
from tandem.sampling_params import MAX_LOGPROBS, SamplingParams

# Graphs up to this batch size are captured to see what one takes by itself. There are graphs of few sequences among
# them, which run kernels of our own, and graphs of more.
TRIAL_BATCH_SIZE = 24
# Prefills of these numbers of tokens, and the largest, of these numbers of prompts in turn. Libraries choose other
# kernels for other sizes, and load each when it is first launched, which waits until the device has come to an end.
PREFILL_TOKENS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144)
NUM_PROMPTS = (128, 4, 17, 24, 1, 32, 64, 9, 96, 48, 2)

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
    engine: Engine,
    config: EngineConfig,
    free_at_start: int,
    capture: Callable[[int], object] | None,
    capture_prefill: Callable[[Sequence[int]], object] | None,
) -> tuple[DeviceMemory, tuple[int, ...]]:
    """Runs prefills up to the largest and the largest decode step that `config` allows, and captures a few graphs.

    Args:
        engine: with its weights, on a pool that need not have more than one page: every page table names that one
            again and again, for what is computed means nothing and takes the memory that it always takes.
        free_at_start: free_bytes before the engine's model was made.
        capture: makes the decode graphs up to a batch size and returns what keeps them; None: there are to be none.
        capture_prefill: likewise, of prefills of some numbers of tokens.

    Returns:
        What there is to share out, and the numbers of tokens of which there are to be prefill graphs.

    Raises:
        torch.OutOfMemoryError: a forward does not fit beside the weights.
    """
    forward = graphs = 0
    prefill_sizes: tuple[int, ...] = ()
    if config.max_chunk_tokens:
        longest = engine.model.config.max_position_embeddings
        for number, num_tokens in enumerate(size for size in PREFILL_TOKENS if size < config.max_chunk_tokens):
            num_prompts = NUM_PROMPTS[number % len(NUM_PROMPTS)]
            sampling = (_SAMPLED, _GREEDY)[number % 2]
            engine.forward(_prefill(num_tokens, longest, number // 2 % 2, num_prompts, sampling)).logprobs()
        # Prompts that go on run other kernels than new ones.
        for cached_len in (0, 1):
            batch = _prefill(config.max_chunk_tokens, longest, cached_len, MAX_PREFILL_BATCH_SIZE, _SAMPLED)
            forward = max(forward, _peak_bytes(engine, batch))
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
    if capture_prefill is not None and config.max_chunk_tokens:
        prefill_sizes = launch_bound_sizes(engine, config.max_chunk_tokens)
        graphs += _prefill_graph_bytes(prefill_sizes, capture_prefill)
    free = free_bytes()
    total = torch.cuda.mem_get_info()[1]
    return DeviceMemory(total, free, max(0, free_at_start - free), graphs, forward), prefill_sizes


def _prefill_graph_bytes(sizes: Sequence[int], capture: Callable[[Sequence[int]], object]) -> int:
    """What graphs of all these sizes are going to take, from two trials: they share the memory that the largest needs,
    and each takes something of its own beside."""
    if not sizes:
        return 0
    taken = []
    for num_sizes in (1, 2):
        before = free_bytes()
        captured = capture(sizes[-num_sizes:])
        taken.append(before - free_bytes())
        del captured
    return max(0, taken[0]) + max(0, taken[1] - taken[0]) * (len(sizes) - 1)


def _peak_bytes(engine: Engine, batch: Batch) -> int:
    """What torch takes from the device for one forward, and what it leaves unused between tensors."""
    free_bytes()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    engine.forward(batch).logprobs()
    return torch.cuda.max_memory_reserved() - before


def _prefill(num_tokens: int, longest: int, cached_len: int, num_prompts: int, sampling: SamplingParams) -> Batch:
    """So many new tokens of so many prompts of about equal lengths, at most `longest`, as far as that is possible."""
    num_rows = max(min(num_prompts, num_tokens), -(-num_tokens // (longest - cached_len)))
    shortest, num_longer = divmod(num_tokens, num_rows)
    lengths = [cached_len + shortest + (row < num_longer) for row in range(num_rows)]
    return Batch("prefill", [_sequence(length, cached_len, sampling) for length in lengths])


def _decode(batch_size: int, sampling: SamplingParams) -> Batch:
    return Batch("decode", [_sequence(2, 1, sampling) for _ in range(batch_size)])


def _sequence(num_tokens: int, cached_len: int, sampling: SamplingParams) -> TokenSequence:
    """A sequence all of whose tokens the next forward computes, past `cached_len`; all its pages are page 0."""
    sequence = TokenSequence([0] * num_tokens, num_tokens, [0] * num_tokens, cached_len, sampling)
    sequence.extend(num_tokens - cached_len)
    return sequence
