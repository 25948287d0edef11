"""Compiles CUDA C++ kernels while the engine goes on."""

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeAlias

# Of a package's source, with the compiler's options.
Kernel: TypeAlias = tuple[str, str, tuple[str, ...]]

NUM_THREADS = 8
TIMEOUT_S = 120.0


class KernelCompilers:
    """Compiles each kernel once and keeps the result, for any number of threads.

    Its own threads end with their work. A process that ends does not wait for them.
    """

    def __init__(
        self, compile_kernel: Callable[[str, str, tuple[str, ...]], bytes], timeout_s: float = TIMEOUT_S
    ) -> None:
        self._compile = compile_kernel
        self._timeout_s = timeout_s
        self._results: dict[Kernel, Future[bytes]] = {}

    def begin(self, kernels: Iterable[Kernel]) -> None:
        """Begins to compile, in this order, kernels that were not begun before."""
        new = [(kernel, result) for kernel in kernels if (result := self._begun(kernel)) is not None]
        waiting: queue.SimpleQueue[tuple[Kernel, Future[bytes]]] = queue.SimpleQueue()
        for kernel, result in new:
            waiting.put((kernel, result))
        for _ in range(min(NUM_THREADS, len(new))):
            threading.Thread(target=self._work, args=(waiting,), name="compiler", daemon=True).start()

    def get(self, kernel: Kernel) -> bytes:
        """Returns a compiled kernel. Compiles it here unless it was begun.

        Raises:
            RuntimeError: it cannot be compiled.
            TimeoutError: compiling takes longer than the limit.
        """
        if (new := self._begun(kernel)) is not None:
            self._finish(kernel, new)
        try:
            return self._results[kernel].result(self._timeout_s)
        except FutureTimeoutError:
            package, name, options = kernel
            raise TimeoutError(
                f"{package}.{name} is not compiled after {self._timeout_s:g} s ({' '.join(options)}): the host's CPUs "
                "may be busy; start the worker again"
            ) from None

    def _begun(self, kernel: Kernel) -> Future[bytes] | None:
        """Returns the place of the kernel's result; None: another call has begun it."""
        result: Future[bytes] = Future()
        return result if self._results.setdefault(kernel, result) is result else None

    def _work(self, waiting: "queue.SimpleQueue[tuple[Kernel, Future[bytes]]]") -> None:
        while True:
            try:
                kernel, result = waiting.get_nowait()
            except queue.Empty:
                return
            self._finish(kernel, result)

    def _finish(self, kernel: Kernel, result: Future[bytes]) -> None:
        try:
            result.set_result(self._compile(*kernel))
        except BaseException as error:  # Raised again where the kernel is needed.
            result.set_exception(error)
