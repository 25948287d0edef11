"""Compiles kernels while weights load, by trial forward passes of a few layers."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tandem.engine.attention.base import AttentionBackend
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.batch import Batch
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.kvcache.sizing import GIB
from tandem.engine.models.base import Model
from tandem.engine.models.build import FUSED_DTYPES, layer_ops
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.trial_batches import DECODE_SIZES, TrialBatches

logger = logging.getLogger(__name__)

# Libraries may compile for minutes on a new machine. A start as a whole takes no longer.
TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 5.0
# Free memory beside weights, at least, for the threads' engines and for loading the largest tensor in float32.
ENGINE_BYTES = 2 * GIB
LOADED_BYTES = 4
# Larger prefills run the same kernels.
MAX_PREFILL_TOKENS = 1280
# Larger decode steps run other kernels, so two threads share the steps.
MAX_FEW = 16


class Rehearsal:
    """Runs batches in threads, each with an engine of its own: kernels keep scratch memory."""

    def __init__(
        self, make_engine: Callable[[], Engine], parts: Sequence[Iterable[Batch]], device: torch.device
    ) -> None:
        """Args: make_engine: called in each thread; parts: a thread's batches.

        Raises:
            RuntimeError: the process can have no more threads.
        """
        self._make_engine = make_engine
        self._device = device
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        for part in parts:
            thread = threading.Thread(target=self._run, args=(part,), name="rehearsal", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self.stop()
                raise
            self._threads.append(thread)

    def wait(self, timeout_s: float = TIMEOUT_S) -> None:
        """Waits for the end of all batches. Raises TimeoutError."""
        if not self._join(timeout_s):
            self._stopped.set()
            raise TimeoutError(
                f"kernels are not compiled after {timeout_s:g} s: the host's CPUs may be busy; start the worker again"
            )

    def stop(self) -> None:
        """Ends the threads after their current batch, which it awaits for a while."""
        self._stopped.set()
        self._join(STOP_TIMEOUT_S)

    def _join(self, timeout_s: float) -> bool:
        """Returns whether all threads end in time."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, part: Iterable[Batch]) -> None:
        try:
            with _own_stream(self._device):
                engine = self._make_engine()
                for batch in part:
                    if self._stopped.is_set():
                        return
                    self._forward(engine, batch)
        except torch.OutOfMemoryError as error:
            logger.info("kernels are compiled after the weights are loaded, because %s", error)
        except Exception:  # The engine itself meets it again.
            logger.warning("kernels are compiled after the weights are loaded, because:", exc_info=True)

    def _forward(self, engine: Engine, batch: Batch) -> None:
        try:
            engine.forward(batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Triton may start a kernel that another thread has compiled but not loaded.
            logger.info("a trial pass failed and is repeated: %r", error)
            engine.forward(batch)


@contextmanager
def rehearsing(
    config: EngineConfig,
    model: Model,
    layout: PageLayout,
    backend: Callable[[KvPool], AttentionBackend],
    device: torch.device,
    on_progress: Callable[[str], None],
) -> Iterator[None]:
    """Compiles a model's kernels while the caller loads its weights, which begin as zeros.

    Waits for them at the end. Does nothing if nothing is compiled, or memory is short, or it is not safe: several ranks
    would have to run the same passes, other workers measure the GPU's free memory, and experts are not chosen before
    their router is loaded.

    Args: backend: of pages that are not quantized, or by scales of 1.

    Raises:
        TimeoutError: compiling takes longer than the limit.
    """
    rehearsal = _begun(config, model, layout, backend, device)
    try:
        yield
    except BaseException:
        if rehearsal is not None:
            rehearsal.stop()
        raise
    if rehearsal is not None:
        on_progress("compiling kernels")
        rehearsal.wait()


def _begun(
    config: EngineConfig,
    model: Model,
    layout: PageLayout,
    backend: Callable[[KvPool], AttentionBackend],
    device: torch.device,
) -> Rehearsal | None:
    is_alone = model.collectives is None and config.workers_per_gpu == 1
    is_compiled = device.type == "cuda" and model.dtype in FUSED_DTYPES and model.config.experts is None
    if not isinstance(model, DecoderModel) or not is_alone or not is_compiled or not _has_room(model, device):
        return None
    from tandem.engine.attention.paged_decode import has_kernel
    from tandem.engine.kvcache.cuda_pool import CudaKvPool
    from tandem.engine.layers.cuda_kernel import has_dependent_launch

    shallow = model.shallow()

    def make_engine() -> Engine:
        pool = CudaKvPool(layout, 1, device)
        return Engine(shallow.shallow(layer_ops(model.dtype, device)), pool, backend(pool))

    # The library's decode attention has a source that two threads must not write at once.
    is_by_head = isinstance(layout, KvHeadLayout) and has_kernel(layout, model.config.num_q_heads)
    divides_steps = is_by_head and has_dependent_launch(device)
    try:
        for _, weight in shallow.named_parameters():
            weight.zero_()
        torch.cuda.synchronize(device)
        # All at once: a forward pass needs one after another.
        shallow.begin_compiling()
        return Rehearsal(make_engine, rehearsed_batches(config, model.config, divides_steps=divides_steps), device)
    except RuntimeError as error:  # Of memory or threads.
        logger.info("kernels are compiled after the weights are loaded, because %s", error)
        return None


def rehearsed_batches(config: EngineConfig, model: ModelConfig, *, divides_steps: bool = True) -> list[Iterator[Batch]]:
    """Returns the batches of each thread. They meet most kernels of forward passes. Args: divides_steps: among two."""
    parts: list[Iterator[Batch]] = []
    if max_batch_size := max(config.max_batch_size, config.cuda_graph_max_bs):
        few, many = ([n for n in DECODE_SIZES if (n <= MAX_FEW) == is_few] for is_few in (True, False))
        for sizes in (few, many) if divides_steps else (DECODE_SIZES,):
            parts.append(TrialBatches(model).steps(max_batch_size, sizes))
    if config.max_chunk_tokens:
        # The largest first: they need none of the kernels that compile longest.
        prefills = TrialBatches(model).prefills(min(config.max_chunk_tokens, MAX_PREFILL_TOKENS))
        parts.append(reversed(list(prefills)))
    return parts


def _has_room(model: DecoderModel, device: torch.device) -> bool:
    largest = max(weight.numel() for _, weight in model.named_parameters())
    return torch.cuda.mem_get_info(device)[0] >= ENGINE_BYTES + LOADED_BYTES * largest


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, returns once the device is done."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
        torch.cuda.current_stream(device).synchronize()
