"""CUDA C++ kernels, compiled by NVRTC at first use in about 0.1 s, and kept in files. Needs CUDA."""

import functools
from collections.abc import Iterable, Mapping
from ctypes import c_float, c_int, c_void_p
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

import torch
from cuda.bindings import driver, nvrtc

from tandem.engine.layers.kernel_cache import cached, key_of
from tandem.engine.layers.kernel_compilers import Kernel, KernelCompilers

PDL_CAPABILITY = 9
# Bytes of a box's row in shared memory.
SWIZZLE = 128

Argument: TypeAlias = "torch.Tensor | c_void_p | int | float | driver.CUtensorMap | None"

_PDL = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_CLUSTER = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
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
        self,
        package: str,
        name: str,
        macros: Mapping[str, int],
        device: torch.device,
        *,
        shared_bytes: int | None = None,
        is_specific: bool = False,
        cluster: int = 1,
    ) -> None:
        """
        Args:
            package: package of the source NAME.cu, which may include the headers of this package and of its own.
            shared_bytes: dynamic shared memory per block. Unless None, multiprocessors give shared memory precedence
                over the L1 cache, so that blocks of consecutive such kernels fit beside each other.
            is_specific: allow instructions of this architecture alone.
            cluster: consecutive blocks of a cluster.

        Raises:
            RuntimeError: the kernel cannot be compiled or loaded.
            TimeoutError: a thread that compiles it takes too long.
        """
        capability = torch.cuda.get_device_capability(device)
        binary = compile_kernel(package, name, compile_options(macros, capability, is_specific=is_specific))
        with torch.cuda.device(device):
            # Loading needs a context, and torch binds none to a thread that only takes memory from its cache.
            _check(driver.cuCtxSetCurrent(_check(driver.cuDevicePrimaryCtxRetain(torch.cuda.current_device()))))
            # Never unloaded: graphs refer to it.
            self._function = _check(driver.cuModuleGetFunction(_check(driver.cuModuleLoadData(binary)), name.encode()))
            if shared_bytes is not None:
                _check(driver.cuFuncSetAttribute(self._function, _SHARED_BYTES, shared_bytes))
                _check(driver.cuFuncSetAttribute(self._function, _SHARED_SHARE, 100))
        self._shared_bytes = shared_bytes or 0
        self._cluster = cluster
        self._device = device
        self._is_dependent = has_dependent_launch(device)

    def launch(self, grid: tuple[int, int], num_threads: int, *arguments: Argument) -> None:
        """Launches in torch's current stream.

        Args:
            arguments: tensors, c_void_p and None become pointers, numbers int and float, tensor maps are copied.
        """
        config = self._config(grid, num_threads, is_dependent=self._is_dependent)
        config.hStream = torch.cuda.current_stream(self._device).cuda_stream
        values, types = zip(*(_argument(a) for a in arguments), strict=True)
        _check(driver.cuLaunchKernelEx(config, self._function, (values, types), 0))

    def max_clusters(self, num_threads: int) -> int:
        """Returns the clusters that fit on the device at once."""
        config = self._config((self._cluster, 1), num_threads, is_dependent=False)
        return int(_check(driver.cuOccupancyMaxActiveClusters(self._function, config)))

    def _config(self, grid: tuple[int, int], num_threads: int, *, is_dependent: bool) -> driver.CUlaunchConfig:
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        attributes = []
        if is_dependent:
            dependent = driver.CUlaunchAttribute()
            dependent.id = _PDL
            dependent.value.programmaticStreamSerializationAllowed = 1
            attributes.append(dependent)
        if self._cluster > 1:
            clustered = driver.CUlaunchAttribute()
            clustered.id = _CLUSTER
            size = clustered.value.clusterDim
            size.x, size.y, size.z = self._cluster, 1, 1
            attributes.append(clustered)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config


def tensor_map(x: torch.Tensor, box: tuple[int, ...]) -> driver.CUtensorMap:
    """Returns a map for copies by the tensor memory accelerator: boxes of x, to shared memory, swizzled by 128 bytes.

    Args:
        x: bfloat16 or of one byte per number; strides are multiples of 16 bytes, except 1 of the last dimension.
        box: size of a box in each dimension, with rows of 128 bytes. Numbers beyond x read as zero.
    """
    assert x.stride(-1) == 1 and x.element_size() * box[-1] == SWIZZLE
    return _encode(x.data_ptr(), x.dtype is torch.bfloat16, tuple(x.shape), x.stride(), box)


def compile_options(
    macros: Mapping[str, int], capability: tuple[int, int], *, is_specific: bool = False
) -> tuple[str, ...]:
    major, minor = capability
    architecture = f"sm_{major}{minor}{'a' if is_specific else ''}"
    return f"--gpu-architecture={architecture}", *(f"-D{name}={value}" for name, value in macros.items())


def begin_compiling(kernels: Iterable[Kernel]) -> None:
    """Compiles in threads. `compile_kernel` waits for them."""
    _compilers.begin(kernels)


def compile_kernel(package: str, name: str, options: tuple[str, ...]) -> bytes:
    """Compiles once: the engine makes its kernels again after it measures memory. Raises as KernelCompilers.get."""
    return _compilers.get((package, name, options))


def _compile(package: str, name: str, options: tuple[str, ...]) -> bytes:
    source = files(package).joinpath(f"{name}.cu").read_bytes()
    folders = [files(folder) for folder in dict.fromkeys((__package__, package))]
    headers = {
        file.name: file.read_bytes() for folder in folders for file in folder.iterdir() if file.name.endswith(".cuh")
    }
    arguments = ("--std=c++17", *options)
    key = key_of(_compiler(), arguments, name, source, headers)
    return cached(key, lambda: _compile_source(name, source, headers, arguments))


_compilers = KernelCompilers(_compile)


@functools.cache
def _compiler() -> str:
    """Returns NVRTC's version, and its file's size and date: versions have no patch number."""
    version = nvrtc.nvrtcVersion()
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split()[-1])
        if path.name.startswith("libnvrtc.so") and path.exists():
            status = path.stat()
            found.append((path.name, status.st_size, status.st_mtime_ns))
    return f"{version} {sorted(set(found))}"


def _compile_source(name: str, source: bytes, headers: Mapping[str, bytes], arguments: tuple[str, ...]) -> bytes:
    names = [header.encode() for header in headers]
    program = _check(
        nvrtc.nvrtcCreateProgram(source, f"{name}.cu".encode(), len(headers), list(headers.values()), names)
    )
    encoded = [argument.encode() for argument in arguments]
    try:
        _check(nvrtc.nvrtcCompileProgram(program, len(encoded), encoded))
        binary = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
        _check(nvrtc.nvrtcGetCUBIN(program, binary))
    except RuntimeError as error:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{error}: {log.decode()}") from error
    finally:
        _check(nvrtc.nvrtcDestroyProgram(program))
    return binary


def _argument(value: Argument) -> tuple[Any, Any]:
    if isinstance(value, driver.CUtensorMap):
        # The binding takes its own classes without a type.
        return value, None
    if value is None or isinstance(value, torch.Tensor):
        return 0 if value is None else value.data_ptr(), c_void_p
    if isinstance(value, c_void_p):
        return value.value or 0, c_void_p
    return value, c_int if isinstance(value, int) else c_float


@functools.lru_cache(maxsize=4096)
def _encode(
    address: int, is_bfloat16: bool, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> driver.CUtensorMap:
    """Cached: a model's weights stay where they are."""
    types = driver.CUtensorMapDataType
    size = 2 if is_bfloat16 else 1
    return _check(
        driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if is_bfloat16 else types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(shape),
            address,
            [driver.cuuint64_t(n) for n in reversed(shape)],
            [driver.cuuint64_t(n * size) for n in reversed(strides[:-1])],
            [driver.cuuint32_t(n) for n in reversed(box)],
            [driver.cuuint32_t(1) for _ in shape],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def _check(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(status.name)
    return values[0] if values else None
