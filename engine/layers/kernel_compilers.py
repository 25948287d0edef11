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
    """Threads end with their work. A process that ends does not wait for them."""

    def __init__(
        self, compile_kernel: Callable[[str, str, tuple[str, ...]], bytes], timeout_s: float = TIMEOUT_S
    ) -> None:
        """Args: compile_kernel: keeps the result for later calls."""
        self._compile = compile_kernel
        self._timeout_s = timeout_s
        self._results: dict[Kernel, Future[bytes]] = {}

    def begin(self, kernels: Iterable[Kernel]) -> None:
        """Begins to compile, in this order, kernels that were not begun before."""
        new = [kernel for kernel in dict.fromkeys(kernels) if kernel not in self._results]
        self._results.update((kernel, Future()) for kernel in new)
        waiting: queue.SimpleQueue[Kernel] = queue.SimpleQueue()
        for kernel in new:
            waiting.put(kernel)
        for _ in range(min(NUM_THREADS, len(new))):
            threading.Thread(target=self._work, args=(waiting,), name="compiler", daemon=True).start()

    def wait_for(self, kernel: Kernel) -> None:
        """Waits for a kernel, unless it was not begun.

        Raises:
            RuntimeError: it cannot be compiled.
            TimeoutError: compiling takes longer than the limit.
        """
        result = self._results.get(kernel)
        if result is None:
            return
        try:
            result.result(self._timeout_s)
        except FutureTimeoutError:
            package, name, options = kernel
            raise TimeoutError(
                f"{package}.{name} is not compiled after {self._timeout_s:g} s ({' '.join(options)}): the host's CPUs "
                "may be busy; start the worker again"
            ) from None

    def _work(self, waiting: "queue.SimpleQueue[Kernel]") -> None:
        while True:
            try:
                kernel = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                self._results[kernel].set_result(self._compile(*kernel))
            except Exception as error:  # Raised again where the kernel is needed.
                self._results[kernel].set_exception(error)
