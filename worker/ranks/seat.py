"""A follower's order, and its connections to the leader."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.engine.ranks.config import RankConfig
from tandem.engine.ranks.group import RankGroup
from tandem.worker.config import WorkerConfig
from tandem.worker.ranks.channel import MessageChannel
from tandem.worker.ranks.memory import RankMemory

if TYPE_CHECKING:
    from tandem.worker.base import StoreConnection, WorkerRole


@dataclass(frozen=True, slots=True)
class FollowerOrder:
    """Sent by the leader over their socket.

    Attributes:
        worker: the leader's, without the clients' keys.
        incarnation: of the leader.
        run: main function of the follower; at the top level of a module, because it is pickled.
        store: of the worker's node, before its start; None without a page store.
    """

    ranks: RankConfig
    worker: WorkerConfig
    role: "WorkerRole"
    incarnation: str
    run: "Callable[[Seat], None]"
    store: "StoreConnection | None" = None


@dataclass(frozen=True, slots=True)
class Seat:
    """A follower's connections to its leader.

    Attributes:
        lanes: messages of the leader's links, both ways.
        copies: messages of copies between pool and page store, both ways.
    """

    order: FollowerOrder
    group: RankGroup
    memory: RankMemory
    lanes: MessageChannel
    copies: MessageChannel
