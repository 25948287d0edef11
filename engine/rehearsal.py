"""Compiles kernels while weights load, by trial forward passes of a few layers."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tandem.engine.attention.base import AttentionBackend
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

# Kernels compiled at first use may take minutes on a new machine.
TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0
# Memory left beside weights, at least: loading needs some too.
ROOM_BYTES = 4 * GIB
# Larger prefills run the same kernels.
MAX_PREFILL_TOKENS = 1280
# Larger decode steps run other kernels, so two threads share the steps.
MAX_FEW = 16


class Rehearsal:
    """Runs batches in threads, each with an engine of its own: kernels keep scratch memory."""

    def __init__(
        self, make_engine: Callable[[], Engine], parts: Sequence[Iterable[Batch]], device: torch.device
    ) -> None:
        """Args: make_engine: called in each thread; parts: a thread's batches."""
        self._make_engine = make_engine
        self._device = device
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(part,), name="rehearsal", daemon=True) for part in parts
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, timeout_s: float = TIMEOUT_S) -> None:
        """Waits for the end of all batches. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._stopped.set()
            raise TimeoutError(
                f"kernels are not compiled after {timeout_s:g} s: the host's CPUs may be busy; start the worker again"
            )

    def stop(self) -> None:
        """Ends the threads after their current batch, which it awaits for a while."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(STOP_TIMEOUT_S)

    def _run(self, part: Iterable[Batch]) -> None:
        try:
            with _own_stream(self._device):
                engine = self._make_engine()
                for batch in part:
                    if self._stopped.is_set():
                        return
                    engine.forward(batch)
        except Exception as error:  # The engine itself meets it again, unless memory ran out here alone.
            logger.info("kernels are compiled after the weights are loaded, because: %s", error)


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

    Waits for them at the end. Does nothing if nothing is compiled, or not safely: several ranks would have to run the
    same passes, other workers measure the GPU's free memory, and experts are not chosen before their router is loaded.

    Args: backend: of pages that are not quantized, or by scales of 1.

    Raises:
        TimeoutError: compiling takes longer than the limit.
    """
    is_alone = model.collectives is None and config.workers_per_gpu == 1
    is_compiled = device.type == "cuda" and model.dtype in FUSED_DTYPES and model.config.experts is None
    if not isinstance(model, DecoderModel) or not is_alone or not is_compiled or not _has_room(device):
        yield
        return
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    shallow = model.shallow()
    for _, weight in shallow.named_parameters():
        weight.zero_()
    torch.cuda.synchronize(device)
    # All at once: a forward pass needs one after another.
    layer_ops(model.dtype, device).begin_compiling(shallow.matrices())

    def make_engine() -> Engine:
        pool = CudaKvPool(layout, 1, device)
        return Engine(shallow.shallow(layer_ops(model.dtype, device)), pool, backend(pool))

    rehearsal = Rehearsal(make_engine, rehearsed_batches(config, model.config), device)
    try:
        yield
    except BaseException:
        rehearsal.stop()
        raise
    on_progress("compiling kernels")
    rehearsal.wait()


def rehearsed_batches(config: EngineConfig, model: ModelConfig) -> list[Iterator[Batch]]:
    """Returns the batches of each thread. They meet most kernels of forward passes."""
    parts: list[Iterator[Batch]] = []
    if max_batch_size := max(config.max_batch_size, config.cuda_graph_max_bs):
        few, many = ([n for n in DECODE_SIZES if (n <= MAX_FEW) == is_few] for is_few in (True, False))
        for sizes in (few, many):
            parts.append(TrialBatches(model).steps(max_batch_size, sizes))
    if config.max_chunk_tokens:
        # The largest first: they need none of the kernels that compile longest.
        prefills = TrialBatches(model).prefills(min(config.max_chunk_tokens, MAX_PREFILL_TOKENS))
        parts.append(reversed(list(prefills)))
    return parts


def _has_room(device: torch.device) -> bool:
    return torch.cuda.mem_get_info(device)[0] >= ROOM_BYTES


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, returns once the device is done."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
        torch.cuda.current_stream(device).synchronize()
