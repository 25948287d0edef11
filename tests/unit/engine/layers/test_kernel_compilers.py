"""Kernels compiled in threads."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.engine.layers.kernel_compilers import NUM_THREADS, KernelCompilers


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
    begun, may_compile = threading.Event(), threading.Event()

    def compile_kernel(package: str, name: str, options: tuple[str, ...]) -> bytes:
        begun.set()
        may_compile.wait(10.0)
        return b""

    compilers = KernelCompilers(compile_kernel, timeout_s=0.01)
    compilers.begin([("package", "name", ("-DSIZE=1",))])
    assert begun.wait(10.0)
    with pytest.raises(TimeoutError, match=r"package\.name is not compiled after 0\.01 s \(-DSIZE=1\)"):
        compilers.get(("package", "name", ("-DSIZE=1",)))
    may_compile.set()


def test_a_needed_kernel_does_not_wait_for_its_turn() -> None:
    may_compile = threading.Event()

    def compile_kernel(package: str, name: str, options: tuple[str, ...]) -> bytes:
        if threading.current_thread() is not threading.main_thread():
            assert may_compile.wait(10.0)
        return options[0].encode()

    compilers = KernelCompilers(compile_kernel)
    compilers.begin(("package", "name", (f"-DSIZE={size}",)) for size in range(20))
    assert compilers.get(("package", "name", ("-DSIZE=19",))) == b"-DSIZE=19"
    may_compile.set()


def test_few_threads_compile_however_often_it_begins() -> None:
    threads, may_compile = set[int](), threading.Event()

    def compile_kernel(package: str, name: str, options: tuple[str, ...]) -> bytes:
        threads.add(threading.get_ident())
        assert may_compile.wait(10.0)
        return b""

    compilers = KernelCompilers(compile_kernel)
    kernels = [("package", "name", (f"-DSIZE={size}",)) for size in range(50)]
    for end in range(0, 50, 10):
        compilers.begin(kernels[: end + 10])
    may_compile.set()
    for kernel in kernels:
        compilers.get(kernel)
    assert len(threads - {threading.get_ident()}) <= NUM_THREADS


def test_an_error_is_raised_and_the_next_call_tries_again() -> None:
    errors = [RuntimeError("out of memory"), KeyboardInterrupt()]

    def compile_kernel(package: str, name: str, options: tuple[str, ...]) -> bytes:
        if errors:
            raise errors.pop()
        return b"compiled"

    compilers, kernel = KernelCompilers(compile_kernel), ("package", "name", ())
    with pytest.raises(KeyboardInterrupt):
        compilers.get(kernel)
    with pytest.raises(RuntimeError, match="out of memory"):
        compilers.get(kernel)
    assert compilers.get(kernel) == b"compiled"


def test_a_failed_compilation_keeps_nothing_of_its_caller() -> None:
    class Engine:
        pass

    def compile_kernel(package: str, name: str, options: tuple[str, ...]) -> bytes:
        raise RuntimeError("error: expected a declaration")

    compilers = KernelCompilers(compile_kernel)

    def need() -> "weakref.ref[Engine]":
        engine = Engine()
        with pytest.raises(RuntimeError, match="expected a declaration"):
            compilers.get(("package", "name", ()))
        return weakref.ref(engine)

    engine = need()
    gc.collect()
    assert engine() is None


def test_errors_are_raised_where_the_kernel_is_needed() -> None:
    def compile_kernel(package: str, name: str, options: tuple[str, ...]) -> bytes:
        raise RuntimeError("error: expected a declaration")

    compilers = KernelCompilers(compile_kernel)
    compilers.begin([("package", "name", ())])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="expected a declaration"):
            compilers.get(("package", "name", ()))
