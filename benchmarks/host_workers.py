"""A prefill and a decode worker in one process: engines that compute nothing, a transport that moves nothing."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import cast

from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.base import EngineBase, ForwardOutput
from tandem.engine.batch import Batch
from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.kvcache.pool import CpuKvPool, KvPool
from tandem.engine.token_sequence import TokenSequence
from tandem.kvtransfer.events import FromReceiver, FromSender, ReceiverLinkOpened, SenderLinkOpened
from tandem.kvtransfer.transports.base import COMPLETED, ReceiverTransport, SenderTransport
from tandem.messages import (
    PROTOCOL_VERSION,
    Admit,
    LinkHello,
    PageFormat,
    Prefill,
    ReceiverMessage,
    SenderMessage,
    Tokens,
)
from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.handover import LinkHandover
from tandem.prefill_worker.scheduler import PrefillScheduler
from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import SamplingParams, TokenLogprobs
from tandem.worker.base import Scheduler
from tandem.worker.engine_thread import Outgoing, StepOutbox
from tandem.worker.events import FromRouter

EPOCH = "epoch"
MAX_STEPS = 100_000


class InstantOutput(ForwardOutput):
    def __init__(self, num_rows: int, num_sequences: int) -> None:
        self._num_rows = num_rows
        self._num_sequences = num_sequences

    def done(self) -> bool:
        return True

    def token_ids(self) -> list[int]:
        return [1] * self._num_rows

    def logprobs(self) -> list[TokenLogprobs | None]:
        return [None] * self._num_rows

    def prompt_logprobs(self) -> list[PackedLogprobs | None]:
        return [None] * self._num_sequences

    def embeddings(self) -> list[bytes | None]:
        return [None] * self._num_sequences


class InstantEngine(EngineBase):
    def __init__(self, pool: KvPool) -> None:
        super().__init__(pool)
        self.latest: Sequence[TokenSequence] = ()

    def forward(self, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        self.latest = batch.sequences
        num_sequences = len(batch.sequences)
        num_rows = num_sequences if batch.mode == "decode" else len(batch.sampled_rows())
        return InstantOutput(num_rows, num_sequences)


class NoSender(SenderTransport):
    two_sided = False
    failure = ""

    def copy_pages(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
        return COMPLETED

    def abort(self) -> Completion:
        return COMPLETED


class NoReceiver(ReceiverTransport):
    two_sided = False
    failure = ""

    def endpoint(self) -> bytes:
        return b""

    def receive_pages(self, link_seq: int, dst_pages: Sequence[int] | None, num_pages: int) -> Completion:
        return COMPLETED

    def abort(self) -> Completion:
        return COMPLETED


class HostWorkers:
    def __init__(self, page_size: int, num_pages: int) -> None:
        self._numbers = itertools.count()
        self._prefill_outbox, self._decode_outbox = StepOutbox(self._from_prefill), StepOutbox(self._from_decode)
        layout = KvHeadLayout(1, page_size, 1, 1, "float32")
        pools = (CpuKvPool(layout, num_pages, f"host-{role}") for role in ("prefill", "decode"))
        prefill_engine, self._decode_engine = map(InstantEngine, pools)
        self.prefill: Scheduler = PrefillScheduler(
            prefill_engine,
            CacheManager(num_pages, page_size),
            LinkHandover(layout, prefill_engine.launches, self._prefill_outbox, time.monotonic),
            self._prefill_outbox,
            PrefillConfig(),
            time.monotonic,
        )
        self.decode = DecodeScheduler(
            self._decode_engine,
            CacheManager(num_pages, page_size),
            self._decode_outbox,
            DecodeConfig(max_batch_size=num_pages),
            time.monotonic,
        )
        self.last_tokens = Tokens(())
        page_format = PageFormat("none", 1, "none")
        hello = LinkHello(PROTOCOL_VERSION, "p", "p-life", "d-life", page_format, ("none",), ())
        self.decode.receive(ReceiverLinkOpened(EPOCH, hello, NoReceiver(), lambda: False))
        self.prefill.receive(SenderLinkOpened("d", "d-life", EPOCH, "none", NoSender()))

    def submit(self, prompt: Sequence[int], max_tokens: int) -> None:
        request_id, sampling = f"request-{next(self._numbers)}", SamplingParams(max_tokens, stop_token_ids=(0,))
        prompt = tuple(prompt)
        self.decode.receive(FromRouter(Admit(request_id, 0, prompt, (), sampling, 3600.0)))
        self.prefill.receive(FromRouter(Prefill(request_id, 0, prompt, (), sampling, "d")))

    def prefill_steps(self) -> None:
        """Step the prefill worker until it is idle."""
        while _turn(self.prefill, self._prefill_outbox):
            pass

    def decode_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            _turn(self.decode, self._decode_outbox)

    def run_until_decoding(self, num_requests: int) -> None:
        self._run_until(lambda: self.decode.num_running == num_requests)

    def run_until_idle(self) -> None:
        self._run_until(lambda: self.prefill.stats().num_running + self.decode.num_running == 0)

    def running_sequences(self) -> list[TokenSequence]:
        return list(self._decode_engine.latest)

    def _run_until(self, reached: Callable[[], bool]) -> None:
        for _ in range(MAX_STEPS):
            if reached():
                return
            self.prefill_steps()
            self.decode_steps(1)
        raise AssertionError(f"not reached within {MAX_STEPS} steps")

    def _from_prefill(self, outgoing: Outgoing) -> None:
        for message in outgoing.to_links.get(EPOCH, ()):
            self.decode.receive(FromSender(EPOCH, cast(SenderMessage, message)))

    def _from_decode(self, outgoing: Outgoing) -> None:
        for message in outgoing.to_links.get(EPOCH, ()):
            self.prefill.receive(FromReceiver(EPOCH, cast(ReceiverMessage, message)))
        self.last_tokens = next((m for m in outgoing.to_router if isinstance(m, Tokens)), self.last_tokens)


def _turn(scheduler: Scheduler, outbox: StepOutbox) -> bool:
    worked = scheduler.step()
    scheduler.stats()
    outbox.flush()
    return worked
