"""Moves of running streams to other workers, at the worker that they leave (docs/requests.md, "Moves")."""

from collections.abc import Callable
from dataclasses import dataclass

from tandem.decode_worker.job import DecodeJob
from tandem.decode_worker.leases import MOVE_ROOM_PAGES
from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.engine.kvcache.page_ceiling import PageCeiling
from tandem.engine.token_sequence import TokenSequence
from tandem.lifecycle import now_ns
from tandem.messages import Abort, Move, NotMoved, Prefill
from tandem.prefill_worker.base import HandoverResult
from tandem.prefill_worker.handover import LinkHandover
from tandem.prefill_worker.job import PrefillJob
from tandem.recording import HANDOVERS, Recorder
from tandem.request_ids import router_of
from tandem.worker.base import Outbox
from tandem.worker.events import Event, FromRouter, RouterLost
from tandem.worker.kept_pages import KeptPages

# Limit of a copy, in seconds. The stream goes on meanwhile.
MAX_COPY_S = 5.0
# Poll interval for forward passes that write the pages, in seconds.
POLL_S = 0.0005
# Refusals of a lease that the router distinguishes.
LEASE_REFUSALS = ("busy", "grammar", "adapter")


@dataclass(eq=False, slots=True)
class _Going:
    """A stream whose pages go ahead.

    Attributes:
        copy: the handover of the pages, without a forward pass.
        writers: forward passes that may still write these pages.
        is_copied: the other worker has them.
    """

    stream: DecodeJob
    copy: PrefillJob
    handle: PageHandle
    writers: list[Completion]
    deadline: float
    is_copied: bool = False


class StreamMoves:
    """Ships the pages of running streams, and gives each stream back once the other worker has them.

    The pages are a handover of their own, under an id of their own, whose lease is granted at once or refused. Until
    the give-back the stream runs here, so it has one owner. Its pages stay locked here for its next attempt.
    """

    def __init__(
        self,
        cache: CacheManager,
        handover: LinkHandover,
        decode: DecodeScheduler,
        outbox: Outbox,
        clock: Callable[[], float],
        ceiling: PageCeiling,
        kept: KeptPages,
        recorder: Recorder | None = None,
    ) -> None:
        """
        Args:
            ceiling: limits the pages bound for other workers.
            kept: pages of streams that were given back.
        """
        self._cache = cache
        self._handover = handover
        self._decode = decode
        self._outbox = outbox
        self._clock = clock
        self._ceiling = ceiling
        self._kept = kept
        self._recorder = recorder or Recorder()
        self._going: dict[tuple[str, int], _Going] = {}

    @property
    def keys(self) -> list[tuple[str, int]]:
        """Requests and attempts whose pages go ahead."""
        return list(self._going)

    def receive(self, event: Event) -> None:
        """Takes router events, after the decode scheduler."""
        if isinstance(event, RouterLost):
            for key in self.keys:
                if router_of(key[0]) == event.router:
                    self._cancel(key)
            self._kept.let_go_all_of(event.router)
        elif isinstance(event, FromRouter) and isinstance(event.message, Abort):
            self._cancel((event.message.request_id, event.message.attempt))
        elif isinstance(event, FromRouter) and isinstance(event.message, Move):
            move = event.message
            if refusal := self._begin(move):
                self._outbox.to_router(NotMoved(move.request_id, move.attempt, refusal))

    def takes(self, result: HandoverResult) -> bool:
        """Takes the result of a copy. Returns whether it is one."""
        found = next((item for item in self._going.items() if item[1].copy is result.job), None)
        if found is None:
            return False
        key, going = found
        if result.failure:
            self._refuse(key, result.refusal if result.refusal in LEASE_REFUSALS else "lost")
        else:
            going.is_copied = True
        return True

    def settle(self) -> None:
        """Goes on with copies, and gives back streams that are copied."""
        self._kept.let_go_overdue()
        for key, going in list(self._going.items()):
            if going.stream.has_ended:
                self._cancel(key)
            elif going.is_copied:
                self._leave(key, going)
            elif self._clock() >= going.deadline:
                self._refuse(key, "late")
            elif going.copy.first_token is None and all(writer.done() for writer in going.writers):
                going.copy.sequence.cached_len = len(going.copy.sequence.token_ids)
                # The other worker ignores it.
                going.copy.first_token = 0
                self._handover.advance(going.copy)

    def next_deadline(self) -> float | None:
        now = self._clock()
        deadlines = [
            now + POLL_S if going.copy.first_token is None or going.is_copied else going.deadline
            for going in self._going.values()
        ]
        if (kept := self._kept.next_deadline()) is not None:
            deadlines.append(kept)
        return min(deadlines, default=None)

    def _begin(self, move: Move) -> str:
        """Returns the reason why the stream does not move, or ""."""
        key = move.request_id, move.attempt
        stream = self._decode.find_running(*key)
        if stream is None or key in self._going:
            return "ended"
        if self._decode.is_oldest(stream):
            return "oldest"
        sequence = stream.sequence
        if move.num_tokens > min(sequence.cached_len, len(sequence.token_ids) - 1):
            return "ended"
        token_ids = sequence.token_ids[: move.num_tokens]
        prefill = Prefill(move.copy_id, 0, tuple(token_ids), (), sequence.sampling, move.decode_worker_id)
        if self._handover.refusal(prefill):
            return "no_link"
        writers = self._decode.share_computed(stream)
        handle = self._cache.acquire_pages(
            token_ids,
            move.num_tokens,
            max_cached_len=move.num_tokens,
            namespace=move.cache_namespace,
            priority=stream.priority,
            ceiling=self._ceiling,
        )
        if handle is None:
            return "no_room"
        if handle.cached_len != move.num_tokens:
            self._cache.release_pages(handle)
            return "no_room"
        copied = TokenSequence(token_ids, move.num_tokens, handle.page_ids, table_id=handle.table_id)
        copy = PrefillJob(prefill, copied, handle, now_ns())
        self._going[key] = _Going(stream, copy, handle, writers, self._clock() + MAX_COPY_S)
        stream.is_moving = True
        self._handover.begin(copy)
        return ""

    def _leave(self, key: tuple[str, int], going: _Going) -> None:
        """Gives a stream back, once its last token is known."""
        stream = going.stream
        sequence = stream.sequence
        num_tokens = len(sequence.token_ids) + sequence.num_pending + 1
        num_leased = len(going.handle.page_ids) + MOVE_ROOM_PAGES
        if self._decode.is_oldest(stream):
            self._refuse(key, "oldest")
        elif self._cache.num_pages_for(num_tokens) > num_leased:
            self._refuse(key, "outgrown")
        elif sequence.num_pending:
            stream.is_leaving = True
        else:
            del self._going[key]
            self._kept.keep(stream.request_id, going.handle)
            self._decode.give_back_moved(stream)
            self._recorder.add(HANDOVERS, "move", going.copy.started_ns, (stream.request_id,))

    def _refuse(self, key: tuple[str, int], reason: str) -> None:
        self._outbox.to_router(NotMoved(*key, reason))
        self._cancel(key)

    def _cancel(self, key: tuple[str, int]) -> None:
        """Every copy without a give-back ends here."""
        going = self._going.pop(key, None)
        if going is not None:
            going.stream.is_moving = going.stream.is_leaving = False
            self._handover.cancel(going.copy, reported=True)
            self._cache.release_pages(going.handle, after=going.copy.copies)
