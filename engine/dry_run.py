"""Measures the GPU memory of forward passes and graphs, and loads kernels before the first request."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from tandem.engine.base import EngineBase
from tandem.engine.batch import Batch
from tandem.engine.config import MAX_PREFILL_BATCH_SIZE, EngineConfig
from tandem.engine.draft_graphs import MAX_ROWS, draft_graph_sizes
from tandem.engine.draft_graphs import SIZES as DRAFT_SIZES
from tandem.engine.draft_models.pass_graphs import pass_graph_sizes
from tandem.engine.engine import Engine
from tandem.engine.graph_runner import graph_sizes
from tandem.engine.kvcache.sizing import DeviceMemory
from tandem.engine.mixed_graphs import LAUNCH_FACTOR, MixedSizes
from tandem.engine.prefill_graphs import MAX_PROMPTS, MAX_TOKENS, SIZES, large_graph_sizes
from tandem.engine.ranks.group import SINGLE_GROUP, RankGroup
from tandem.engine.trial_batches import GREEDY, TrialBatches
from tandem.sampling_params import MAX_LOGPROBS, SamplingParams

# Includes small batches, which run our own kernels, and larger ones.
TRIAL_BATCH_SIZE = 24
# Sizes that run other kernels than large prefills.
SMALL_PREFILLS = (1, 2, 4, 8, 16, 32, 64)
NUM_TRIAL_SIZES = 6
# Above this ratio of device time to launch time a graph saves only host time.
LAUNCH_BOUND = 1.2
# Up to this ratio a graph of a large prefill leaves a busy host time to schedule the next one.
LARGE_LAUNCH_BOUND = 6.0
# Tokens of a prompt in trials of large prefills.
LARGE_PROMPT_LEN = 512
# The shortest trial counts: other starting workers may delay the host.
NUM_TRIALS = 3
SETTLE_S = 0.5
MAX_SETTLES = 20

_SAMPLED = SamplingParams(
    max_tokens=1,
    temperature=1.0,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    num_logprobs=MAX_LOGPROBS,
    num_prompt_logprobs=MAX_LOGPROBS,
)


class Measured(NamedTuple):
    memory: DeviceMemory
    prefill_sizes: tuple[int, ...]
    mixed_sizes: MixedSizes
    large_sizes: tuple[int, ...] = ()


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def settled_free_bytes(sleep: Callable[[float], None] = time.sleep) -> int:
    """Returns free_bytes once it does not rise. A killed worker's followers give their memory back after its end."""
    free = free_bytes()
    for _ in range(MAX_SETTLES):
        sleep(SETTLE_S)
        before, free = free, free_bytes()
        if free <= before:
            break
    return free


def measure_memory(
    engine: Engine,
    config: EngineConfig,
    free_at_start: int,
    capture: Callable[[int], object] | None,
    capture_prefill: Callable[[Sequence[int]], object] | None,
    capture_mixed: Callable[[MixedSizes], object] | None,
    capture_drafts: Callable[[Sequence[int]], object] | None = None,
    group: RankGroup = SINGLE_GROUP,
    capture_large: Callable[[Sequence[int]], object] | None = None,
    capture_passes: Callable[[Sequence[int]], object] | None = None,
) -> Measured:
    """Runs prefills up to the largest and the largest decode step that `config` allows, and captures a few graphs.

    Args:
        engine: loaded; one page suffices.
        free_at_start: free_bytes before the model was made.
        capture: captures decode graphs up to a batch size and returns their owner; None: no decode graphs.
        capture_mixed: None unless there are graphs of both kinds.
        capture_drafts: captures graphs of decode steps with drafts, by their rows; None: no such graphs.
        group: ranks that all call this. Their sizes of graphs are the leader's.
        capture_large: captures graphs of more prompts and tokens; None: no such graphs.
        capture_passes: captures graphs of a drafter's passes, by their sequences; None: no such graphs.

    Raises:
        torch.OutOfMemoryError: a forward pass does not fit beside the weights.
    """
    forward = graphs = 0
    prefill_sizes: tuple[int, ...] = ()
    large_sizes: tuple[int, ...] = ()
    mixed_sizes = MixedSizes()
    trials = TrialBatches(engine.model.config)
    all_trials = [trials]
    if engine.slots is not None:
        # Rows with adapters need more memory. The slot is empty.
        trials = TrialBatches(engine.model.config, adapter_slot=0)
        all_trials.append(trials)
    if config.max_chunk_tokens:
        for some_trials in all_trials:
            _load_kernels(engine, some_trials.prefills(config.max_chunk_tokens))
        # Continued prompts run other kernels than new ones.
        for cached_len in (0, 1):
            for num_tokens in SMALL_PREFILLS:
                engine.forward(trials.prefill(num_tokens, cached_len, num_tokens, _SAMPLED)).logprobs()
            batch = trials.prefill(config.max_chunk_tokens, cached_len, MAX_PREFILL_BATCH_SIZE, _SAMPLED)
            forward = max(forward, _peak_bytes(engine, batch))
    batch_size = max(config.max_batch_size, config.cuda_graph_max_bs)
    if batch_size:
        for some_trials in all_trials:
            # Some steps may have no graph, and compiling a kernel takes a second.
            _load_kernels(engine, some_trials.steps(batch_size))
        forward = max(forward, _peak_bytes(engine, trials.decode(batch_size, _SAMPLED)))
    if batch_size and config.max_chunk_tokens and engine.mixes(batch_size, config.max_chunk_tokens):
        batch = trials.mixed(batch_size, config.max_chunk_tokens, MAX_PREFILL_BATCH_SIZE, _SAMPLED)
        forward = max(forward, _peak_bytes(engine, batch))
    if config.max_drafts and engine.max_drafts and config.max_batch_size:
        num_rows = min(MAX_ROWS, config.max_batch_size * (1 + config.max_drafts))
        for some_trials in all_trials:
            _load_draft_kernels(engine, some_trials, num_rows, config.max_drafts)
        forward = max(forward, _peak_bytes(engine, trials.drafted(num_rows, config.max_drafts, _SAMPLED)))
    num_tokens = config.max_model_len or engine.model.config.max_position_embeddings
    page_table = 4 * engine.pool.layout.num_pages_for(num_tokens)
    if capture is not None:
        page_tables = config.cuda_graph_max_bs * page_table
        graphs = _peak_bytes(engine, trials.decode(config.cuda_graph_max_bs, GREEDY)) + page_tables
        trial_size = min(TRIAL_BATCH_SIZE, config.cuda_graph_max_bs)
        before = free_bytes()
        captured = capture(trial_size)
        each = (before - free_bytes()) // len(graph_sizes(trial_size))
        del captured
        graphs += max(0, each) * len(graph_sizes(config.cuda_graph_max_bs))
    if capture_drafts is not None and config.max_batch_size:
        draft_sizes = draft_graph_sizes(config.max_batch_size, config.max_drafts)
        graphs += _graph_bytes(draft_sizes, capture_drafts) + draft_sizes[-1] * page_table
    if capture_passes is not None and config.max_batch_size:
        pass_sizes = pass_graph_sizes(config.max_batch_size)
        graphs += _graph_bytes(pass_sizes, capture_passes) + pass_sizes[-1] * page_table
    if capture_prefill is not None and config.max_chunk_tokens:
        prefill_sizes = launch_bound_sizes(engine, trials, config.max_chunk_tokens, group=group)
        graphs += _graph_bytes(prefill_sizes, capture_prefill)
    if capture_large is not None and prefill_sizes and prefill_sizes[-1] == MAX_TOKENS:
        large_sizes = launch_bound_large_sizes(engine, all_trials[0], config.max_chunk_tokens, group=group)
        if large_sizes:
            graphs += _graph_bytes(large_sizes, capture_large) + MAX_PREFILL_BATCH_SIZE * page_table
    if capture_mixed is not None and prefill_sizes:
        largest = min(config.max_chunk_tokens, LAUNCH_FACTOR * prefill_sizes[-1])
        mixed_sizes = MixedSizes.up_to(config.cuda_graph_max_bs, largest)
        page_tables = (config.cuda_graph_max_bs + MAX_PROMPTS) * page_table
        graphs += _mixed_graph_bytes(mixed_sizes, capture_mixed) + page_tables
    free = free_bytes()
    total = torch.cuda.mem_get_info()[1]
    memory = DeviceMemory(total, free, max(0, free_at_start - free), graphs, forward, config.workers_per_gpu)
    return Measured(memory, prefill_sizes, mixed_sizes, large_sizes)


def keep_forward_memory(memory: DeviceMemory, device: torch.device) -> None:
    """Leaves the memory of the largest forward pass in torch's cache, where no other worker of the GPU can take it.

    So the free memory that the next worker finds stays the same while it measures its own.
    """
    torch.empty(memory.forward, dtype=torch.uint8, device=device)


def launch_bound_sizes(
    engine: EngineBase,
    trials: TrialBatches,
    max_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
    group: RankGroup = SINGLE_GROUP,
) -> tuple[int, ...]:
    """Returns the SIZES whose launch takes about as long as the device does, or longer. All kernels must be loaded.

    With several ranks, which wait for each other, the slowest launch decides.
    """
    bound = 0
    for num_tokens in (size for size in SIZES if size.bit_count() == 1 and size <= max_tokens):
        if not _is_launch_bound(engine, trials.prefill(num_tokens, 0, 1, GREEDY), LAUNCH_BOUND, clock, group):
            break
        bound = num_tokens
    return tuple(size for size in SIZES if size <= bound)


def launch_bound_large_sizes(
    engine: EngineBase,
    trials: TrialBatches,
    max_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
    group: RankGroup = SINGLE_GROUP,
) -> tuple[int, ...]:
    """Returns the sizes of many prompts or tokens whose launch is no small part of their time. As launch_bound_sizes,
    which must have returned all SIZES."""
    sizes = []
    for num_tokens in large_graph_sizes(max_tokens):
        if num_tokens <= MAX_TOKENS:
            sizes.append(num_tokens)
            continue
        num_prompts = min(MAX_PREFILL_BATCH_SIZE, -(-num_tokens // LARGE_PROMPT_LEN))
        batch = trials.prefill(num_tokens, 0, num_prompts, GREEDY)
        if not _is_launch_bound(engine, batch, LARGE_LAUNCH_BOUND, clock, group):
            break
        sizes.append(num_tokens)
    return tuple(sizes)


def _is_launch_bound(
    engine: EngineBase, batch: Batch, bound: float, clock: Callable[[], float], group: RankGroup
) -> bool:
    times = [_time_forward(engine, batch, clock) for _ in range(NUM_TRIALS)]
    launched_s, ended_s = (max(group.gathered(min(of_trials))) for of_trials in zip(*times, strict=True))
    return ended_s <= bound * launched_s


def _time_forward(engine: EngineBase, batch: Batch, clock: Callable[[], float]) -> tuple[float, float]:
    """Returns the seconds until the launch has ended, and until the tokens are known."""
    began = clock()
    output = engine.forward(batch)
    launched_s = clock() - began
    output.token_ids()
    return launched_s, clock() - began


def _graph_bytes(sizes: Sequence[int], capture: Callable[[Sequence[int]], object]) -> int:
    """Estimates from the largest graphs. Too high, because shared memory counts more than once."""
    if not sizes:
        return 0
    trial = sizes[-NUM_TRIAL_SIZES:]
    return _bytes_taken(lambda: capture(trial)) * -(-len(sizes) // len(trial))


def _mixed_graph_bytes(sizes: MixedSizes, capture: Callable[[MixedSizes], object]) -> int:
    """Estimates from the most tokens with each number of sequences, and one such graph alone: all share its memory."""
    tried = MixedSizes(tuple((num_decoded, beside[-1:]) for num_decoded, beside in sizes.by_decoded))
    several = _bytes_taken(lambda: capture(tried))
    shared = _bytes_taken(lambda: capture(MixedSizes(tried.by_decoded[-1:])))
    num_tried = len(sizes.num_decoded)
    each = max(0, several - shared) // (num_tried - 1) if num_tried > 1 else several
    return several + each * (len(sizes.pairs()) - num_tried)


def _bytes_taken(capture: Callable[[], object]) -> int:
    before = free_bytes()
    captured = capture()
    taken = before - free_bytes()
    del captured
    return max(0, taken)


def _load_kernels(engine: Engine, batches: Iterable[Batch]) -> None:
    """One layer suffices. Loading takes milliseconds and may wait for the device."""
    shallow = engine.shallow()
    for batch in batches:
        shallow.forward(batch)


def _load_draft_kernels(engine: Engine, trials: TrialBatches, max_rows: int, max_drafts: int) -> None:
    shallow = engine.shallow()
    for num_rows in DRAFT_SIZES:
        if num_rows < max_rows:
            shallow.forward(trials.drafted(num_rows, min(max_drafts, num_rows - 1), GREEDY))


def _peak_bytes(engine: Engine, batch: Batch) -> int:
    free_bytes()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    engine.forward(batch).logprobs()
    return torch.cuda.max_memory_reserved() - before
