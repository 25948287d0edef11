"""Messages between a worker and the page store of its node, as plain values.

A session is one gRPC stream. It belongs to one epoch, the life of the store; a message of another epoch has no effect.
`STORE_CLIENT_CODEC` and `STORE_SERVER_CODEC` translate the messages to protobuf and back.
"""

from dataclasses import dataclass

from tandem.messages import PageFormat
from tandem.rpc.codec import BatchCodec
from tandem.v1 import store_pb2

# In PutGranted.slots: the key is stored or being written; there is no room.
PRESENT = -1
NO_ROOM = -2
# In Found.tiers.
HOST = 0
DISK = 1
PEER = 2
TIER_NAMES = ("host", "disk", "peer")


# --- worker to store --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreHello:
    """Opens a session. The sender states that its copies of earlier sessions have ended.

    Attributes:
        attempt: counts up with each session that the worker tries to open. One that comes after a later one is void.
        region_id: of the region that the sender maps; a node whose holder was replaced has another.
        follower_pids: of the worker's other ranks, which copy too.
    """

    protocol_version: int
    worker_id: str
    incarnation: str
    pid: int
    page_format: PageFormat
    attempt: int = 0
    region_id: str = ""
    follower_pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Put:
    """Asks for slots for consecutive pages of one prefix.

    Attributes:
        number: of the request, unique in the session.
        parent: key of the page before the first; b"" at the beginning of a prompt.
        keys: of the pages (tandem.pagestore.keys), in order.
        identities: the pages' 8-byte names for routing (tandem.prefix).
    """

    number: int
    namespace: str
    parent: bytes
    keys: tuple[bytes, ...]
    identities: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Wrote:
    """The copies into these slots have ended: their pages become visible. Pages of other generations are ignored."""

    slots: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GaveUp:
    """No copy into these slots runs, and none will: they are free."""

    slots: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Find:
    """Asks for the longest stored run of pages from the first key on, pinned until EndFind."""

    number: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EndFind:
    """No copy from the find's slots runs: unpins them, and cancels what is still coming."""

    number: int


@dataclass(frozen=True, slots=True)
class Purge:
    """Removes all pages from memory, disk and peers. Pages being written never become visible.

    Attributes:
        number: for Purged; 0: no answer.
    """

    number: int = 0


StoreClientMessage = StoreHello | Put | Wrote | GaveUp | Find | EndFind | Purge


# --- store to worker --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreWelcome:
    """Accepts a session. Attributes: num_slots: slot i begins at byte i * page_bytes of the region."""

    epoch: str
    num_slots: int


@dataclass(frozen=True, slots=True)
class StoreRefused:
    reason: str


@dataclass(frozen=True, slots=True)
class PutGranted:
    """Answers Put at once.

    Attributes:
        slots: one per key: a slot to write, PRESENT or NO_ROOM.
        generations: one per key.
    """

    number: int
    slots: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Answers Find at once with the pages in memory, and again as further pages arrive.

    Attributes:
        first: index of the first page in Find.keys. Answers to one Find continue each other.
        slots, generations, tiers: one per page; tiers: where the page was found.
        num_coming: further pages being read.
        is_asking: whether other nodes are being asked for more. If not, and num_coming is 0, this is the last answer.
    """

    number: int
    first: int
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    tiers: tuple[int, ...]
    num_coming: int
    is_asking: bool = False


@dataclass(frozen=True, slots=True)
class Purged:
    """Answers Purge once the pages of that moment are gone for good, whatever process or machine ends. A purge that the
    disk cannot keep is not answered."""

    number: int


StoreServerMessage = StoreWelcome | StoreRefused | PutGranted | Found | Purged

STORE_CLIENT_CODEC = BatchCodec(StoreClientMessage, store_pb2.StoreClientBatch)
STORE_SERVER_CODEC = BatchCodec(StoreServerMessage, store_pb2.StoreServerBatch)
