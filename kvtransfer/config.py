"""Options of a worker's links. Nothing here imports torch: the command line imports this module."""

from dataclasses import dataclass

from tandem.config import require
from tandem.kvtransfer.transports.table import TRANSPORTS


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Options of a worker's links.

    Attributes:
        transports: transports in order of preference, each a name in TRANSPORTS or an import path package.module:Class.
            A link uses the sender's first transport that both ends have and can open.
    """

    transports: tuple[str, ...]

    def __post_init__(self) -> None:
        require(len(self.transports) > 0, "at least one transport is needed")
        for name in self.transports:
            TRANSPORTS.check("transport", name)
