"""Records of served requests, from which HTTP clients resume: they have text but no tokens.

A record has the known output tokens and the router's resume token, but no pages or log probabilities. It outlives its
request and router, until the worker dies or the memory limit evicts it. Prefill workers keep records for the first
token, which decode workers learn late.
"""

from array import array
from collections.abc import Sequence

from tandem.messages import Admit, FirstToken, Prefill, Recall, Recalled, Tokens, WorkerMessage

# Size of a record without its tokens: ids, resume token and entries in two tables.
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
    """Records by id, the oldest evicted first. All messages pass the asyncio thread, so schedulers need not know of
    records.

    Attributes:
        num_bytes: size of all records.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._records: dict[str, _Record] = {}
        self._by_request: dict[str, _Record] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def begin(self, message: Admit | Prefill) -> None:
        """Starts a record with the output tokens of earlier attempts."""
        if not message.record_id:
            return
        old = self._records.get(message.record_id)
        if old is not None:
            if old.attempt >= message.attempt:
                # A worker of role `both` receives each attempt twice.
                return
            self._drop(old)
        record = self._records[message.record_id] = self._by_request[message.request_id] = _Record(message)
        self.num_bytes += record.num_bytes
        self._make_room()

    def note(self, messages: Sequence[WorkerMessage]) -> None:
        """Adds the messages' tokens to their records."""
        if not self._records:
            return
        find = self._by_request.get
        num_tokens = 0
        for message in messages:
            if isinstance(message, Tokens):
                # One event per request and step: avoid a call for each.
                for event in message.events:
                    if (record := find(event.request_id)) is None or record.attempt != event.attempt:
                        continue
                    known, new = record.token_ids, event.token_ids
                    if event.index != len(known):
                        # In role `both` the record already has the first token.
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
