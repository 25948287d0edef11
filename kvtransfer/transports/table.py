"""Transports by name in configurations (`transport`) and handshakes, best first."""

from typing import TYPE_CHECKING

from tandem.choices import Choice, Choices

if TYPE_CHECKING:
    from tandem.kvtransfer.transports.base import Transport

# Stands for all transports of the pages' device.
AUTO = "auto"

TRANSPORTS: "Choices[Transport]" = Choices(
    "tandem.kvtransfer.transports.base:Transport",
    {
        "nvlink": Choice("tandem.kvtransfer.transports.nvlink:Nvlink", ("cuda",)),
        "nccl": Choice("tandem.kvtransfer.transports.nccl:Nccl", ("cuda",)),
        "shared_memory": Choice("tandem.kvtransfer.transports.shared_memory:SharedMemory", ("cpu",)),
        "tcp": Choice("tandem.kvtransfer.transports.tcp:Tcp", ("cpu",)),
    },
)
