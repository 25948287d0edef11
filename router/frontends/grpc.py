"""The gRPC front door: tandem.v1.Inference."""

import logging
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from router.router import RequestTooLargeError, Router, UnavailableError
from router.tokenization import IncrementalDetokenizer, Tokenizer
from router.tracker import RequestTracker
from tandem import __version__
from tandem.config import RouterConfig
from tandem.lifecycle import RECEIVED, TOKENIZED, now_ns, phase_timings
from tandem.rpc.codec import STATS_CODEC
from tandem.sampling_params import SamplingParams
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 128
FINISH_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
# Scalars of SamplingParams that are served with these values only, so far.
ONLY_SERVED = {
    "temperature": (0.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, router: Router, tokenizer: Tokenizer, config: RouterConfig) -> None:
        self._router = router
        self._tokenizer = tokenizer
        self._config = config

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        moments = {RECEIVED: now_ns()}
        try:
            prompt_ids = self._prompt_ids(request)
            moments[TOKENIZED] = now_ns()
            sampling = self._sampling(request.sampling, len(prompt_ids))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        tracker = self._router.track(prompt_ids, sampling, request.priority, moments)
        try:
            async for response in self._responses(tracker):
                response.request_id = request.request_id
                yield response
        except RequestTooLargeError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
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

    async def _responses(self, tracker: RequestTracker) -> AsyncIterator[pb.GenerateResponse]:
        detokenizer = IncrementalDetokenizer(self._tokenizer)
        index = 0
        tokens = self._router.generate(tracker)
        try:
            async for token_ids in tokens:
                yield pb.GenerateResponse(
                    index=index,
                    token_ids=token_ids,
                    text=detokenizer.push(_without_stop_token(token_ids, tracker.sampling.stop_token_ids)),
                )
                index += len(token_ids)
        finally:
            # At once, not when the garbage collector gets there: this is what aborts the request.
            await tokens.aclose()
        summary = tracker.summary
        yield pb.GenerateResponse(
            index=index,
            text=detokenizer.flush(),
            finish_reason=FINISH_REASONS[tracker.finish_reason],
            usage=pb.Usage(
                prompt_tokens=len(tracker.prompt_ids),
                cached_tokens=tracker.prompt_cached_len or 0,
                completion_tokens=len(tracker.output_ids),
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

    def _prompt_ids(self, request: pb.GenerateRequest) -> list[int]:
        """Raises ValueError with a message for the client."""
        if request.model and request.model != self._config.model_name:
            raise ValueError(f"model {request.model!r} is not served here; {self._config.model_name!r} is")
        match request.WhichOneof("prompt"):
            case "text":
                prompt_ids = self._tokenizer.encode(request.text)
            case "token_ids":
                prompt_ids = list(request.token_ids.ids)
                if too_large := [i for i in prompt_ids if i >= self._tokenizer.vocab_size]:
                    raise ValueError(
                        f"token id {too_large[0]} is outside the vocabulary of {self._tokenizer.vocab_size}"
                    )
            case "chat":
                if not request.chat.messages:
                    raise ValueError("the chat has no messages")
                prompt_ids = self._tokenizer.encode_chat(
                    [{"role": m.role, "content": m.content} for m in request.chat.messages]
                )
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

    def _sampling(self, params: pb.SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Raises ValueError with a message for the client."""
        for name, served in ONLY_SERVED.items():
            if params.HasField(name) and getattr(params, name) not in served:
                raise ValueError(f"{name} {getattr(params, name):g} is not served yet; only {served[0]:g} is")
        if params.stop or params.logit_bias or params.HasField("logprobs"):
            raise ValueError("stop strings, logit_bias and logprobs are not served yet")
        room = self._config.max_model_len - num_prompt_tokens
        if params.HasField("max_tokens") and not 1 <= params.max_tokens <= room:
            raise ValueError(
                f"max_tokens must be between 1 and {room} for a prompt of {num_prompt_tokens} tokens, not "
                f"{params.max_tokens}"
            )
        stop_token_ids = list(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids += self._tokenizer.eos_token_ids
        return SamplingParams(
            max_tokens=params.max_tokens if params.HasField("max_tokens") else min(DEFAULT_MAX_TOKENS, room),
            seed=params.seed if params.HasField("seed") else random.getrandbits(63),
            stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
        )


def _without_stop_token(token_ids: Sequence[int], stop_token_ids: Sequence[int]) -> Sequence[int]:
    """Without the token that ended the output: it is counted and listed, but is no text."""
    return token_ids[:-1] if token_ids[-1] in stop_token_ids else token_ids
