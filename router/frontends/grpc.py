"""The gRPC frontend: tandem.v1.Inference."""

import hashlib
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import grpc

from tandem import __version__
from tandem.router.adapters.names import ServedModel
from tandem.router.errors import (
    InternalError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
    UnauthenticatedError,
    UnavailableError,
)
from tandem.router.frontends.admin.status import loaded_adapters
from tandem.router.frontends.base import Frontend, PromptInput
from tandem.router.frontends.generation import Generation, Piece
from tandem.router.frontends.grpc_embedding import Embeddings
from tandem.router.frontends.grpc_responses import Responses, write_scored
from tandem.router.frontends.malformed import Malformed
from tandem.router.frontends.piece_writer import PieceWriter
from tandem.router.frontends.sampling import PLAIN_FIELDS, SamplingOptions
from tandem.router.requests.client_ids import (
    REQUEST_ID_HEADER,
    TRACEPARENT,
    TRACESTATE,
    current_trace_context,
    is_request_id,
    request_id_of,
    trace_context_of,
)
from tandem.router.requests.request_spec import RequestSpec
from tandem.router.resumption import DIGEST_BYTES, PARAM, Resumption
from tandem.router.text.structured_output import StructuredOutput, choices
from tandem.rpc.auth import AuthInterceptor
from tandem.rpc.codec import STATS_CODEC
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

DEFAULT_MAX_TOKENS = 128
# Marks an end that a router reports; a broken connection has no trailer.
ROUTER_TRAILER = "tandem-router"
# Of the methods that admin keys are for.
ADMIN_PREFIX = "/tandem.v1.AdapterAdmin/"
# The first matching class counts.
STATUS_CODES: tuple[tuple[type[RequestError], grpc.StatusCode], ...] = (
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    (OverloadedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (RequestTimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (InternalError, grpc.StatusCode.INTERNAL),
)


def router_trailer(frontend: Frontend) -> tuple[tuple[str, str], ...]:
    return ((ROUTER_TRAILER, frontend.config.router_id),)


def status_code(error: RequestError) -> grpc.StatusCode:
    return next(code for kind, code in STATUS_CODES if isinstance(error, kind))


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        current_trace_context.set(trace_context_of(metadata_of(context, TRACEPARENT), metadata_of(context, TRACESTATE)))
        request_id = _request_id(request, context)
        trailer = _request_id_trailer(request_id)
        context.set_trailing_metadata(trailer)
        try:
            with ExitStack() as held:
                generation, digest = await self._begin(request, request_id, context, held)
                held.enter_context(generation)
                # Sent with the first tokens: a call that breaks earlier can be sent again.
                resume_token, proof = self._frontend.resume_token(generation.tracker.spec, digest)
                responses = Responses(request.request_id, generation, resume_token, proof)

                def write(piece: Piece) -> Coroutine[Any, Any, None]:
                    scored = responses.take_scored(piece)
                    response = responses.next(piece)
                    return context.write(response) if scored is None else write_scored(context, response, scored)

                await PieceWriter(generation, write).run()
            return
        except RequestError as error:
            refusal = status_code(error), str(error)
        # gRPC keeps an aborted call's frames, and the objects in them, until the next full garbage collection.
        del request
        await context.abort(*refusal, (*router_trailer(self._frontend), *trailer))

    async def Embed(self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext) -> None:
        current_trace_context.set(trace_context_of(metadata_of(context, TRACEPARENT), metadata_of(context, TRACESTATE)))
        request_id = _request_id(request, context)
        trailer = _request_id_trailer(request_id)
        context.set_trailing_metadata(trailer)
        frontend = self._frontend
        try:
            with ExitStack() as held:
                with frontend.refusals_counted(request_id):
                    key, _ = self._admit(request, context, held)
                    embeddings = await Embeddings.begin(frontend, request, key, request_id)
                await embeddings.send(context.write)
            return
        except RequestError as error:
            refusal = status_code(error), str(error)
        # As in Generate.
        del request
        await context.abort(*refusal, (*router_trailer(frontend), *trailer))

    async def GetServerInfo(self, request: Any, context: grpc.aio.ServicerContext) -> pb.ServerInfo:
        if isinstance(request, Malformed):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.message)
        router, config = self._frontend.router, self._frontend.config
        reason = router.not_ready_reason()
        tells_links = router.workers.tells_links
        return pb.ServerInfo(
            version=__version__,
            model=config.model_name,
            max_model_len=config.max_model_len,
            ready=not reason,
            not_ready_reason=reason,
            num_requests=router.num_requests + router.elsewhere.num_requests,
            routers=_router_statuses(self._frontend),
            placements=[
                pb.PlacementCount(placement=placement, reason=reason, count=count)
                for (placement, reason), count in sorted(router.metrics.placements.items())
                if count
            ],
            workers=[
                pb.WorkerStatus(
                    worker_id=worker.worker_id,
                    role=worker.role,
                    device=worker.hello.device,
                    pid=worker.hello.pid,
                    address=worker.hello.address,
                    alive=True,
                    scheduler_step=max(0, worker.num_steps),
                    linked_to=list(worker.links_up) if tells_links else (),
                    num_links=len(worker.links_up),
                    lean=worker.lean,
                    stats=STATS_CODEC.encode(worker.whole_stats(by_link=tells_links)),
                    metrics_address=worker.hello.metrics_address,
                    rack=worker.rack,
                    follower_pids=worker.hello.follower_pids,
                )
                for worker in router.workers
            ],
            stores=[
                pb.StoreStatus(
                    store_id=store.join.store_id,
                    pid=store.join.pid,
                    address=store.join.address,
                    alive=True,
                    metrics_address=store.join.metrics_address,
                    num_slots=store.beat.num_slots,
                    num_host_pages=store.beat.num_host_pages,
                    num_disk_pages=store.beat.num_disk_pages,
                    num_disk_bytes=store.beat.num_disk_bytes,
                    is_disk_off=store.beat.is_disk_off,
                )
                for store in router.stores
            ],
            adapters=loaded_adapters(self._frontend),
            sizes=[pb.SizeStatus(**row) for row in router.sizes],
        )

    async def _begin(
        self, request: pb.GenerateRequest, request_id: str, context: grpc.aio.ServicerContext, held: ExitStack
    ) -> tuple[Generation, bytes]:
        """Returns the generation and the request's digest.

        Args:
            held: keeps the request's bytes counted as in hand.

        Raises RequestError.
        """
        frontend = self._frontend
        with frontend.refusals_counted(request_id):
            key, hold = self._admit(request, context, held)
            model = frontend.served_model(request.model)
            digest = _digest(request, model)
            resumption = _resumption(frontend, request.resume, key, digest) if request.HasField("resume") else None
            with frontend.admission(key):
                namespace = frontend.cache_namespace(key, request.cache_namespace, model)
                prompt = await frontend.tokenize(_prompt(request, frontend), namespace)
                # Without keys, the peer's address without its port.
                client = key or context.peer().rpartition(":")[0]
                grammar = await frontend.grammar(_structured_output(request), client)
            options = _options(request.sampling, grammar)
            frontend.check_prompt_logprobs(len(prompt.token_ids), options.num_prompt_logprobs, hold)
            spec = RequestSpec(
                prompt,
                frontend.sampling_params(options, prompt, DEFAULT_MAX_TOKENS),
                key=key,
                client_request_id=request_id,
                session_id=request.session_id,
                priority=request.priority,
                stop=options.stop,
                resumption=resumption,
                client=frontend.turn_of(client, grammar),
                model=model,
            )
            [generation] = frontend.begin(spec)
            return generation, digest

    def _admit(
        self, request: pb.GenerateRequest | pb.EmbedRequest, context: grpc.aio.ServicerContext, held: ExitStack
    ) -> tuple[str, Callable[[int], None]]:
        """Returns the client's key, and a function that counts bytes as in hand. Raises RequestError."""
        if isinstance(request, Malformed):
            raise InvalidRequestError(request.message)
        # The AuthInterceptor checks the key but does not record it.
        key = self._frontend.access.identify(metadata_of(context, "authorization"))
        hold = held.enter_context(self._frontend.access.hold_bytes(key))
        hold(request.ByteSize())
        return key, hold


def _router_statuses(frontend: Frontend) -> list[pb.RouterStatus]:
    config, router = frontend.config, frontend.router
    statuses = []
    for name in router.router_names:
        addresses = config.routers[name]
        is_own = name == config.router_id
        counts = frontend.counts() if is_own else router.elsewhere.counts_of(name)
        statuses.append(
            pb.RouterStatus(
                router_id=name,
                grpc_address=addresses.grpc,
                http_address=addresses.http,
                alive=counts is not None,
                num_requests=counts.num_requests if counts is not None else 0,
                pid=counts.pid if counts is not None else 0,
            )
        )
    return statuses


def metadata_of(context: grpc.aio.ServicerContext, name: str) -> Any:
    metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
    return metadata.get(name)


def _request_id(request: pb.GenerateRequest | pb.EmbedRequest | Malformed, context: grpc.aio.ServicerContext) -> str:
    named = "" if isinstance(request, Malformed) else request.request_id
    return named or request_id_of(metadata_of(context, REQUEST_ID_HEADER))


def _request_id_trailer(request_id: str) -> tuple[tuple[str, str], ...]:
    """A message may hold a name that metadata cannot."""
    return ((REQUEST_ID_HEADER, request_id),) if is_request_id(request_id) else ()


def _prompt(request: pb.GenerateRequest, frontend: Frontend) -> PromptInput:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return request.token_ids.ids
        case "chat":
            frontend.check_num_messages(len(request.chat.messages))
            frontend.check_roles({message.role for message in request.chat.messages})
            return [{"role": m.role, "content": m.content} for m in request.chat.messages]
    raise InvalidRequestError("a prompt is needed: text, token_ids or chat")


def _resumption(frontend: Frontend, resume: pb.Resume, key: str, digest: bytes) -> Resumption:
    """Raises InvalidRequestError, before the prompt is tokenized."""
    state = frontend.open_resume_token(resume.token, key)
    if state.request_digest != digest:
        raise InvalidRequestError(
            "the resume token belongs to another request: send the same prompt, sampling, structured_output, priority, "
            "cache_namespace, session_id and model",
            PARAM,
        )
    token_ids = tuple(resume.token_ids)
    frontend.check_output_proof(resume.token, token_ids, resume.proof)
    return Resumption(state, token_ids, resume.num_characters)


def _digest(request: pb.GenerateRequest, model: ServedModel) -> bytes:
    """Ties a resume token to its request, up to the name that the client gives to a try, and to the content of its
    adapter."""
    fields = pb.GenerateRequest()
    fields.CopyFrom(request)
    fields.ClearField("resume")
    fields.ClearField("request_id")
    content = fields.SerializeToString(deterministic=True) + model.content_hash.encode()
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def _structured_output(request: pb.GenerateRequest) -> StructuredOutput | None:
    kind = request.structured_output.WhichOneof("kind")
    if kind is None:
        if request.HasField("structured_output"):
            raise InvalidRequestError(
                "structured_output is empty: set json_schema, regex, choices or grammar", "structured_output"
            )
        return None
    param = f"structured_output.{kind}"
    if kind == "choices":
        return choices(request.structured_output.choices.texts, param)
    return StructuredOutput(kind, getattr(request.structured_output, kind), param)


def _options(params: pb.SamplingParams, grammar: str) -> SamplingOptions:
    return SamplingOptions(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        seed=params.seed if params.HasField("seed") else None,
        logit_bias=params.logit_bias,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        num_logprobs=params.logprobs if params.HasField("logprobs") else None,
        num_prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        grammar=grammar,
        allowed_token_ids=params.allowed_token_ids,
        logprob_token_ids=params.logprob_token_ids,
        plain={name: getattr(params, name) for name in PLAIN_FIELDS if params.HasField(name)},
    )


def api_key_auth(frontend: Frontend) -> AuthInterceptor:
    def refusal(method: str, metadata: dict[str, str]) -> str:
        if method.startswith(ADMIN_PREFIX) and frontend.access.is_admin(metadata.get("authorization")):
            return ""
        try:
            frontend.identify(metadata.get("authorization"))
        except UnauthenticatedError as error:
            return str(error)
        return ""

    return AuthInterceptor(refusal)
