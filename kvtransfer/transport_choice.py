"""The receiver's choice among the transports that a sender offers for a link."""

import logging

from tandem.hosts import host_id
from tandem.kvtransfer.lanes.plan import plan_lanes
from tandem.kvtransfer.lanes.ranks import LinkRanks
from tandem.kvtransfer.transports.base import ReceiverTransport
from tandem.kvtransfer.transports.opening import OpeningError
from tandem.messages import LinkHello

logger = logging.getLogger(__name__)


class NoTransportError(Exception):
    """No offered transport opens here."""


async def choose_transport(
    hello: LinkHello, ranks: LinkRanks
) -> tuple[str, ReceiverTransport, tuple[bytes, ...], tuple[str, ...]]:
    """Opens the sender's most preferred transport that both ends have and that opens here, on all lanes.

    Returns:
        The transport's name, end and endpoints, and the reasons against earlier ones, as in LinkWelcome.

    Raises:
        NoTransportError: none of them can be used.
    """
    transports = ranks.transports
    left = [name for name in hello.transports if name in transports]
    if not left:
        ours = ", ".join(transports)
        raise NoTransportError(f"no common transport: {', '.join(hello.transports)} at the sender, {ours} here")
    passed_over: list[str] = []
    failures: list[str] = []
    is_here = hello.sender_host == host_id()
    shared_gpu = _shared_gpu(hello, ranks) if is_here else ""
    for name in hello.transports:
        if name not in transports:
            passed_over.append(f"{name}: the receiver does not have it")
            continue
        left.remove(name)
        unusable = ""
        if transports[name].within_host and not is_here:
            # The sender's ids mean nothing on this host.
            unusable = "the two ends are on different hosts"
        elif transports[name].between_gpus and shared_gpu:
            unusable = f"it needs a GPU for each end, and both are on {shared_gpu}"
        if unusable:
            failures.append(f"{name}: {unusable}")
            passed_over.append(failures[-1])
            continue
        try:
            return name, *await ranks.open_receiver(name, [rank.heads for rank in hello.ranks]), tuple(passed_over)
        except OpeningError as error:
            failures.append(f"{name}: {error}")
            passed_over.append(f"{name}: the receiver cannot open it: {error}")
            what_next = f"{left[0]} is tried next" if left else "none is left"
            logger.warning(
                "link from %s: transport %s cannot be opened: %s; %s", hello.sender_id, name, error, what_next
            )
    raise NoTransportError(f"the receiver can open none of the transports: {'; '.join(failures)}")


def _shared_gpu(hello: LinkHello, ranks: LinkRanks) -> str:
    """Returns the GPU that both ends of some lane are on, or "". Args: hello: of a sender on this host."""
    for lane in plan_lanes([rank.heads for rank in hello.ranks], ranks.heads):
        gpu = ranks.ranks[lane.receiver_rank].gpu
        if gpu and gpu == hello.ranks[lane.sender_rank].gpu:
            return gpu
    return ""
