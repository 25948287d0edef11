"""Role `both`: prefill and decode in one worker, over one engine and one pool."""

from both_worker.pages import SharedPages
from decode_worker.scheduler import DecodeScheduler
from engine.base import EngineBase
from engine.kvcache.cache_changes import CacheChanges
from engine.kvcache.cache_manager import CacheManager
from kvtransfer.events import ReceiverLinkEvent, SenderLinkEvent
from prefill_worker.scheduler import PrefillScheduler
from tandem.messages import WorkerStats
from worker.base import Scheduler
from worker.events import Event
from worker.forward_timer import ForwardTimer
from worker.stats import worker_stats


class BothScheduler(Scheduler):
    """Alternates a prefill and a decode scheduler that share one cache: one forward of each a turn. Prefills overlap
    while nothing is decoded; beside decode steps each is as large as the budget has it."""

    def __init__(
        self,
        engine: EngineBase,
        cache: CacheManager,
        prefill: PrefillScheduler,
        decode: DecodeScheduler,
        pages: SharedPages,
        timer: ForwardTimer,
    ) -> None:
        """
        Args:
            engine, cache, timer: those of both schedulers.
            pages: of the prefill scheduler.
        """
        self._engine = engine
        self._launches = engine.launches
        self._cache = cache
        self._prefill = prefill
        self._decode = decode
        self._pages = pages
        self._timer = timer

    def receive(self, event: Event) -> None:
        # What befalls a link is for the end that this worker has of it, and for that one alone.
        if not isinstance(event, ReceiverLinkEvent):
            self._prefill.receive(event)
        if not isinstance(event, SenderLinkEvent):
            self._decode.receive(event)

    def step(self) -> bool:
        # Lease requests go before prompts: their senders hold pages already.
        self._decode.answer_leases()
        if not self._decode.num_running:
            # The last of them may have ended since the last step.
            self._timer.nothing_decoded()
        num_running = self._decode.num_running
        prefilled = self._prefill.settle()
        # What has just been handed over here is decoded before the next prompt is launched, and does not wait behind
        # it. Nor does what is about to be.
        if self._decode.num_running == num_running and not self._prefill.hands_over_here():
            chunks = self._prefill.compose()
            if chunks is not None:
                self._prefill.launch(chunks)
                prefilled = True
        self._pages.tell_leases()
        if self._decode.num_running:
            # The next decode step would run behind the prompts in flight anyway: what they give goes on with this step,
            # not with the one after. The decode step in flight ends before them: its tokens have waited for their
            # launch, and do not wait for their end.
            while self._prefill.launched:
                self._launches.collect_oldest()
        num_waiting = self._decode.leases.num_waiting
        decoded = self._decode.step()
        # A prompt may have waited for a lease that has been granted meanwhile.
        granted = self._decode.leases.num_waiting < num_waiting
        return prefilled or decoded or granted

    def next_deadline(self) -> float | None:
        deadlines = (self._prefill.next_deadline(), self._decode.next_deadline())
        return min((d for d in deadlines if d is not None), default=None)

    def stats(self) -> WorkerStats:
        own = self._prefill.own_stats(), self._decode.own_stats()
        return worker_stats(self._engine, self._cache, self._timer, *own)

    def take_cache_changes(self) -> CacheChanges | None:
        return self._cache.take_changes()

    def check_integrity(self) -> str:
        return self._cache.check_integrity()
