"""Options of a worker's links. Nothing here imports torch: the command line imports this module."""

from dataclasses import dataclass

from tandem.config import require
from tandem.kvtransfer.transports.table import TRANSPORTS


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Options of a worker's links.

    Attributes:
        transports: names in TRANSPORTS or import paths package.module:Class, best first. A link uses the sender's first
            that both ends have and can open.
    """

    transports: tuple[str, ...]

    def __post_init__(self) -> None:
        require(len(self.transports) > 0, "at least one transport is needed")
        for name in self.transports:
            TRANSPORTS.check("transport", name)
