"""Role `both`: prefill and decode in one worker, over one engine and one pool."""

from tandem.both_worker.pages import SharedPages
from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.engine.base import EngineBase
from tandem.engine.kvcache.cache_changes import CacheChanges
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.kvtransfer.events import ReceiverLinkEvent, SenderLinkEvent
from tandem.messages import WorkerStats
from tandem.prefill_worker.forward import PromptChunks
from tandem.prefill_worker.scheduler import PrefillScheduler
from tandem.worker.base import Scheduler
from tandem.worker.events import Event
from tandem.worker.forward_timer import ForwardTimer
from tandem.worker.stats import worker_stats


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
        was_handing_over = self._prefill.hands_over_here()
        prefilled = self._prefill.settle()
        if self._waits_for_prompts():
            return prefilled
        mixes = self._mixes(self._prefill.chunk_size)
        if mixes and not self._decode.is_due(with_prompts=True):
            self._decode.settle()
            self._decode.cache_adopted()
            return prefilled
        self._decode.begin_composing()
        is_handing_over = self._prefill.hands_over_here()
        # What has just been handed over here is decoded before the next prompt is launched, if that is by itself, and
        # does not wait behind it.
        goes_first = was_handing_over and self._decode.num_running > 0 and not mixes
        chunks = None if is_handing_over or goes_first else self._prefill.compose()
        self._pages.tell_leases()
        if chunks is not None:
            if self._mixes(sum(chunks.num_tokens), len(chunks.num_tokens)) and self._launch_mixed(chunks):
                return True
            self._prefill.launch(chunks)
            if self._waits_for_prompts():
                return True
            prefilled = True
        num_waiting = self._decode.leases.num_waiting
        decoded = self._decode.step()
        # A prompt may have waited for a lease that has been granted meanwhile.
        granted = self._decode.leases.num_waiting < num_waiting
        return prefilled or decoded or granted

    def _waits_for_prompts(self) -> bool:
        """Whether what is decoded here goes on when prompts have ended that have been launched. The next step would run
        behind them anyway, and what they give goes on with it, not with the one after: those that are computed by
        themselves, and those that are handed over here. Nothing else waits for them."""
        if not self._decode.num_running:
            return False
        return self._prefill.hands_over_here() or any(not launched.num_decoded for launched in self._prefill.launched)

    def _mixes(self, num_tokens: int, num_prompts: int = 1) -> bool:
        """Whether so many tokens of so many prompts and the next decode step are to be one forward."""
        num_running = self._decode.num_running
        return num_running > 0 and self._engine.mixes(num_running, num_tokens, num_prompts)

    def _launch_mixed(self, chunks: PromptChunks) -> bool:
        """Launches prompts and the next decode step as one forward. Returns False if nothing is to be decoded."""
        self._decode.settle()
        step = self._decode.compose()
        if step is None:
            return False
        chunks.joining_ids = [job.request_id for job in step.new_jobs]
        self._decode.launch(step, chunks, self._prefill.go_on_meanwhile)
        self._decode.cache_adopted()
        return True

    def next_deadline(self) -> float | None:
        mixes = self._prefill.has_prompts and self._mixes(self._prefill.chunk_size)
        deadlines = (self._prefill.next_deadline(), self._decode.next_deadline(with_prompts=mixes))
        return min((d for d in deadlines if d is not None), default=None)

    def stats(self) -> WorkerStats:
        own = self._prefill.own_stats(), self._decode.own_stats()
        return worker_stats(self._engine, self._cache, self._timer, *own)

    def take_cache_changes(self) -> CacheChanges | None:
        return self._cache.take_changes()

    def check_integrity(self) -> str:
        return self._cache.check_integrity()
