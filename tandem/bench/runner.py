"""Sends one process's share of the sessions and records the answers."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.bench.clients.base import Answer, BenchClient, Clock, RequestError
from tandem.bench.records import RequestRecord
from tandem.bench.workloads.base import PromptPart, Session, Turn

# Resolution of event loops' timers; the rest of a wait polls the clock.
SPIN_S = 0.0015
MEANWHILE_S = 0.005
# Prompt tokens encoded in advance, at 6 bytes each: encoding blocks the loop and distorts measurements.
LOOK_AHEAD_TOKENS = 8_000_000


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """
    Attributes:
        concurrency: sessions in flight, of those without an arrival time.
        duration_s: seconds after which no turn starts; None: no limit.
        warmup_requests, warmup_s: first requests, and first seconds, to leave out.
        ignore_eos: an output shorter than requested is an error.
    """

    concurrency: int = 1
    duration_s: float | None = None
    warmup_requests: int = 0
    warmup_s: float = 0.0
    ignore_eos: bool = True


@dataclass(slots=True)
class Progress:
    num_sent: int = 0
    num_ended: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    arrivals_over: bool = False


class Runner:
    def __init__(self, sessions: Sequence[Session], client: BenchClient, config: RunnerConfig, clock: Clock) -> None:
        """Encodes the first prompts. Args: clock: seconds from the run's start; negative before."""
        self._client = client
        self._config = config
        self._clock = clock
        self._streams = [session for session in sessions if session.group == "streams"]
        due = sorted((s for s in sessions if s.due_s is not None), key=lambda s: s.due_s or 0.0)
        self._waiting = _Ahead(
            [s for s in sessions if s.due_s is None and s.group == "requests"], LOOK_AHEAD_TOKENS, self._prepare_first
        )
        self._arriving = _Ahead(due, LOOK_AHEAD_TOKENS, self._prepare_first)
        self._stream_tasks: list[asyncio.Task[None]] = []
        self._progress = Progress()
        self._under_way: dict[int, RequestRecord] = {}
        self.records: list[RequestRecord] = []

    async def run(self) -> None:
        """Return when all requests have ended; streams run until `cut_streams`."""
        await self._until(0.0)
        async with asyncio.TaskGroup() as streams:
            self._stream_tasks = [streams.create_task(self._repeat(session)) for session in self._streams]
            async with asyncio.TaskGroup() as requests:
                for _ in range(min(self._config.concurrency, self._waiting.num_left)):
                    requests.create_task(self._one_after_the_other())
                for session, prepared in self._arriving:
                    assert session.due_s is not None
                    if self._is_over(session.due_s):
                        break
                    await self._until(session.due_s, self._arriving.fill)
                    requests.create_task(self._serve(session, prepared))
                    await asyncio.sleep(0)
            self._progress.arrivals_over = True

    def cut_streams(self) -> None:
        for task in self._stream_tasks:
            task.cancel()

    def progress(self) -> Progress:
        under_way = sum(len(record.times) for record in self._under_way.values())
        return replace(self._progress, num_tokens=self._progress.num_tokens + under_way)

    async def _until(self, moment: float, meanwhile: Callable[[], bool] = lambda: False) -> None:
        """Args: meanwhile: does a little blocking work; returns whether it did any."""
        is_more = True
        while (left := moment - self._clock()) > 0:
            if is_more and left > 3 * MEANWHILE_S:
                # Let requests just sent leave first.
                await asyncio.sleep(MEANWHILE_S)
                is_more = meanwhile()
            else:
                await asyncio.sleep(left - SPIN_S if left > SPIN_S else 0)

    async def _one_after_the_other(self) -> None:
        for session, prepared in self._waiting:
            if self._is_over(self._clock()):
                return
            await self._serve(session, prepared)

    def _is_over(self, moment: float) -> bool:
        return self._config.duration_s is not None and moment >= self._config.duration_s

    async def _repeat(self, session: Session) -> None:
        if session.begins_with is not None:
            await self._serve(replace(session, turns=(session.begins_with,)))
        while True:
            await self._serve(session)
            # The server may refuse at once.
            await asyncio.sleep(0.01)

    def _prepare_first(self, session: Session) -> Any:
        return self._client.prepare(session.turns[0].parts, session.turns[0].num_output_tokens)

    async def _serve(self, session: Session, prepared: Any = None) -> None:
        parts: list[PromptPart] = []
        due_s = session.due_s
        for number, turn in enumerate(session.turns):
            parts += turn.parts
            if number or prepared is None:
                prepared = self._client.prepare(parts, turn.num_output_tokens)
            if number and due_s is not None:
                # Encode first: this is the client's time, not the server's.
                due_s = max(due_s, self._clock())
                if self._is_over(due_s):
                    return
                await self._until(due_s)
            record = self._new_record(session, number, turn, parts, due_s)
            answer = await self._send(prepared, record)
            if answer is None or turn.stand_in is None:
                return
            parts.append(_answer_part(turn.stand_in, answer))
            due_s = record.ended_s + session.turns[number + 1].think_s

    def _new_record(
        self, session: Session, number: int, turn: Turn, parts: Sequence[PromptPart], due_s: float | None
    ) -> RequestRecord:
        now = self._clock()
        due_s = now if due_s is None else due_s
        index = session.index + number
        is_request = session.group == "requests"
        is_warmup = is_request and (index < self._config.warmup_requests or due_s < self._config.warmup_s)
        num_input_tokens = sum(part.num_tokens for part in parts)
        record = RequestRecord(index, session.group, due_s, now, num_input_tokens, turn.num_output_tokens, is_warmup)
        self.records.append(record)
        return record

    async def _send(self, prepared: Any, record: RequestRecord) -> Answer | None:
        answer = None
        self._progress.num_sent += 1
        self._under_way[id(record)] = record
        try:
            answer = await self._client.send(prepared, record, self._clock)
            record.output_digest = answer.digest
            if self._config.ignore_eos and record.num_output_tokens < record.wanted_output_tokens:
                record.error = "too_short"
                record.detail = f"{record.num_output_tokens} of {record.wanted_output_tokens} tokens"
        except RequestError as error:
            record.error, record.detail = error.kind, str(error)
        except asyncio.CancelledError:
            record.error = "cut"
            raise
        except Exception as error:
            # Any failure that a server can cause is this request's, not the run's.
            record.error, record.detail = "failed", f"the client cannot read the answer: {error!r}"
        finally:
            record.ended_s = self._clock()
            del self._under_way[id(record)]
            self._progress.num_ended += 1
            self._progress.num_failed += record.error not in ("", "cut")
            self._progress.num_tokens += record.num_output_tokens
        return answer


class _Ahead:
    def __init__(self, sessions: Sequence[Session], num_tokens: int, prepare: Callable[[Session], Any]) -> None:
        self._sessions = deque(sessions)
        self._prepare = prepare
        self._prepared: deque[tuple[Session, Any]] = deque()
        self._tokens_left = num_tokens
        while self.fill():
            pass

    @property
    def num_left(self) -> int:
        return len(self._sessions) + len(self._prepared)

    def fill(self) -> bool:
        """Encode one more prompt if there is room; return whether it did."""
        if self._tokens_left <= 0 or not self._sessions:
            return False
        session = self._sessions.popleft()
        self._tokens_left -= _num_first_tokens(session)
        self._prepared.append((session, self._prepare(session)))
        return True

    def __iter__(self) -> Iterator[tuple[Session, Any]]:
        while self._prepared or self.fill():
            session, prepared = self._prepared.popleft()
            self._tokens_left += _num_first_tokens(session)
            yield session, prepared


def _num_first_tokens(session: Session) -> int:
    return sum(part.num_tokens for part in session.turns[0].parts)


def _answer_part(stand_in: PromptPart, answer: Answer) -> PromptPart:
    if stand_in.token_ids is None:
        return PromptPart("assistant", stand_in.num_tokens, text=answer.text)
    if answer.token_ids is None:
        return stand_in
    return PromptPart("assistant", len(answer.token_ids), answer.token_ids)
