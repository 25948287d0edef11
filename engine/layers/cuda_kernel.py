"""CUDA C++ kernels, compiled by NVRTC at first use in about 0.1 s. Needs CUDA."""

import functools
from collections.abc import Mapping
from ctypes import c_float, c_int, c_void_p
from importlib.resources import files
from typing import Any

import torch
from cuda.bindings import driver, nvrtc

HEADER = "bfloat16.cuh"
PDL_CAPABILITY = 9

_PDL = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_SHARED_BYTES = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
# In percent.
_SHARED_SHARE = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= PDL_CAPABILITY


class CudaKernel:
    """A kernel compiled for one device and one set of macros.

    From Hopper on it uses programmatic dependent launch: it may start before earlier kernels end, and must wait
    (griddepcontrol.wait) before it touches memory that they write. Inputs from the host are safe at once, because a
    step begins with a torch kernel, which waits for all before it.
    """

    def __init__(
        self, package: str, name: str, macros: Mapping[str, int], device: torch.device, shared_bytes: int | None = None
    ) -> None:
        """
        Args:
            package: package of the source NAME.cu, which may include only HEADER.
            shared_bytes: dynamic shared memory per block. Unless None, multiprocessors give shared memory precedence
                over the L1 cache, so that blocks of consecutive such kernels fit beside each other.

        Raises:
            RuntimeError: the kernel cannot be compiled or loaded.
        """
        major, minor = torch.cuda.get_device_capability(device)
        options = f"--gpu-architecture=sm_{major}{minor}", *(f"-D{k}={v}" for k, v in macros.items())
        binary = _compile(package, name, options)
        with torch.cuda.device(device):
            # Loading needs a context, which torch's first allocation creates.
            torch.empty(1, device=device)
            # Never unloaded: graphs refer to it.
            self._function = _check(driver.cuModuleGetFunction(_check(driver.cuModuleLoadData(binary)), name.encode()))
            if shared_bytes is not None:
                _check(driver.cuFuncSetAttribute(self._function, _SHARED_BYTES, shared_bytes))
                _check(driver.cuFuncSetAttribute(self._function, _SHARED_SHARE, 100))
        self._shared_bytes = shared_bytes or 0
        self._device = device
        self._is_dependent = has_dependent_launch(device)

    def launch(self, grid: tuple[int, int], num_threads: int, *arguments: torch.Tensor | int | float | None) -> None:
        """Launches in torch's current stream.

        Args:
            arguments: tensors and None become pointers, numbers int and float.
        """
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = torch.cuda.current_stream(self._device).cuda_stream
        if self._is_dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = _PDL
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values, types = zip(*(_argument(a) for a in arguments), strict=True)
        _check(driver.cuLaunchKernelEx(config, self._function, (values, types), 0))


@functools.cache
def _compile(package: str, name: str, options: tuple[str, ...]) -> bytes:
    """Cached: the engine makes its kernels again after it measures memory."""
    source = files(package).joinpath(f"{name}.cu").read_bytes()
    header = files(__package__).joinpath(HEADER).read_bytes()
    program = _check(nvrtc.nvrtcCreateProgram(source, f"{name}.cu".encode(), 1, [header], [HEADER.encode()]))
    arguments = [option.encode() for option in ("--std=c++17", *options)]
    try:
        _check(nvrtc.nvrtcCompileProgram(program, len(arguments), arguments))
        binary = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
        _check(nvrtc.nvrtcGetCUBIN(program, binary))
    except RuntimeError as error:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{error}: {log.decode()}") from error
    finally:
        _check(nvrtc.nvrtcDestroyProgram(program))
    return binary


def _argument(value: torch.Tensor | int | float | None) -> tuple[int | float, Any]:
    if value is None or isinstance(value, torch.Tensor):
        return 0 if value is None else value.data_ptr(), c_void_p
    return value, c_int if isinstance(value, int) else c_float


def _check(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(status.name)
    return values[0] if values else None
