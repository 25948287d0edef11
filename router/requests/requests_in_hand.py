"""The requests in hand, by deadline. The checks four times a second visit only requests that may be overdue."""

from collections.abc import Iterator

from tandem.router.requests.active_request import ActiveRequest


class RequestsInHand:
    def __init__(self) -> None:
        self._all: dict[str, ActiveRequest] = {}
        # In order of arrival, which is the order of deadlines: all have the same timeout.
        self._unfinished: dict[str, ActiveRequest] = {}
        # Ended, but not read to the end by the client.
        self._undelivered: dict[str, ActiveRequest] = {}
        self._awaiting_decode: dict[str, ActiveRequest] = {}
        # Without a first token, in order of arrival.
        self._queued: dict[str, ActiveRequest] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(list(self._all.values()))

    @property
    def oldest(self) -> ActiveRequest | None:
        return next(iter(self._all.values()), None)

    @property
    def num_queued(self) -> int:
        """Requests that wait for their first token here, resumed ones included."""
        return len(self._queued)

    @property
    def oldest_queued(self) -> ActiveRequest | None:
        return next(iter(self._queued.values()), None)

    def get(self, request_id: str) -> ActiveRequest | None:
        return self._all.get(request_id)

    def add(self, request: ActiveRequest) -> None:
        request_id = request.tracker.request_id
        self._all[request_id] = self._unfinished[request_id] = self._queued[request_id] = request

    def remove(self, request: ActiveRequest) -> None:
        for requests in (self._all, self._unfinished, self._undelivered, self._awaiting_decode, self._queued):
            requests.pop(request.tracker.request_id, None)

    def mark_token(self, request: ActiveRequest) -> None:
        self._queued.pop(request.tracker.request_id, None)

    def mark_ended(self, request: ActiveRequest) -> None:
        request_id = request.tracker.request_id
        self._queued.pop(request_id, None)
        if self._unfinished.pop(request_id, None) is not None:
            self._undelivered[request_id] = request

    def await_decode(self, request: ActiveRequest) -> None:
        self._awaiting_decode[request.tracker.request_id] = request

    def past_deadline(self, now: float) -> list[ActiveRequest]:
        overdue = []
        for request in self._unfinished.values():
            if now < request.deadline:
                break
            overdue.append(request)
        return overdue

    def undelivered(self) -> list[ActiveRequest]:
        return list(self._undelivered.values())

    def without_word(self, now: float) -> list[ActiveRequest]:
        """Returns requests past their decode_deadline."""
        silent = []
        for request_id, request in list(self._awaiting_decode.items()):
            if request.decode_deadline is None:
                del self._awaiting_decode[request_id]
            elif now >= request.decode_deadline:
                silent.append(request)
        return silent
