from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.lifecycle import LEASE_GRANTED, now_ns
from tandem.messages import Moment, Prefill, Shipped
from tandem.prefill_worker.base import Handover, HandoverResult
from tandem.prefill_worker.job import PrefillJob
from tandem.worker.events import Event


class LocalHandover(Handover):
    """Passes locked pages to the decode scheduler of the same engine and pool, without copies."""

    def __init__(self, decode: DecodeScheduler) -> None:
        self._decode = decode
        self._results: list[HandoverResult] = []

    def continues_here(self, request: Prefill) -> bool:
        return True

    @property
    def shipped(self) -> tuple[Shipped, ...]:
        return ()

    @property
    def is_copying(self) -> bool:
        return False

    def refusal(self, request: Prefill) -> str:
        return ""

    def begin(self, job: PrefillJob) -> None:
        """The pages are here."""

    def advance(self, job: PrefillJob) -> None:
        if job.first_token is None:
            return
        admit = self._decode.take_admitted(*job.key)
        if admit is None:
            self._results.append(HandoverResult(job, "the request is not admitted here"))
            return
        assert job.handle is not None
        handle, job.handle = job.handle, None
        self._decode.adopt(
            admit,
            handle,
            first_token=job.first_token,
            logprobs=job.logprobs,
            finish_reason=job.finish_reason,
            num_pages_shipped=0,
            prefill_cached_len=handle.cached_len,
            prefill_loaded=job.loaded,
            moments=(Moment(LEASE_GRANTED, now_ns()),),
        )
        self._results.append(HandoverResult(job))

    def cancel(self, job: PrefillJob, *, reported: bool) -> None:
        """No lease was requested."""

    def receive(self, event: Event) -> None:
        """There are no link events."""

    def go_on(self) -> None:
        """`advance` completes the handover."""

    def take_results(self) -> list[HandoverResult]:
        results, self._results = self._results, []
        return results
