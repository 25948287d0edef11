"""Kernels compiled in threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.engine.layers.kernel_compilers import KernelCompilers


def test_kernels_are_compiled_once_and_waited_for() -> None:
    compiled, may_compile = [], threading.Event()

    def compile_kernel(package: str, name: str, options: tuple[str, ...]) -> bytes:
        assert may_compile.wait(10.0)
        compiled.append(options)
        return str((package, name, options)).encode()

    compilers = KernelCompilers(compile_kernel)
    kernels = [("package", "name", (f"-DSIZE={size}",)) for size in range(20)]
    compilers.begin(kernels[:10])
    compilers.begin(kernels)
    assert not compiled
    may_compile.set()
    # Not begun: whoever needs it compiles it.
    kernels.append(("package", "name", ("-DSIZE=20",)))
    for kernel in (*kernels, *kernels):
        assert compilers.get(kernel) == str(kernel).encode()
    assert sorted(compiled) == sorted(options for _, _, options in kernels)


def test_threads_that_need_a_kernel_at_once_compile_it_once() -> None:
    num_compiled, may_compile = 0, threading.Event()

    def compile_kernel(package: str, name: str, options: tuple[str, ...]) -> bytes:
        nonlocal num_compiled
        num_compiled += 1
        assert may_compile.wait(10.0)
        return b"compiled"

    compilers = KernelCompilers(compile_kernel)
    with ThreadPoolExecutor(8) as threads:
        results = [threads.submit(compilers.get, ("package", "name", ())) for _ in range(8)]
        may_compile.set()
        assert [result.result(10.0) for result in results] == [b"compiled"] * 8
    assert num_compiled == 1


def test_a_wait_ends_with_the_kernels_name() -> None:
    may_compile = threading.Event()

    def compile_kernel(package: str, name: str, options: tuple[str, ...]) -> bytes:
        may_compile.wait(10.0)
        return b""

    compilers = KernelCompilers(compile_kernel, timeout_s=0.01)
    compilers.begin([("package", "name", ("-DSIZE=1",))])
    with pytest.raises(TimeoutError, match=r"package\.name is not compiled after 0\.01 s \(-DSIZE=1\)"):
        compilers.get(("package", "name", ("-DSIZE=1",)))
    may_compile.set()


def test_errors_are_raised_where_the_kernel_is_needed() -> None:
    def compile_kernel(package: str, name: str, options: tuple[str, ...]) -> bytes:
        raise RuntimeError("error: expected a declaration")

    compilers = KernelCompilers(compile_kernel)
    compilers.begin([("package", "name", ())])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="expected a declaration"):
            compilers.get(("package", "name", ()))
