"""Opens a worker's GPU while torch is imported, which saves a good part of a second."""

import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Any

from tandem.deploy.host.cpu_affinity import run_beside

logger = logging.getLogger(__name__)

_DRIVER = "libcuda.so.1"
_PCI_ID_BYTES = 32


class GpuOpening:
    """Opens the first visible GPU on a thread and pins the process to the CPUs local to it.

    On failure torch opens the GPU, and reports the error.
    """

    def __init__(
        self,
        load_driver: Callable[[str], Any] = ctypes.CDLL,
        run_beside: Callable[[str], str] = run_beside,
    ) -> None:
        self._load_driver = load_driver
        self._run_beside = run_beside
        self._thread = threading.Thread(target=self._open, name="gpu-opening", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def _open(self) -> None:
        try:
            # ctypes calls release the GIL for the imports.
            driver = self._load_driver(_DRIVER)
            device, context = ctypes.c_int(), ctypes.c_void_p()
            pci_id = ctypes.create_string_buffer(_PCI_ID_BYTES)
            if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
                return
            if not driver.cuDeviceGetPCIBusId(pci_id, _PCI_ID_BYTES, device):
                logger.info("%s", self._run_beside(pci_id.value.decode()))
            # torch uses this primary context too, and likewise never releases it.
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        except (OSError, AttributeError, ValueError) as error:
            logger.info("the GPU is opened by torch: %s", error)
