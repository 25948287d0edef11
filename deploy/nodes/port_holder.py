"""Holds routers' ports (deploy/host/ports.py) on another node."""

import contextlib
import threading
from collections.abc import Sequence
from typing import NamedTuple

from tandem.deploy.host.ports import ReservedPorts
from tandem.router.config import port_of


class WantedPort(NamedTuple):
    """
    Attributes:
        host: an address, or the wildcard.
        port: 0: any free port.
        field: of the configuration, for errors.
    """

    host: str
    port: int
    field: str


class PortHolder:
    def __init__(self) -> None:
        self._ports = ReservedPorts()
        self._ended = threading.Event()

    def hold(self, wanted: Sequence[WantedPort]) -> list[int]:
        """Returns the port numbers. Raises ValueError: a port is taken."""
        return [port_of(self._ports.reserve(*one)) for one in wanted]

    def hold_again(self, wanted: Sequence[WantedPort]) -> None:
        """Takes the ports of an earlier holder, if they are free. A router's start reports any other."""
        for one in wanted:
            with contextlib.suppress(ValueError):
                self._ports.reserve(*one)

    def wait_ended(self) -> None:
        """Never returns. The caller gets an error if the process dies."""
        self._ended.wait()
