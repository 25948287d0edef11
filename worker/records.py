"""What a worker remembers of the requests that it has served, for clients that can go on only with what the cluster
remembers: those over HTTP have text and no tokens.

A record is the tokens of a request's whole output, as far as this worker has heard or computed them, and what the
router gave with it; no pages, no log probabilities. It outlives its request, the request's router and any failure but
the worker's own, until there is no more room for it. A prefill worker keeps one too: it is the only one that has the
first token until the pages have arrived.
"""

from array import array
from collections.abc import Sequence

from tandem.messages import Admit, FirstToken, Prefill, Recall, Recalled, Tokens, WorkerMessage

# What a record takes beside its tokens: names, the router's part, and its places in two tables.
RECORD_BYTES = 1024
TOKEN_BYTES = 4


class _Record:
    __slots__ = ("attempt", "record_id", "request_id", "resume_token", "token_ids")

    def __init__(self, message: Admit | Prefill) -> None:
        self.record_id = message.record_id
        self.request_id = message.request_id
        self.attempt = message.attempt
        self.resume_token = message.resume_token
        self.token_ids = array("I", message.output_ids)

    @property
    def num_bytes(self) -> int:
        return RECORD_BYTES + TOKEN_BYTES * len(self.token_ids)


class RecordKeeper:
    """Records by their names, the oldest first to go. Belongs to the asyncio thread, past which everything goes that a
    worker of any role is told and says: the schedulers know nothing of this, and one that stands still hides nothing.

    Attributes:
        num_bytes: what the records take.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._records: dict[str, _Record] = {}
        self._by_request: dict[str, _Record] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def begin(self, message: Admit | Prefill) -> None:
        """An attempt begins here, with all that was passed on of earlier ones."""
        if not message.record_id:
            return
        old = self._records.get(message.record_id)
        if old is not None:
            if old.attempt >= message.attempt:
                # Role `both` is told of each attempt twice.
                return
            self._drop(old)
        record = self._records[message.record_id] = self._by_request[message.request_id] = _Record(message)
        self.num_bytes += record.num_bytes
        self._make_room()

    def note(self, messages: Sequence[WorkerMessage]) -> None:
        """The worker says this, whether its router still hears it or not."""
        if not self._records:
            return
        find = self._by_request.get
        num_tokens = 0
        for message in messages:
            if isinstance(message, Tokens):
                # There is an event for every request of a decode step: no call is made for each.
                for event in message.events:
                    if (record := find(event.request_id)) is None or record.attempt != event.attempt:
                        continue
                    known, new = record.token_ids, event.token_ids
                    if event.index != len(known):
                        # In role `both` the first token stands here already.
                        new = new[len(known) - event.index :] if event.index < len(known) else ()
                    known.extend(new)
                    num_tokens += len(new)
            elif isinstance(message, FirstToken):
                record = find(message.request_id)
                if record is not None and (record.attempt, len(record.token_ids)) == (message.attempt, message.index):
                    record.token_ids.append(message.token_id)
                    num_tokens += 1
        if num_tokens:
            self.num_bytes += TOKEN_BYTES * num_tokens
            self._make_room()

    def recall(self, message: Recall) -> Recalled:
        """The answer to a router that asks."""
        record = self._records.get(message.record_id)
        if record is None:
            return Recalled(message.recall_id)
        return Recalled(message.recall_id, record.attempt, tuple(record.token_ids), record.resume_token)

    def _make_room(self) -> None:
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._records.values())))

    def _drop(self, record: _Record) -> None:
        del self._records[record.record_id]
        del self._by_request[record.request_id]
        self.num_bytes -= record.num_bytes
