from tandem.both_worker.handover import LocalHandover
from tandem.both_worker.moves import StreamMoves
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import Prefill, Shipped
from tandem.prefill_worker.base import Handover, HandoverResult
from tandem.prefill_worker.handover import LinkHandover
from tandem.prefill_worker.job import PrefillJob
from tandem.worker.events import Event


class ChoosingHandover(Handover):
    """Hands each job to this worker's decode scheduler or to another worker, as its request says."""

    def __init__(
        self, worker_id: str, cache: CacheManager, here: LocalHandover, elsewhere: LinkHandover, moves: StreamMoves
    ) -> None:
        """
        Args:
            moves: takes the results of its copies, which are handovers too.
        """
        self._worker_id = worker_id
        self._cache = cache
        self._here = here
        self._elsewhere = elsewhere
        self._moves = moves

    def continues_here(self, request: Prefill) -> bool:
        return self._of(request).continues_here(request)

    @property
    def shipped(self) -> tuple[Shipped, ...]:
        return self._elsewhere.shipped

    @property
    def is_copying(self) -> bool:
        return self._elsewhere.is_copying

    def refusal(self, request: Prefill) -> str:
        num_tokens = len(request.prompt_ids) + request.sampling.max_tokens
        if self._cache.num_pages_for(num_tokens) > self._cache.max_request_pages:
            # Routers refuse such requests; without this check it would wait forever.
            most = self._cache.max_request_pages * self._cache.page_size
            return f"the request needs {num_tokens} tokens, but this worker's largest request has {most}"
        return self._of(request).refusal(request)

    def begin(self, job: PrefillJob) -> None:
        self._of(job.request).begin(job)

    def advance(self, job: PrefillJob) -> None:
        self._of(job.request).advance(job)

    def cancel(self, job: PrefillJob, *, reported: bool) -> None:
        self._of(job.request).cancel(job, reported=reported)

    def receive(self, event: Event) -> None:
        self._elsewhere.receive(event)

    def go_on(self) -> None:
        self._here.go_on()
        self._elsewhere.go_on()

    def take_results(self) -> list[HandoverResult]:
        elsewhere = [result for result in self._elsewhere.take_results() if not self._moves.takes(result)]
        return [*self._here.take_results(), *elsewhere]

    def _of(self, request: Prefill) -> Handover:
        return self._here if request.decode_worker_id == self._worker_id else self._elsewhere
