"""The HTTP frontend: OpenAI's API, and routes for operators."""

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Discriminator, Tag
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from tandem import __version__
from tandem.adapters import AdapterRef
from tandem.router.config import port_of
from tandem.router.errors import RequestError, UnknownModelError
from tandem.router.frontends.admin.routes import add_adapters
from tandem.router.frontends.anthropic.door import AnthropicDoor
from tandem.router.frontends.anthropic.routes import add_messages
from tandem.router.frontends.anthropic.schema import AnthropicErrorBody
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.kept_responses import KeptResponses
from tandem.router.frontends.openai.answer_schema import ChatCompletion, Completion, ErrorBody, Model, ModelList
from tandem.router.frontends.openai.body import MAX_OTHER_ITEMS, FieldRefusal, JsonRoute
from tandem.router.frontends.openai.chat import serve_chat
from tandem.router.frontends.openai.completions import serve_completion
from tandem.router.frontends.openai.embeddings import add_embeddings
from tandem.router.frontends.openai.envelope import EnvelopeMiddleware, with_cors
from tandem.router.frontends.openai.errors import (
    described_error,
    error_response,
    invalid_body,
    json_response,
    status_response,
)
from tandem.router.frontends.openai.middleware import AccessMiddleware
from tandem.router.frontends.openai.off_loop import OffLoop
from tandem.router.frontends.openai.operation import add_operation
from tandem.router.frontends.openai.request import max_prompt_tokens
from tandem.router.frontends.openai.schema import CompletionRequest
from tandem.router.frontends.openai.sglang import add_sglang
from tandem.router.frontends.openai.streaming import ClientGoneError
from tandem.router.frontends.openai.tokenizing import add_tokenizing
from tandem.router.frontends.openai.tools_schema import ChatRequest
from tandem.router.frontends.page.routes import add_page
from tandem.router.frontends.response_exchange import ResponseExchange
from tandem.router.frontends.responses.conversations import add_conversations
from tandem.router.frontends.responses.routes import add_responses
from tandem.router.observe.live.feed import LiveFeed
from tandem.router.observe.live.snapshot import SnapshotBuilder
from tandem.router.observe.process_metrics import read_store_metrics, read_worker_metrics
from tandem.rpc.credentials import ClusterCredentials

STATUS_CLIENT_GONE = 499
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: described_error(ErrorBody, description)
    for status, description in {
        400: "bad input",
        401: "no API key, or a wrong one",
        404: "unknown model, or unknown stream to resume",
        408: "the body came too slowly",
        410: "the end of the stream to resume is lost",
        413: "the body is too large",
        415: "the body has a content encoding",
        429: "too many requests",
        500: "an error of the server",
        503: "no worker can serve the request now",
        504: "the request took too long",
    }.items()
}
_TEXT = {"type": "string"}
_EVENT = {"type": "object", "properties": {"id": _TEXT, "data": _TEXT}, "required": ["data"]}
_STREAMED = {"text/event-stream": {"itemSchema": _EVENT}}
# A body with messages is a chat.
Invocation = Annotated[
    Annotated[ChatRequest, Tag("#chat")] | Annotated[CompletionRequest, Tag("#completion")],
    Discriminator(lambda body: "#chat" if isinstance(body, dict) and "messages" in body else "#completion"),
]
LastEventId = Annotated[str | None, Header(description="Id of the last event received; the answer resumes after it.")]


def make_app(
    frontend: Frontend,
    responses: ResponseExchange | None = None,
    feed: LiveFeed | None = None,
    credentials: ClusterCredentials | None = None,
) -> ASGIApp:
    """
    Args:
        responses, feed: None: this router's alone.
        credentials: for fetching workers' metrics; None: not needed.
    """
    credentials = credentials or ClusterCredentials()
    if feed is None:
        feed = LiveFeed(SnapshotBuilder(frontend.router, frontend.config), len(frontend.config.api_keys))
    if responses is None:
        kept = KeptResponses(time.monotonic)
        own = frontend.config
        responses = ResponseExchange(own.router_id, {}, kept, credentials, own.max_body_bytes)
    app = FastAPI(
        title="Tandem",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=_ERRORS,
        # A redirect would name uvicorn's address, which a proxy may have changed.
        redirect_slashes=False,
    )
    app.router.route_class = JsonRoute
    app.state.off_loop = OffLoop()
    app.state.max_items = max_prompt_tokens(frontend) + MAX_OTHER_ITEMS
    _add_inference(app, frontend)
    add_embeddings(app, frontend)
    add_responses(app, frontend, responses)
    add_conversations(app, frontend, responses)
    add_messages(app, frontend)
    add_tokenizing(app, frontend)
    add_sglang(app, frontend)
    add_operation(app, frontend)
    add_adapters(app, frontend)
    _add_operation(app, frontend, credentials)
    add_page(app, frontend, feed)
    _add_error_handlers(app, frontend)
    app.openapi = partial(_description, app.openapi)  # type: ignore[method-assign]
    config = frontend.config
    guarded = AnthropicDoor(AccessMiddleware(app, frontend))
    return EnvelopeMiddleware(with_cors(guarded, config.allowed_origins), config.root_path)


def _description(describe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Removes the framework's 422, which is never sent, and adds the schemas of errors."""
    description = describe()
    schemas = description["components"]["schemas"]
    for body in (ErrorBody, AnthropicErrorBody):
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update({**schema.pop("$defs"), body.__name__: schema})
    for operations in description["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return description


def _add_inference(app: FastAPI, frontend: Frontend) -> None:
    created = int(frontend.started_at)

    def model(name: str, adapter: AdapterRef | None = None) -> Model:
        config = frontend.config
        root, parent = (config.model_name, None) if adapter is None else (adapter.path, config.model_name)
        return Model(id=name, created=created, root=root, parent=parent, max_model_len=config.max_model_len)

    @app.get("/v1/models")
    async def list_models() -> ModelList:
        """Lists the served model by each of its names, and the adapters."""
        adapters = [model(entry.name, entry.adapter) for entry in frontend.router.adapters.loaded()]
        return ModelList(data=[*map(model, frontend.config.model_names), *adapters])

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str, request: Request) -> Model:
        """Describes the served model, or an adapter."""
        with frontend.refusals_counted(request.state.request_id):
            if not model_id:
                raise UnknownModelError("a model's name is needed", "model")
            found = frontend.served_model(model_id)
        return model(model_id, found.adapter)

    @app.post("/v1/completions", response_model=Completion, responses={200: {"content": _STREAMED}})
    async def completions(body: CompletionRequest, request: Request, last_event_id: LastEventId = None) -> Response:
        """Continues texts or token ids."""
        return await serve_completion(frontend, body, request, last_event_id)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses={200: {"content": _STREAMED}})
    async def chat_completions(body: ChatRequest, request: Request, last_event_id: LastEventId = None) -> Response:
        """Answers a conversation."""
        return await serve_chat(frontend, body, request, last_event_id)

    @app.post("/invocations", response_model=ChatCompletion | Completion, responses={200: {"content": _STREAMED}})
    async def invocations(body: Invocation, request: Request, last_event_id: LastEventId = None) -> Response:
        """Serves a chat or a completion, for SageMaker."""
        if isinstance(body, ChatRequest):
            return await serve_chat(frontend, body, request, last_event_id)
        return await serve_completion(frontend, body, request, last_event_id)


def _add_operation(app: FastAPI, frontend: Frontend, credentials: ClusterCredentials) -> None:
    @app.get("/health", include_in_schema=False)
    async def health() -> Response:
        return json_response({"status": "ok"})

    @app.get("/ready", include_in_schema=False)
    async def ready() -> Response:
        reason = frontend.router.not_ready_reason()
        return json_response({"ready": not reason, "reason": reason}, 503 if reason else 200)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(frontend.router.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/metrics/{process}", include_in_schema=False)
    async def metrics_of_process(process: str) -> Response:
        for worker in frontend.router.workers:
            if worker.worker_id == process:
                text = await read_worker_metrics(worker.hello.address, credentials)
                return Response(text, media_type=CONTENT_TYPE_LATEST)
        for store in frontend.router.stores:
            if store.join.store_id == process:
                text = await read_store_metrics(store.join.address, credentials)
                return Response(text, media_type=CONTENT_TYPE_LATEST)
        return Response("no worker or page store of this name is connected\n", 404, media_type="text/plain")

    @app.get("/sd", include_in_schema=False)
    async def service_discovery(request: Request) -> Response:
        # Routers of one host share the address that was just reached; their bound address may be 0.0.0.0.
        found_at = {frontend.config.router_id: request.url.netloc}
        if len(routers := frontend.config.routers) > 1:
            host = request.url.netloc.rpartition(":")[0] if request.url.port else request.url.netloc
            found_at = {name: f"{host}:{port_of(own.http)}" for name, own in routers.items()}
            if len({own.http.rpartition(":")[0] for own in routers.values()}) > 1:
                found_at = {name: own.http for name, own in routers.items()}
        common = {"model_name": frontend.config.model_name}
        labels = {**common, "__scheme__": request.url.scheme}
        if root_path := frontend.config.root_path:
            labels["__metrics_path__"] = f"{root_path}/metrics"
        targets = [{"targets": [address], "labels": {**labels, "process": name}} for name, address in found_at.items()]
        others = {worker.worker_id: worker.hello.metrics_address for worker in frontend.router.workers}
        others |= {store.join.store_id: store.join.metrics_address for store in frontend.router.stores}
        for process, address in others.items():
            own = {"process": process}
            if address:
                targets.append({"targets": [address], "labels": {**common, **own}})
            else:
                path = f"{frontend.config.root_path}/metrics/{process}"
                targets.append({"targets": [request.url.netloc], "labels": {**labels, "__metrics_path__": path, **own}})
        return json_response(targets)


def _add_error_handlers(app: FastAPI, frontend: Frontend) -> None:
    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        refusal = invalid_body(error)
        frontend.router.observers.refused(refusal, request.state.request_id)
        return error_response(refusal)

    @app.exception_handler(HTTPException)
    async def refused_before_it_is_a_request(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, RequestError):
            return error_response(error.__cause__)
        path, method = request.scope["path"], request.method
        # The framework's messages do not name the path.
        messages = {"Not Found": f"there is no {path} here", "Method Not Allowed": f"{path} does not take {method}"}
        message = messages.get(error.detail, error.detail)
        param = error.param if isinstance(error, FieldRefusal) else None
        return status_response(error.status_code, message, error.headers, param)

    @app.exception_handler(ClientGoneError)
    async def client_gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=STATUS_CLIENT_GONE)
