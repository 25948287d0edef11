"""Holds routers' ports on another node than the launcher's, as the launcher does on its own (deploy/host/ports.py)."""

import contextlib
import threading
from collections.abc import Sequence
from typing import NamedTuple

from tandem.deploy.host.ports import ReservedPorts
from tandem.router.config import port_of


class WantedPort(NamedTuple):
    """
    Attributes:
        host: the address, or one that stands for all.
        port: 0: a free one.
        field: where it is configured, for the message.
    """

    host: str
    port: int
    field: str


class PortHolder:
    """An actor; what it holds is free when it ends."""

    def __init__(self) -> None:
        self._ports = ReservedPorts()
        self._ended = threading.Event()

    def hold(self, wanted: Sequence[WantedPort]) -> list[int]:
        """Takes ports that nobody else has; returns their numbers. Raises ValueError: one is taken."""
        return [port_of(self._ports.reserve(*one)) for one in wanted]

    def hold_again(self, wanted: Sequence[WantedPort]) -> None:
        """Takes those that an earlier holder had. One that cannot be had now is shared by routers that live, or
        somebody else's: then the router that wants it will say so."""
        for one in wanted:
            with contextlib.suppress(ValueError):
                self._ports.reserve(*one)

    def wait_ended(self) -> None:
        """Never returns; the caller sees an error at once if the process dies."""
        self._ended.wait()
