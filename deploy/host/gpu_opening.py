"""Opens a worker's GPU while torch is imported, which saves a good part of a second."""

import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Any

from tandem.deploy.host.cpu_affinity import run_beside
from tandem.deploy.host.gpu_turn import GpuTurn

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
        turn: GpuTurn | None = None,
    ) -> None:
        """Args: turn: taken before anything of this process is on the GPU; None: no other worker shares it."""
        self._load_driver = load_driver
        self._run_beside = run_beside
        self._turn = turn
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._open, name="gpu-opening", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Raises OSError: the turn did not come, as GpuTurn.take."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

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
                if not self._take_turn(pci_id.value.decode()):
                    return
            # torch uses this primary context too, and likewise never releases it.
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        except (OSError, AttributeError, ValueError) as error:
            logger.info("the GPU is opened by torch: %s", error)

    def _take_turn(self, pci_id: str) -> bool:
        try:
            if self._turn is not None:
                self._turn.take(pci_id)
        except OSError as error:
            self._failure = error
            return False
        return True
