"""The gRPC front door: tandem.v1.Inference."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from router.output_text import OutputText
from router.router import OverloadedError, RequestTimeoutError, RequestTooLargeError, Router, UnavailableError
from router.stop_strings import check_stop_strings
from router.tokenization import Tokenizer
from router.tracker import RequestTracker
from tandem import __version__
from tandem.config import RouterConfig
from tandem.lifecycle import RECEIVED, TOKENIZED, now_ns, phase_timings
from tandem.rpc.codec import LOGPROBS_CODEC, STATS_CODEC
from tandem.sampling_params import SamplingParams
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 128
MAX_NAMESPACE_LEN = 256
# A longer prompt is tokenized beside the event loop: this many characters take about a millisecond.
MAX_INLINE_CHARACTERS = 4096
FINISH_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
# Scalars of SamplingParams whose defaults and ranges are those of the class of the same name.
PLAIN_SCALARS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, router: Router, tokenizer: Tokenizer, config: RouterConfig) -> None:
        self._router = router
        self._tokenizer = tokenizer
        self._config = config
        # Known before the first request asks: looking through the vocabulary takes a while.
        self._max_characters = config.max_model_len * tokenizer.max_token_bytes

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        moments = {RECEIVED: now_ns()}
        try:
            prompt_ids = await self._prompt_ids(request)
            moments[TOKENIZED] = now_ns()
            sampling = self._sampling(request.sampling, len(prompt_ids))
            check_stop_strings(request.sampling.stop)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        tracker = self._router.track(
            prompt_ids,
            sampling,
            priority=request.priority,
            cache_namespace=request.cache_namespace,
            moments=moments,
        )
        try:
            output = OutputText(self._tokenizer, sampling.stop_token_ids, request.sampling.stop)
            async for response in self._responses(tracker, output):
                response.request_id = request.request_id
                yield response
        except RequestTooLargeError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except OverloadedError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except RequestTimeoutError as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        except UnavailableError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def GetServerInfo(self, request: Any, context: grpc.aio.ServicerContext) -> pb.ServerInfo:
        registry = self._router.registry
        reason = registry.not_ready_reason()
        return pb.ServerInfo(
            version=__version__,
            model=self._config.model_name,
            max_model_len=self._config.max_model_len,
            ready=not reason,
            not_ready_reason=reason,
            num_requests=self._router.num_requests,
            workers=[
                pb.WorkerStatus(
                    worker_id=worker.worker_id,
                    role=worker.role,
                    device=worker.hello.device,
                    pid=worker.hello.pid,
                    address=worker.hello.address,
                    alive=True,
                    scheduler_step=max(0, worker.num_steps),
                    linked_to=list(worker.links_up),
                    stats=STATS_CODEC.encode(worker.stats),
                )
                for worker in registry
            ],
        )

    async def _responses(self, tracker: RequestTracker, output: OutputText) -> AsyncIterator[pb.GenerateResponse]:
        index = 0
        tokens = self._router.generate(tracker)
        try:
            async for token_ids in tokens:
                text, num_tokens = output.push(token_ids)
                end = index + num_tokens
                yield pb.GenerateResponse(
                    index=index,
                    token_ids=token_ids[:num_tokens],
                    logprobs=map(LOGPROBS_CODEC.encode, tracker.output_logprobs[index:end]),
                    text=text,
                )
                index = end
                if output.stopped:
                    break
        finally:
            # At once, not when the garbage collector gets there: this is what aborts the request.
            await tokens.aclose()
        summary = tracker.summary
        text = output.flush()
        yield pb.GenerateResponse(
            index=index,
            text=text,
            finish_reason=FINISH_REASONS["stop" if output.stopped else tracker.finish_reason],
            usage=pb.Usage(
                prompt_tokens=len(tracker.prompt_ids),
                cached_tokens=tracker.prompt_cached_len or 0,
                completion_tokens=index,
            ),
            phases=[
                pb.Phase(name=t.name, start_ms=t.start_ms, duration_ms=t.duration_ms)
                for t in phase_timings(tracker.moments)
            ],
            handover=pb.HandoverSummary(
                prefill_worker=tracker.prefill_worker_id,
                decode_worker=tracker.decode_worker_id,
                attempts=tracker.attempt + 1,
                page_size=self._page_size(tracker),
                prefill_cached_tokens=summary.prefill_cached_len,
                decode_cached_tokens=summary.decode_cached_len,
                pages_computed=summary.num_pages_computed,
                pages_shipped=summary.num_pages_shipped,
            ),
        )

    def _page_size(self, tracker: RequestTracker) -> int:
        worker = self._router.registry.get(tracker.prefill_worker_id)
        return worker.hello.page_format.page_size if worker else 0

    async def _prompt_ids(self, request: pb.GenerateRequest) -> list[int]:
        """Raises ValueError with a message for the client."""
        if len(request.cache_namespace) > MAX_NAMESPACE_LEN:
            raise ValueError(f"cache_namespace must have at most {MAX_NAMESPACE_LEN} characters")
        if request.model and request.model != self._config.model_name:
            raise ValueError(f"model {request.model!r} is not served here; {self._config.model_name!r} is")
        match request.WhichOneof("prompt"):
            case "text":
                prompt_ids = await self._encode(len(request.text), self._tokenizer.encode, request.text)
            case "token_ids":
                prompt_ids = list(request.token_ids.ids)
                if too_large := [i for i in prompt_ids if i >= self._tokenizer.vocab_size]:
                    raise ValueError(
                        f"token id {too_large[0]} is outside the vocabulary of {self._tokenizer.vocab_size}"
                    )
            case "chat":
                if not request.chat.messages:
                    raise ValueError("the chat has no messages")
                messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
                num_characters = sum(len(m["role"]) + len(m["content"]) for m in messages)
                prompt_ids = await self._encode(num_characters, self._tokenizer.encode_chat, messages)
            case _:
                raise ValueError("a prompt is needed: text, token_ids or chat")
        if not prompt_ids:
            raise ValueError("the prompt is empty")
        if len(prompt_ids) >= self._config.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt_ids)} tokens; the model's length is {self._config.max_model_len}, the "
                "output's first token included"
            )
        return prompt_ids

    async def _encode(self, num_characters: int, encode: Callable[[Any], list[int]], prompt: Any) -> list[int]:
        """Tokenizes a prompt without keeping other requests waiting; raises ValueError for what can never fit."""
        if num_characters > self._max_characters:
            raise ValueError(
                f"the prompt has {num_characters} characters; no more than {self._max_characters} can fit the model's "
                f"length of {self._config.max_model_len} tokens"
            )
        if num_characters <= MAX_INLINE_CHARACTERS:
            return encode(prompt)
        return await asyncio.get_running_loop().run_in_executor(None, encode, prompt)

    def _sampling(self, params: pb.SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Raises ValueError with a message for the client."""
        room = self._config.max_model_len - num_prompt_tokens
        if params.HasField("max_tokens") and not 1 <= params.max_tokens <= room:
            raise ValueError(
                f"max_tokens must be between 1 and {room} for a prompt of {num_prompt_tokens} tokens, not "
                f"{params.max_tokens}"
            )
        vocab_size = self._tokenizer.vocab_size
        if unknown := [i for i in params.logit_bias if i >= vocab_size]:
            raise ValueError(f"logit_bias: token id {unknown[0]} is outside the vocabulary of {vocab_size}")
        stop_token_ids = list(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids += self._tokenizer.eos_token_ids
        return SamplingParams(
            max_tokens=params.max_tokens if params.HasField("max_tokens") else min(DEFAULT_MAX_TOKENS, room),
            seed=params.seed if params.HasField("seed") else random.getrandbits(64),
            logit_bias=tuple(sorted(params.logit_bias.items())),
            stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
            num_logprobs=params.logprobs if params.HasField("logprobs") else None,
            **{name: getattr(params, name) for name in PLAIN_SCALARS if params.HasField(name)},
        )
