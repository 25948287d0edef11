"""Kernels compiled in threads."""

import threading

import pytest

from tandem.engine.layers.kernel_compilers import KernelCompilers


def test_kernels_are_compiled_once_and_waited_for() -> None:
    compiled, may_compile = [], threading.Event()

    def compile_kernel(package: str, name: str, options: tuple[str, ...]) -> bytes:
        assert may_compile.wait(10.0)
        compiled.append(options)
        return b""

    compilers = KernelCompilers(compile_kernel)
    kernels = [("package", "name", (f"-DSIZE={size}",)) for size in range(20)]
    compilers.begin(kernels[:10])
    compilers.begin(kernels)
    # Not begun: whoever needs it compiles it.
    compilers.wait_for(("package", "name", ()))
    assert not compiled
    may_compile.set()
    for kernel in kernels:
        compilers.wait_for(kernel)
    assert sorted(compiled) == sorted(options for _, _, options in kernels)


def test_a_wait_ends_with_the_kernels_name() -> None:
    may_compile = threading.Event()

    def compile_kernel(package: str, name: str, options: tuple[str, ...]) -> bytes:
        may_compile.wait(10.0)
        return b""

    compilers = KernelCompilers(compile_kernel, timeout_s=0.01)
    compilers.begin([("package", "name", ("-DSIZE=1",))])
    with pytest.raises(TimeoutError, match=r"package\.name is not compiled after 0\.01 s \(-DSIZE=1\)"):
        compilers.wait_for(("package", "name", ("-DSIZE=1",)))
    may_compile.set()


def test_errors_are_raised_where_the_kernel_is_needed() -> None:
    def compile_kernel(package: str, name: str, options: tuple[str, ...]) -> bytes:
        raise RuntimeError("error: expected a declaration")

    compilers = KernelCompilers(compile_kernel)
    compilers.begin([("package", "name", ())])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="expected a declaration"):
            compilers.wait_for(("package", "name", ()))
