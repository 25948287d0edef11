"""A fake CUDA device on the CPU: streams, events and batched copies.

A stream works only when it is queried, in order, up to the awaited point.
"""

import contextlib
import ctypes
import itertools
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

# Fails a wait that would never end.
SYNCHRONIZE_TIMEOUT_S = 20.0
_numbers = itertools.count(1)
_streams: "weakref.WeakValueDictionary[int, FakeStream]" = weakref.WeakValueDictionary()


class FakeStream:
    """
    Attributes:
        failure: message of the error that waiting raises, as on a lost device; "" if none.
    """

    failure = ""

    def __init__(self, device: torch.device) -> None:
        self.cuda_stream = next(_numbers)
        self._work: deque[Callable[[], bool]] = deque()
        self._advancing = False
        _streams[self.cuda_stream] = self

    def submit(self, work: Callable[[], bool]) -> None:
        """Args: work: called until it returns True, when it is done."""
        self._work.append(work)

    def advance(self) -> bool:
        """Run the work that can run; return whether none is left."""
        # A stream that this one waits for may query this one in turn.
        if not self._advancing:
            self._advancing = True
            while self._work and self._work[0]():
                self._work.popleft()
            self._advancing = False
        return not self._work

    def wait_event(self, event: "FakeEvent") -> None:
        self.submit(event.recorded())

    def wait_stream(self, other: "FakeStream") -> None:
        event = FakeEvent()
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        if self.failure:
            raise RuntimeError(self.failure)
        deadline = time.monotonic() + SYNCHRONIZE_TIMEOUT_S
        while not self.advance():
            assert time.monotonic() < deadline, "the stream never ends"
            time.sleep(0.001)


class FakeEvent:
    """As in CUDA, an event that was never recorded counts as done."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._recorded: Callable[[], bool] = lambda: True
        self._time = 0.0

    def record(self, stream: FakeStream) -> None:
        happened: list[bool] = []

        def happen() -> bool:
            self._time = time.monotonic()
            happened.append(True)
            return True

        stream.submit(happen)

        def has_happened() -> bool:
            stream.advance()
            return bool(happened)

        self._recorded = has_happened

    def recorded(self) -> Callable[[], bool]:
        """Return a predicate for the latest record, unaffected by later ones."""
        return self._recorded

    def query(self) -> bool:
        return self._recorded()

    def synchronize(self) -> None:
        deadline = time.monotonic() + SYNCHRONIZE_TIMEOUT_S
        while not self._recorded():
            assert time.monotonic() < deadline, "the event never happens"
            time.sleep(0.001)

    def elapsed_time(self, end: "FakeEvent") -> float:
        """Return milliseconds."""
        return (end._time - self._time) * 1000


def stream_of(handle: int) -> FakeStream:
    return _streams[handle]


def _copy_batch(dst: list[int], src: list[int], sizes: list[int], *rest: Any) -> tuple[int]:
    def copy() -> bool:
        for to, source, num_bytes in zip(dst, src, sizes, strict=True):
            ctypes.memmove(to, source, num_bytes)
        return True

    stream_of(rest[-1]).submit(copy)
    return (0,)


@contextlib.contextmanager
def fake_cuda(
    others: dict[str, ModuleType], imported_anew: tuple[str, ...], runtime_calls: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Make GPU modules import this device in place of CUDA's inside the block.

    Args:
        others: further fake library modules.
        imported_anew: Tandem modules that import any of them.
        runtime_calls: further names of CUDA's runtime.
    """
    runtime, bindings, cuda = (ModuleType(name) for name in ("cuda.bindings.runtime", "cuda.bindings", "cuda"))
    vars(runtime).update(
        cudaError_t=SimpleNamespace(cudaSuccess=0),
        cudaMemcpyAttributes=SimpleNamespace,
        cudaMemcpySrcAccessOrder=SimpleNamespace(cudaMemcpySrcAccessOrderStream=1),
        cudaMemcpyBatchAsync=_copy_batch,
        **(runtime_calls or {}),
    )
    vars(bindings)["runtime"], vars(cuda)["bindings"] = runtime, bindings
    stand_ins = {"cuda": cuda, "cuda.bindings": bindings, "cuda.bindings.runtime": runtime, **others}
    names = (*stand_ins, "tandem.engine.kvcache.cuda_pool", "tandem.engine.kvcache.batched_copies", *imported_anew)
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    _forget(names)
    sys.modules.update(stand_ins)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "Stream", FakeStream)
            patch.setattr(torch.cuda, "Event", FakeEvent)
            patch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
            yield
    finally:
        _forget(names)
        for name, module in before.items():
            sys.modules[name] = module
            _set_in_package(name, module)


def _forget(names: Iterable[str]) -> None:
    for name in names:
        sys.modules.pop(name, None)
        _set_in_package(name, None)


def _set_in_package(name: str, module: ModuleType | None) -> None:
    """Set the module that `from package import module` finds."""
    package, _, own_name = name.rpartition(".")
    if package in sys.modules:
        vars(sys.modules[package]).pop(own_name, None)
        if module is not None:
            vars(sys.modules[package])[own_name] = module
