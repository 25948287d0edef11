"""The receiver's choice among the transports that a sender offers for a link."""

import logging
from collections.abc import Mapping

from tandem.hosts import host_id
from tandem.kvtransfer.transports.base import ReceiverTransport, Transport
from tandem.kvtransfer.transports.opening import OpeningError, describe, let_go, open_end
from tandem.messages import LinkHello

logger = logging.getLogger(__name__)


class NoTransportError(Exception):
    """No offered transport opens here."""


async def choose_transport(
    hello: LinkHello, transports: Mapping[str, Transport], gpu: str = ""
) -> tuple[str, ReceiverTransport, bytes, tuple[str, ...]]:
    """Opens the sender's most preferred transport that both ends have and that opens here.

    Args:
        gpu: PCI id of this worker's GPU; "" on a CPU.

    Returns:
        The transport's name, end and endpoint, and the reasons against earlier ones, as in LinkWelcome.

    Raises:
        NoTransportError: none of them can be used.
    """
    left = [name for name in hello.transports if name in transports]
    if not left:
        ours = ", ".join(transports)
        raise NoTransportError(f"no common transport: {', '.join(hello.transports)} at the sender, {ours} here")
    passed_over: list[str] = []
    failures: list[str] = []
    is_here = hello.sender_host == host_id()
    is_on_one_gpu = is_here and bool(gpu) and hello.sender_gpu == gpu
    for name in hello.transports:
        if name not in transports:
            passed_over.append(f"{name}: the receiver does not have it")
            continue
        left.remove(name)
        unusable = ""
        if transports[name].within_host and not is_here:
            # The sender's ids mean nothing on this host.
            unusable = "the two ends are on different hosts"
        elif transports[name].between_gpus and is_on_one_gpu:
            unusable = f"it needs a GPU for each end, and both are on {gpu}"
        if unusable:
            failures.append(f"{name}: {unusable}")
            passed_over.append(failures[-1])
            continue
        try:
            return name, *await _open_receiver(transports[name]), tuple(passed_over)
        except OpeningError as error:
            failures.append(f"{name}: {error}")
            passed_over.append(f"{name}: the receiver cannot open it: {error}")
            what_next = f"{left[0]} is tried next" if left else "none is left"
            logger.warning(
                "link from %s: transport %s cannot be opened: %s; %s", hello.sender_id, name, error, what_next
            )
    raise NoTransportError(f"the receiver can open none of the transports: {'; '.join(failures)}")


async def _open_receiver(transport: Transport) -> tuple[ReceiverTransport, bytes]:
    end = await open_end(transport.open_receiver)
    try:
        return end, end.endpoint()
    except Exception as error:
        let_go(end)
        raise OpeningError(describe(error)) from error
