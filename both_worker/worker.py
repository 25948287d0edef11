"""The both role: prefill and decode over one engine and one pool, with or without links."""

import time
from collections.abc import Callable, Sequence

from tandem.both_worker.choosing_handover import ChoosingHandover
from tandem.both_worker.handover import LocalHandover
from tandem.both_worker.links import NoLinks, TwoWayLinks
from tandem.both_worker.moves import StreamMoves
from tandem.both_worker.pages import SharedPages
from tandem.both_worker.scheduler import BothScheduler
from tandem.both_worker.step_budget import StepBudget
from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.engine.base import EngineBase
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.kvtransfer.config import LinkConfig
from tandem.kvtransfer.lanes.follower import LaneFollower
from tandem.kvtransfer.lanes.ranks import LinkRanks
from tandem.kvtransfer.lanes.remote import RemoteRank
from tandem.kvtransfer.link_dialer import LinkDialer
from tandem.kvtransfer.link_server import LinkServer
from tandem.kvtransfer.sender_link import MAX_PAGES_IN_FLIGHT
from tandem.kvtransfer.transports.opening import load_transports
from tandem.messages import Hello
from tandem.prefill_worker.base import Handover
from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.handover import LinkHandover
from tandem.prefill_worker.scheduler import PrefillScheduler
from tandem.recording import Recorder
from tandem.rpc.credentials import ClusterCredentials
from tandem.worker.adapter_uses import AdapterUses
from tandem.worker.base import FollowerLinks, LaneDriver, LinkConnections, Outbox, WorkerRole
from tandem.worker.config import WorkerConfig
from tandem.worker.events import Event
from tandem.worker.forward_timer import ForwardTimer
from tandem.worker.kept_pages import KeptPages
from tandem.worker.page_tier import PageTier


def make_both_scheduler(
    worker_id: str,
    engine: EngineBase,
    cache: CacheManager,
    outbox: Outbox,
    prefill: PrefillConfig,
    decode: DecodeConfig,
    *,
    itl_objective_s: float = 0.0,
    has_links: bool = False,
    recorder: Recorder | None = None,
    clock: Callable[[], float] = time.monotonic,
    max_pages_in_flight: int = MAX_PAGES_IN_FLIGHT,
    tier: PageTier | None = None,
) -> BothScheduler:
    """Builds the scheduler of role `both`.

    Args:
        cache: with links, its largest request leaves room for prompts decoded elsewhere.
        itl_objective_s: target time between a request's tokens, which sizes prompt chunks beside decode steps; 0 for
            whole chunks.
        max_pages_in_flight: limit of each link.
        tier: the tier below the pool; None if there is none.
    """
    timer = ForwardTimer(engine.pool.device.type, clock, engine.experts)
    adapters = AdapterUses(engine.adapters, clock)
    decode_scheduler = DecodeScheduler(
        engine,
        cache,
        outbox,
        decode,
        clock,
        recorder,
        timer,
        tier=tier,
        prefill_worker_id=worker_id,
        adapters=adapters,
    )
    handover: Handover = LocalHandover(decode_scheduler)
    kept = KeptPages(cache, clock)
    pages = SharedPages(cache, decode_scheduler, worker_id, kept)
    moves = None
    if has_links:
        elsewhere = LinkHandover(
            engine.pool.layout.whole, engine.launches, outbox, clock, max_pages_in_flight, recorder
        )
        moves = StreamMoves(cache, elsewhere, decode_scheduler, outbox, clock, pages.bound_elsewhere, kept, recorder)
        handover = ChoosingHandover(worker_id, cache, LocalHandover(decode_scheduler), elsewhere, moves)
    budget = StepBudget(itl_objective_s, prefill.chunk_size, timer, engine)
    prefill_scheduler = PrefillScheduler(
        engine, cache, handover, outbox, prefill, clock, recorder, pages, budget, timer, tier, adapters
    )
    return BothScheduler(engine, cache, prefill_scheduler, decode_scheduler, pages, timer, adapters, moves)


class BothRole(WorkerRole):
    def __init__(
        self,
        prefill: PrefillConfig,
        decode: DecodeConfig,
        links: LinkConfig | None = None,
        *,
        itl_objective_s: float = 0.0,
    ) -> None:
        """
        Args:
            links: links to and from other workers; None to serve alone.
        """
        self._prefill = prefill
        self._decode = decode
        self._itl_objective_s = itl_objective_s
        self._links = links

    @property
    def has_links(self) -> bool:
        return self._links is not None

    @property
    def max_batch_size(self) -> int:
        return self._decode.max_batch_size

    def max_request_pages(self, num_pages: int, page_size: int, max_model_len: int) -> int:
        if self._links is None:
            return num_pages
        # Must fit the pages kept from prompts bound elsewhere, and the pages left to them.
        return min(-(-max_model_len // page_size), num_pages // 2)

    def build_scheduler(
        self,
        engine: EngineBase,
        cache: CacheManager,
        outbox: Outbox,
        config: WorkerConfig,
        recorder: Recorder,
        tier: PageTier | None = None,
    ) -> BothScheduler:
        return make_both_scheduler(
            config.worker_id,
            engine,
            cache,
            outbox,
            self._prefill,
            self._decode,
            itl_objective_s=self._itl_objective_s,
            has_links=self.has_links,
            recorder=recorder,
            tier=tier,
        )

    def build_links(
        self,
        engine: EngineBase,
        hello: Hello,
        config: WorkerConfig,
        credentials: ClusterCredentials,
        post: Callable[[Event], None],
        followers: Sequence[FollowerLinks] = (),
    ) -> LinkConnections:
        if self._links is None:
            return NoLinks()
        transports = load_transports(self._links.transports, engine.pool, config.host, credentials)
        ranks = LinkRanks.of(engine.pool, transports, [RemoteRank(*one) for one in followers])
        out = LinkDialer(hello.worker_id, hello.incarnation, hello.page_format, ranks, post, credentials)
        into = LinkServer(hello.incarnation, hello.page_format, ranks, post)
        return TwoWayLinks(hello.worker_id, out, into)

    def build_lanes(
        self, engine: EngineBase, config: WorkerConfig, credentials: ClusterCredentials
    ) -> LaneDriver | None:
        if self._links is None:
            return None
        return LaneFollower(load_transports(self._links.transports, engine.pool, config.host, credentials))
