"""What a worker's links can be told. Nothing here imports torch: the command line reads this too."""

from dataclasses import dataclass

from tandem.config import require
from tandem.kvtransfer.transports.table import TRANSPORTS


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """How pages travel from and to one worker.

    Attributes:
        transports: ways for KV pages to travel, best first, each by its name in TRANSPORTS or by the import path
            package.module:Class of one's own. A link takes the sender's best that both ends have and can open.
    """

    transports: tuple[str, ...]

    def __post_init__(self) -> None:
        require(len(self.transports) > 0, "at least one transport is needed")
        for name in self.transports:
            TRANSPORTS.check("transport", name)
