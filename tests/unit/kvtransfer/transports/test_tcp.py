"""Links over two-sided transports: announced pushes, real bytes over TCP, and every number running on both sides."""

import time
from collections.abc import Callable

from engine.kvcache.base import PageLayout
from engine.kvcache.pool import CpuKvPool, KvPool
from kvtransfer.events import FromLink, LinkClosed
from kvtransfer.transports.base import SenderTransport
from kvtransfer.transports.factory import TransportFactory
from kvtransfer.transports.tcp import TcpReceiver, TcpSender
from tandem.messages import Failed, LeaseLost, LinkWelcome, Pushing
from tests.fakes.engine import expected_tokens
from tests.fakes.transport import ScriptedReceiver, ScriptedTransport
from tests.fakes.workers import WorkerPair

LAYOUT = PageLayout(num_layers=2, page_size=4, num_kv_heads=2, head_dim=64, dtype="float32")


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.001)


def tcp_pair(num_pages: int = 16) -> tuple[KvPool, KvPool, TcpSender, TcpReceiver]:
    source, destination = CpuKvPool(LAYOUT, num_pages, "tcp-source"), CpuKvPool(LAYOUT, num_pages, "tcp-destination")
    receiver = TcpReceiver(destination, "127.0.0.1")
    return source, destination, TcpSender(source, receiver.endpoint()), receiver


def test_tcp_moves_pages_to_where_they_belong() -> None:
    source, destination, sender, receiver = tcp_pair()
    for page in range(16):
        source.kv[page] = page + 1
    copies = [sender.push(0, [3, 0], [9, 9]), sender.push(1, [5], [9])]
    # The receiver decides where a push goes; what is not wanted is read and thrown away.
    receives = [receiver.expect(0, [1, 15], 2), receiver.expect(1, None, 1)]
    copies.append(sender.push(2, [7], [9]))
    receives.append(receiver.expect(2, [0], 1))
    wait_for(lambda: all(c.done() for c in [*copies, *receives]))
    assert [float(destination.kv[p].mean()) for p in (0, 1, 2, 15)] == [8, 4, 0, 1]
    assert sender.failure == receiver.failure == ""
    for end in (sender, receiver):
        over = end.abort()
        wait_for(over.done)


def test_aborting_a_receiver_that_waits_is_soon_over() -> None:
    _, destination, sender, receiver = tcp_pair()
    receive = receiver.expect(0, [1], 1)
    over = receiver.abort()
    wait_for(over.done, 2.0)
    assert not receive.done() and receiver.failure == ""
    assert float(destination.kv.abs().sum()) == 0
    wait_for(sender.abort().done, 2.0)


def test_a_peer_that_goes_away_is_a_failure() -> None:
    _, _, sender, receiver = tcp_pair()
    # Connected: who goes before that is no peer yet, and the link's own stream tells of its end.
    sender.push(0, [1], [1])
    wait_for(receiver.expect(0, [1], 1).done)
    receiver.expect(1, [1], 1)
    sender.abort()
    wait_for(lambda: "closed the connection" in receiver.failure)
    wait_for(receiver.abort().done)


def test_pushes_out_of_step_are_a_failure() -> None:
    _, _, sender, receiver = tcp_pair()
    receiver.expect(0, [1, 2], 2)
    sender.push(0, [1], [1])
    wait_for(lambda: "was announced" in receiver.failure)
    for end in (sender, receiver):
        wait_for(end.abort().done)


def test_a_stranger_is_not_listened_to() -> None:
    source, _, sender, receiver = tcp_pair()
    sender.abort()
    other = TcpReceiver(source, "127.0.0.1")
    endpoint = other.endpoint()
    TcpSender(source, type(endpoint)(0, 0, "00" * 16, endpoint.num_bytes, endpoint.address))
    wait_for(lambda: "stranger" in other.failure)
    for end in (receiver, other):
        wait_for(end.abort().done)


def test_an_unreachable_receiver_is_a_failure_and_no_push_waits_for_ever() -> None:
    source, _, sender, receiver = tcp_pair()
    endpoint = receiver.endpoint()
    for end in (sender, receiver):
        wait_for(end.abort().done)
    again = TcpSender(source, endpoint)
    pushes = [again.push(i, [1], [1]) for i in range(3)]
    wait_for(lambda: bool(again.failure))
    wait_for(lambda: all(push.done() for push in pushes))


def test_after_a_failure_nothing_is_committed_and_nothing_stays_locked() -> None:
    pair, sender, _ = scripted()
    pair.submit("r", list(range(10)))
    for _ in range(3):
        pair.turn()
    # The transport breaks: its copies are over, and have not arrived.
    sender.failure_reason = "broken"
    sender.complete_all()
    for _ in range(3):
        pair.turn()
    assert pair.p.outbox.closed == {pair.epoch: "broken"}
    assert pair.d.scheduler.num_running == 0 and pair.p.scheduler.stats().num_running == 1
    pair.cut_link()
    pair.turn()
    assert pair.p.scheduler.stats().num_locked_pages == 0
    assert [m.request_id for m in pair.p.outbox.of(Failed)] == ["r"]


def test_receives_of_a_released_lease_are_over_with_the_link() -> None:
    pair, sender, receiver = scripted()
    pair.submit("r", list(range(10)))
    for _ in range(3):
        pair.turn()
    pair.abort("r")
    sender.complete_all()
    for _ in range(4):
        pair.turn()
    assert pair.d.scheduler.stats().num_locked_pages == 3
    # The link dies before the last bytes are read.
    pair.cut_link()
    receiver.stopped.is_done = True
    pair.d.scheduler.step()
    assert pair.d.scheduler.stats().num_locked_pages == 0


def test_the_sender_s_best_common_transport_is_chosen() -> None:
    pool = CpuKvPool(LAYOUT, 2, "choice")
    factory = TransportFactory(pool, "127.0.0.1", ("shared_memory", "tcp"))
    assert factory.choose(("nvlink", "tcp", "shared_memory")) == "tcp"
    assert factory.choose(("nvlink",)) is None


def over_tcp() -> WorkerPair:
    """Two workers whose pages travel as bytes over a connection."""
    receivers: list[TcpReceiver] = []

    def open_receiver(pool: KvPool) -> TcpReceiver:
        receivers.append(TcpReceiver(pool, "127.0.0.1"))
        return receivers[-1]

    pair: list[WorkerPair] = []

    def open_sender(welcome: LinkWelcome) -> SenderTransport:
        return TcpSender(sender_pool(), receivers[-1].endpoint())

    def sender_pool() -> KvPool:
        return pair[0].p.engine.pool

    pair.append(WorkerPair(prefill={"open_transport": open_sender}, open_receiver=open_receiver, open=False))
    pair[0].open_link()
    return pair[0]


def test_tokens_over_tcp_are_those_of_the_model() -> None:
    pair = over_tcp()
    prompts = {f"r{n}": list(range(n, 3 * n)) for n in (1, 5, 16, 33)}
    for request_id, prompt in prompts.items():
        pair.submit(request_id, prompt, max_tokens=6)

    def finished() -> bool:
        pair.turn()
        return all(len(pair.tokens(request_id)) == 6 for request_id in prompts)

    wait_for(finished)
    for request_id, prompt in prompts.items():
        assert pair.output(request_id) == expected_tokens(prompt, 6)
    pair.cut_link()
    pair.check_idle()


def scripted() -> tuple[WorkerPair, ScriptedTransport, ScriptedReceiver]:
    sender, receiver = ScriptedTransport(two_sided=True), ScriptedReceiver()
    pair = WorkerPair(prefill={"open_transport": lambda _: sender}, open_receiver=lambda _: receiver)
    return pair, sender, receiver


def test_decode_starts_when_the_pages_are_there_not_when_they_are_committed() -> None:
    pair, sender, receiver = scripted()
    pair.submit("r", list(range(10)))
    for _ in range(3):
        pair.turn()
    sender.complete_all()
    for _ in range(3):
        pair.turn()
    assert [(seq, n) for seq, _, n in receiver.expected] == [(0, 3)]
    assert pair.d.scheduler.num_running == 0 and pair.d.scheduler.next_deadline() is not None
    receiver.complete_all()
    pair.turn()
    assert pair.d.scheduler.num_running == 1


def test_pages_still_being_received_are_not_reused_after_an_abort() -> None:
    pair, sender, receiver = scripted()
    pair.submit("r", list(range(10)))
    for _ in range(3):
        pair.turn()
    pair.abort("r")
    sender.complete_all()
    for _ in range(4):
        pair.turn()
    stats = pair.d.scheduler.stats()
    assert stats.num_locked_pages == 3 and stats.num_leased_pages == 0, "settled, and still being received"
    receiver.complete_all()
    pair.run()
    pair.check_idle()


def test_an_announced_push_runs_though_its_lease_has_died() -> None:
    pair, _, receiver = scripted()
    pair.submit("r", list(range(10)))
    pair.p.scheduler.step()
    pair.deliver()
    pair.d.scheduler.step()
    pair.deliver()  # granted
    pair.d.scheduler.receive(FromLink(pair.epoch, Pushing(7, "nobody's", 0, 2)))
    pair.abort("r")
    pair.p.outbox.link = [(e, m) for e, m in pair.p.outbox.link if isinstance(m, Pushing)]
    pair.deliver()
    assert [(seq, pages) for seq, pages, _ in receiver.expected] == [(7, None), (0, None)]


def test_a_closed_epoch_keeps_pages_until_the_receiver_has_stopped() -> None:
    pair, _, receiver = scripted()
    pair.submit("r", list(range(10)))
    for _ in range(3):
        pair.turn()
    pair.cut_link()
    pair.d.scheduler.step()
    assert [m.request_id for m in pair.d.outbox.of(LeaseLost)] == ["r"]
    assert pair.d.scheduler.stats().num_locked_pages == 3
    assert receiver.aborted
    receiver.stopped.is_done = True
    pair.d.scheduler.step()
    assert pair.d.scheduler.stats().num_locked_pages == 0


def test_a_failed_transport_ends_its_epoch() -> None:
    pair, sender, receiver = scripted()
    receiver.failure_reason = "broken"
    pair.d.scheduler.step()
    assert pair.d.outbox.closed == {pair.epoch: "broken"}
    sender.failure_reason = "broken too"
    pair.p.scheduler.step()
    assert pair.p.outbox.closed == {pair.epoch: "broken too"}


def test_the_cap_on_pages_in_flight_holds_back_pushes_and_the_commit() -> None:
    sender = ScriptedTransport()
    pair = WorkerPair(prefill={"open_transport": lambda _: sender, "max_pages_in_flight": 2})
    pair.submit("r", list(range(20)), max_tokens=3)
    for _ in range(4):
        pair.turn()
    assert [len(src) for _, src, _ in sender.pushes] == [2]
    for _ in range(4):
        sender.complete_all()
        pair.turn()
    assert [len(src) for _, src, _ in sender.pushes] == [2, 2, 1]
    told: list[bool] = []
    pair.p.scheduler.receive(LinkClosed(pair.epoch, "over", lambda: told.append(True)))
    assert told == [True]
