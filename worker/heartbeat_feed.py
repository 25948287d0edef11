"""The heartbeats to one router."""

from dataclasses import replace

from tandem.messages import Heartbeat, Shipped


class HeartbeatFeed:
    """Leaves out the links whose counters have not changed since the last heartbeat: a worker of a large cluster has
    dozens, and most are idle."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], Shipped] = {}

    def next(self, heartbeat: Heartbeat) -> Heartbeat:
        told = self._told
        changed = tuple(s for s in heartbeat.stats.shipped if told.get((s.receiver_id, s.transport)) != s)
        told.update(((s.receiver_id, s.transport), s) for s in changed)
        return replace(heartbeat, stats=replace(heartbeat.stats, shipped=changed))
