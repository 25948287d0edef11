"""`tandem compile`: compiles every kernel of a configuration, so that a worker starts without a compiler.

Triton and FlashInfer compile a kernel at its first launch. So real schedulers run requests of every kind on an engine
with random weights, once without and once with CUDA graphs.
"""

import gc
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tandem import exit_codes
from tandem.both_worker.local_worker import Counts, LocalWorker
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.config.cluster_options import OPTIONS
from tandem.deploy.config.options import in_flags
from tandem.deploy.drafter import with_drafter
from tandem.deploy.supervise.progress import StartProgress
from tandem.engine.layers.kernel_cache import cache_directory
from tandem.engine.models.config import ModelConfig
from tandem.engine.stage_timer import StageTimer
from tandem.engine.weights.resolve import resolve_model
from tandem.sampling_params import SamplingParams

# Compiling one kernel may take minutes.
RUN_TIMEOUT_S = 1800.0
NUM_OUTPUT_TOKENS = 3
SHORT_PROMPT = 5
# Long enough for backends that split contexts to split it.
LONG_PROMPT = 4096
# Triton compiles separate variants for a size of 1 and for multiples of 16.
BATCH_SIZES = (1, 2, 3, 16, 17)
SAMPLINGS = (
    SamplingParams(NUM_OUTPUT_TOKENS, temperature=1.0, seed=1),
    SamplingParams(NUM_OUTPUT_TOKENS, temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, seed=2),
    SamplingParams(NUM_OUTPUT_TOKENS, repetition_penalty=1.1, presence_penalty=0.5, logit_bias=((0, 1.0),)),
    SamplingParams(NUM_OUTPUT_TOKENS, num_logprobs=5),
    SamplingParams(NUM_OUTPUT_TOKENS, num_logprobs=0, logprob_token_ids=(0, 1), allowed_token_ids=(0, 1, 2)),
    SamplingParams(NUM_OUTPUT_TOKENS, num_prompt_logprobs=5, min_tokens=2, stop_token_ids=(0,)),
)


def compile_kernels(config: ClusterConfig) -> int:
    console = Console(soft_wrap=True, highlight=False)
    stages = StageTimer()
    try:
        _check_device(config)
        model_dir = resolve_model(config.model, "dummy")
        config = with_drafter(config, "dummy")
        with StartProgress(console) as progress:
            for part, max_graph in (("without graphs", 0), ("with graphs", config.cuda_graph_max_bs)):

                def begin(doing: str, part: str = part) -> None:
                    stages.begin(f"{part}: {doing}")
                    progress(part, doing)

                run_configuration(config, model_dir, max_graph, begin)
                # Free this engine's pool before the next one is built.
                gc.collect()
                stages.end()
                progress(part, "ready")
    except (ValueError, OSError) as error:
        print(f"tandem compile: {in_flags(str(error), OPTIONS)}", file=sys.stderr)
        return exit_codes.USAGE
    _report(console, stages)
    return 0


def run_configuration(
    config: ClusterConfig, model_dir: Path, max_graph: int, on_progress: Callable[[str], None]
) -> None:
    """Builds an engine and launches every kernel that it has.

    Args:
        max_graph: largest decode batch that runs as a CUDA graph; 0: none.

    Raises:
        ValueError: the model cannot be served as configured.
    """
    from tandem.engine.build import build_engine

    on_progress("device and model")
    model = ModelConfig.from_dir(model_dir)
    max_model_len = config.max_model_len or model.max_position_embeddings
    sizes = config.worker("compile", "both", config.engine(str(model_dir)), max_model_len).worker.engine
    warmer = Warmer(model, sizes.max_chunk_tokens, sizes.max_batch_size)
    engine_config = replace(
        config.engine(str(model_dir)),
        load_format="dummy",
        num_pages=warmer.num_pages(config.page_size),
        cuda_graph_max_bs=max_graph,
    )
    plan = config.worker("compile", "both", engine_config, max_model_len)
    engine = build_engine(plan.worker.engine, "compile", on_progress)
    try:
        counts = Counts()
        worker = LocalWorker(engine, plan.prefill, plan.decode, counts.count)
        for doing in warmer.run(worker, counts):
            on_progress(doing)
    finally:
        engine.close()


class Warmer:
    def __init__(self, model: ModelConfig, chunk_size: int, max_batch_size: int) -> None:
        self._vocab_size = model.vocab_size
        self._chunk_size = chunk_size
        self._max_batch_size = max(max_batch_size, *BATCH_SIZES)
        self._rng = random.Random(0)
        self._num_requests = 0
        self._longest = min(max(2 * chunk_size, LONG_PROMPT), model.max_position_embeddings - NUM_OUTPUT_TOKENS)

    def num_pages(self, page_size: int) -> int:
        """Returns the pages for the longest prompt, three prompts that share its prefix, and the largest batch."""
        longest = -(-(self._longest + SHORT_PROMPT + NUM_OUTPUT_TOKENS) // page_size)
        short = -(-(SHORT_PROMPT + self._num_tokens(self._max_batch_size)) // page_size)
        return 4 * longest + self._max_batch_size * short

    def run(self, worker: LocalWorker, counts: Counts) -> Iterator[str]:
        yield "prefill"
        for num_tokens in (1, 2, 16, 17, self._longest // 2):
            self._serve(worker, counts, [self._prompt(num_tokens)])
        self._serve(worker, counts, [self._prompt(n) for n in (1, 7, 16, 30)])
        yield "prefill in chunks and after a cached prefix"
        long = self._prompt(self._longest)
        prefix = long[: self._longest // 2]
        self._serve(worker, counts, [long])
        self._serve(worker, counts, [prefix + self._prompt(SHORT_PROMPT)])
        self._serve(worker, counts, [prefix + self._prompt(1), prefix + self._prompt(4), self._prompt(SHORT_PROMPT)])
        yield "decode"
        for size in sorted({*BATCH_SIZES, self._max_batch_size}):
            sampling = SamplingParams(self._num_tokens(size))
            self._serve(worker, counts, [self._prompt(SHORT_PROMPT) for _ in range(size)], [sampling] * size)
        yield "sampling"
        for sampling in SAMPLINGS:
            self._serve(worker, counts, [self._prompt(SHORT_PROMPT)], [sampling])
        self._serve(worker, counts, [self._prompt(SHORT_PROMPT) for _ in SAMPLINGS], SAMPLINGS)

    def _num_tokens(self, batch_size: int) -> int:
        """Returns the output tokens that keep the first request decoding until the last one is prefilled."""
        return NUM_OUTPUT_TOKENS + batch_size * SHORT_PROMPT // self._chunk_size

    def _prompt(self, num_tokens: int) -> list[int]:
        return self._rng.choices(range(self._vocab_size), k=num_tokens)

    def _serve(
        self,
        worker: LocalWorker,
        counts: Counts,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingParams] = (),
    ) -> None:
        """Serves prompts concurrently. Args: samplings: one for each prompt; default: greedy."""
        greedy = [SamplingParams(NUM_OUTPUT_TOKENS)] * len(prompts)
        for prompt, sampling in zip(prompts, samplings or greedy, strict=True):
            worker.submit(f"r{self._num_requests}", prompt, sampling)
            self._num_requests += 1
        worker.run_until(lambda: counts.num_ended == self._num_requests, RUN_TIMEOUT_S)


def _check_device(config: ClusterConfig) -> None:
    """Raises ValueError if the device needs no compilation, or if no GPU is present."""
    if config.device != "cuda":
        raise ValueError(f"device {config.device} needs no compiled kernels: set `device` to cuda")
    import torch

    from tandem.engine.build import why_no_gpu

    if not torch.cuda.is_available():
        raise ValueError(f"{why_no_gpu()}; run this on a machine with the GPU of the workers")


def _cache_directories() -> dict[str, Path]:
    # A machine without CUDA has neither package.
    from flashinfer.jit import env
    from triton import knobs

    return {
        "FLASHINFER_WORKSPACE_BASE": Path(env.FLASHINFER_CACHE_DIR),
        "TRITON_CACHE_DIR": Path(knobs.cache.dir),
        "TANDEM_KERNEL_CACHE": cache_directory(),
    }


def _report(console: Console, stages: StageTimer) -> None:
    table = Table("what", title="Kernels are compiled")
    table.add_column("seconds", justify="right")
    for name, seconds in [*stages.seconds.items(), ("together", sum(stages.seconds.values()))]:
        table.add_row(name, f"{seconds:.1f}")
    console.print(table)
    for variable, directory in _cache_directories().items():
        sizes = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
        console.print(f"{len(sizes)} files, {sum(sizes) / 2**20:.0f} MiB in {directory} (set by {variable})")
