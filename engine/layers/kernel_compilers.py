"""Compiles CUDA C++ kernels while the engine goes on."""

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
        # Of kernels that a thread compiles or has compiled.
        self._results: dict[Kernel, Future[bytes]] = {}
        self._lock = threading.Lock()
        # In order.
        self._waiting: dict[Kernel, None] = {}
        self._num_threads = 0

    def begin(self, kernels: Iterable[Kernel]) -> None:
        """Begins to compile, in this order, kernels that were not begun before."""
        with self._lock:
            self._waiting.update((kernel, None) for kernel in kernels if kernel not in self._results)
            num_new = max(0, min(NUM_THREADS, len(self._waiting)) - self._num_threads)
            self._num_threads += num_new
        for number in range(num_new):
            try:
                threading.Thread(target=self._work, name="compiler", daemon=True).start()
            except RuntimeError:
                # No more threads: whoever needs a kernel compiles it.
                with self._lock:
                    self._num_threads -= num_new - number
                return

    def get(self, kernel: Kernel) -> bytes:
        """Returns a compiled kernel. Compiles it here unless a thread does.

        Raises:
            RuntimeError: it cannot be compiled. The next call tries again.
            TimeoutError: compiling takes longer than the limit.
        """
        try:
            return self._begun(kernel).result(self._timeout_s)
        except FutureTimeoutError:
            package, name, options = kernel
            raise TimeoutError(
                f"{package}.{name} is not compiled after {self._timeout_s:g} s ({' '.join(options)}): the host's CPUs "
                "may be busy; start the worker again"
            ) from None

    def _begun(self, kernel: Kernel) -> Future[bytes]:
        """Returns the kernel's result, complete unless another thread compiles it."""
        new: Future[bytes] = Future()
        result = self._results.setdefault(kernel, new)
        if result is new:
            try:
                new.set_result(self._compile(*kernel))
            except BaseException as error:
                # An error that is kept would keep all of its callers' objects.
                del self._results[kernel]
                new.set_exception(error)
        return result

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_threads -= 1
                    return
                kernel = next(iter(self._waiting))
                del self._waiting[kernel]
            self._begun(kernel)
