from tandem.both_worker.moves import StreamMoves
from tandem.both_worker.pages import SharedPages
from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.engine.base import EngineBase
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.kvtransfer.events import ReceiverLinkEvent, SenderLinkEvent
from tandem.messages import WorkerStats
from tandem.page_changes import PageChanges
from tandem.prefill_worker.forward import PromptChunks
from tandem.prefill_worker.scheduler import PrefillScheduler
from tandem.worker.adapter_uses import AdapterUses
from tandem.worker.base import Scheduler
from tandem.worker.events import Event
from tandem.worker.forward_timer import ForwardTimer
from tandem.worker.stats import worker_stats


class BothScheduler(Scheduler):
    """Schedules prefill chunks and decode steps on one engine and one cache.

    If both have work and the engine mixes, one forward pass computes both; otherwise each turn launches one of each,
    the decode step behind. Prefills overlap while nothing decodes.
    """

    def __init__(
        self,
        engine: EngineBase,
        cache: CacheManager,
        prefill: PrefillScheduler,
        decode: DecodeScheduler,
        pages: SharedPages,
        timer: ForwardTimer,
        adapters: AdapterUses,
        moves: StreamMoves | None = None,
    ) -> None:
        """
        Args:
            moves: None without links.
        """
        self._engine = engine
        self._launches = engine.launches
        self._cache = cache
        self._prefill = prefill
        self._decode = decode
        self._pages = pages
        self._timer = timer
        self._adapters = adapters
        self._moves = moves

    def receive(self, event: Event) -> None:
        # A link event goes only to this worker's end of the link.
        if not isinstance(event, ReceiverLinkEvent):
            self._prefill.receive(event)
        if not isinstance(event, SenderLinkEvent):
            self._decode.receive(event)
        if self._moves is not None:
            self._moves.receive(event)

    def step(self) -> bool:
        # Leases go before prompts: their senders hold pages already.
        self._decode.answer_leases()
        if not self._decode.num_running:
            # The last running request may have ended since the last step.
            self._timer.nothing_decoded()
        was_handing_over = self._prefill.hands_over_here()
        prefilled = self._prefill.settle()
        if self._moves is not None:
            self._moves.settle()
        if self._waits_for_prompts():
            return prefilled
        mixes = self._mixes(self._prefill.chunk_size)
        if mixes and not self._decode.is_due(with_prompts=True):
            self._decode.settle()
            self._decode.cache_adopted()
            return prefilled
        self._decode.begin_composing()
        is_handing_over = self._prefill.hands_over_here()
        # A request just handed over is decoded before the next separate prompt pass.
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
        # A grant may let a prompt start.
        granted = self._decode.leases.num_waiting < num_waiting
        return prefilled or decoded or granted

    def _waits_for_prompts(self) -> bool:
        """Returns whether decoding waits for launched prompts: separate passes, and prompts to be handed over here. The
        next step would run behind them anyway, and this way includes their requests."""
        if not self._decode.num_running:
            return False
        return self._prefill.hands_over_here() or any(not launched.num_decoded for launched in self._prefill.launched)

    def _mixes(self, num_tokens: int, num_prompts: int = 1) -> bool:
        """Returns whether these prompt tokens and the next decode step share a forward pass."""
        num_running = self._decode.num_running
        return num_running > 0 and self._engine.mixes(num_running, num_tokens, num_prompts)

    def _launch_mixed(self, chunks: PromptChunks) -> bool:
        """Launches prompts and the next decode step together. Returns False if nothing decodes."""
        self._decode.settle()
        step = self._decode.compose(with_drafts=False)
        if step is None:
            return False
        chunks.joining_ids = [job.request_id for job in step.new_jobs]
        self._decode.launch(step, chunks, self._prefill.go_on_meanwhile)
        self._decode.cache_adopted()
        return True

    def next_deadline(self) -> float | None:
        mixes = self._prefill.has_prompts and self._mixes(self._prefill.chunk_size)
        deadlines = (
            self._prefill.next_deadline(step_end=self._decode.earliest_end()),
            self._decode.next_deadline(with_prompts=mixes),
            self._moves.next_deadline() if self._moves is not None else None,
        )
        return min((d for d in deadlines if d is not None), default=None)

    def stats(self) -> WorkerStats:
        own = self._prefill.own_stats(), self._decode.own_stats(), self._adapters.stats()
        return worker_stats(self._engine, self._cache, self._timer, *own)

    def take_cache_changes(self) -> PageChanges:
        return self._cache.take_changes()

    def check_integrity(self) -> str:
        return self._cache.check_integrity()
