"""Role `both`: prefill and decode in one worker, over one engine and one pool."""

from both_worker.pages import SharedPages
from decode_worker.scheduler import DecodeScheduler
from engine.base import EngineBase
from engine.kvcache.cache_changes import CacheChanges
from engine.kvcache.cache_manager import CacheManager
from kvtransfer.events import ReceiverLinkEvent, SenderLinkEvent
from prefill_worker.forward import PromptChunks
from prefill_worker.scheduler import PrefillScheduler
from tandem.messages import WorkerStats
from worker.base import Scheduler
from worker.events import Event
from worker.forward_timer import ForwardTimer
from worker.stats import worker_stats


class BothScheduler(Scheduler):
    """Composes forwards of what a prefill and a decode scheduler have for one engine, over one cache. Where both have
    something and the engine mixes, one forward computes both; else there is one of each a turn, the next decode step
    behind the prompts. Prefills overlap while nothing is decoded; beside decode steps each is as large as the budget
    has it."""

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
        if self._decode.num_running and self._prefill.hands_over_here():
            # What is handed over here is in the next step, not in the one after, which runs behind it anyway.
            if not self._prefill.launched[-1].output.done():
                return prefilled
            while self._prefill.hands_over_here():
                self._launches.collect_oldest()
            prefilled = True
        chunks = self._compose_prompts(joined=self._decode.num_running > num_running)
        self._pages.tell_leases()
        if chunks is not None:
            if self._mixes(sum(chunks.num_tokens), len(chunks.num_tokens)) and self._launch_mixed(chunks):
                return True
            self._prefill.launch(chunks)
            prefilled = True
        if self._decode.num_running:
            # The next decode step would run behind the prompts in flight anyway: what they give goes on with this step,
            # not with the one after. The decode step in flight ends before them: its tokens have waited for their
            # launch, and do not wait for their end.
            while any(not launched.num_decoded for launched in self._prefill.launched):
                self._launches.collect_oldest()
        num_waiting = self._decode.leases.num_waiting
        decoded = self._decode.step()
        # A prompt may have waited for a lease that has been granted meanwhile.
        granted = self._decode.leases.num_waiting < num_waiting
        return prefilled or decoded or granted

    def _compose_prompts(self, *, joined: bool) -> PromptChunks | None:
        """Args: joined: whether a request has been handed over here in this turn."""
        if self._prefill.hands_over_here():
            return None
        if joined and not self._mixes(self._prefill.chunk_size):
            # It is decoded before the next prompt is launched, and does not wait behind it.
            return None
        return self._prefill.compose()

    def _mixes(self, num_tokens: int, num_prompts: int = 1) -> bool:
        """Whether so many tokens of so many prompts and the next decode step are to be one forward."""
        num_running = self._decode.num_running
        return num_running > 0 and self._engine.mixes(num_running, num_tokens, num_prompts)

    def _launch_mixed(self, chunks: PromptChunks) -> bool:
        """Launches prompts and the next decode step as one forward. That step waits for nothing then, for the launch of
        such a forward may take longer than its own. Returns False if nothing is to be decoded."""
        self._decode.settle()
        step = self._decode.compose()
        if step is None:
            return False
        chunks.joining_ids = [job.request_id for job in step.new_jobs]
        self._decode.launch(step, chunks, self._prefill.go_on_meanwhile)
        self._decode.cache_adopted()
        return True

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
