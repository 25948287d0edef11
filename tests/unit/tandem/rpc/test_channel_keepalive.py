"""Keepalives of silent connections: neither end takes the other's pings for abuse."""

import asyncio
import time
from pathlib import Path

import pytest

from tandem.client.clients import TandemClient
from tandem.client.requests import TandemError, make_request
from tandem.kvtransfer.events import ReceiverLinkClosed, SenderLinkClosed
from tandem.router.config import RouterConfig
from tandem.router.process import RouterProcess
from tandem.rpc import channel
from tests.fakes.link_ends import ReceiverEnd, SenderEnd, wait_until
from tests.fakes.transport import ScriptedOpening

# The ends ping every 2 s.
IDLE_S = 40.0
# The client pings every 5 s.
SILENT_S = 90.0


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_idle_link_between_hosts_stays_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # The ends are on one host: let both take the other for a remote one.
    monkeypatch.setattr(channel, "is_loopback", lambda host: False)

    async def scenario() -> None:
        transports = {"scripted": ScriptedOpening()}
        async with ReceiverEnd(transports) as receiver, SenderEnd(transports) as sender:
            sender.links.set_peers([receiver.peer])
            await wait_until(lambda: len(sender.opened) == 1)
            await asyncio.sleep(IDLE_S)
            assert (sender.of(SenderLinkClosed), receiver.of(ReceiverLinkClosed)) == ([], [])

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_silent_wait_of_a_client_ends_with_the_router_s_answer(router_model_dir: Path) -> None:
    """Without a worker the router waits for one, as long as the option says, and sends nothing meanwhile."""
    process = RouterProcess(
        RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0, worker_wait_timeout_s=SILENT_S)
    )
    try:
        with TandemClient(process.start().grpc, one_router=True) as client:
            began = time.monotonic()
            with pytest.raises(TandemError, match="worker") as failed:
                list(client.generate(make_request("a")))
            assert "pings" not in str(failed.value)
            assert time.monotonic() - began >= SILENT_S
    finally:
        process.stop()
