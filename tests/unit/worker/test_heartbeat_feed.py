from tandem.messages import Heartbeat, Shipped, WorkerStats
from tandem.worker.heartbeat_feed import HeartbeatFeed


def heartbeat(step: int, *shipped: Shipped) -> Heartbeat:
    return Heartbeat(step, WorkerStats(num_running=step, shipped=shipped))


def test_idle_links_are_told_once() -> None:
    feed = HeartbeatFeed()
    links = [Shipped("nccl", 0, 0, f"d{number}") for number in range(60)]
    assert feed.next(heartbeat(1, *links)) == heartbeat(1, *links)
    assert feed.next(heartbeat(2, *links)) == heartbeat(2)
    links[7] = busy = Shipped("nccl", 1, 4096, "d7")
    assert feed.next(heartbeat(3, *links)) == heartbeat(3, busy)
    other = Shipped("tcp", 0, 0, "d7")
    assert feed.next(heartbeat(4, *links, other)) == heartbeat(4, other)
    # Another router's feed begins with all links.
    assert HeartbeatFeed().next(heartbeat(5, *links)) == heartbeat(5, *links)
