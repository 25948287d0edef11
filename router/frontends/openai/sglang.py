"""POST /generate in SGLang's form, as its benchmark uses it."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from tandem.router.errors import InvalidRequestError
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.generation import Generation
from tandem.router.frontends.openai.errors import json_response
from tandem.router.frontends.openai.lenient import LenientBody, LenientRequest, Unserved
from tandem.router.frontends.openai.request import count_unknown_fields
from tandem.router.frontends.openai.sampling import DEFAULT_TEMPERATURE
from tandem.router.frontends.openai.schema import StopField, StopTokenIds, TokenIds
from tandem.router.frontends.openai.streaming import Event, begin_stream, pieces_of, to_json, unless_client_leaves
from tandem.router.frontends.openai.unserved import REQUEST
from tandem.router.frontends.sampling import PLAIN_FIELDS, SamplingOptions
from tandem.router.requests.client_ids import is_request_id
from tandem.router.requests.request_spec import RequestSpec
from tandem.router.text.generation_config import SamplingDefaults

DEFAULT_MAX_NEW_TOKENS = 128


class GenerateSampling(LenientBody):
    unserved: ClassVar[Mapping[str, Unserved]] = {
        name: REQUEST[name]
        for name in (
            "regex",
            "json_schema",
            "ebnf",
            "structural_tag",
            "stop_regex",
            "skip_special_tokens",
            "no_stop_trim",
        )
    } | {"n": Unserved("one output is served here: /v1/completions has n", (1,))}

    max_new_tokens: int | None = Field(None, ge=1)
    min_new_tokens: int | None = Field(None, ge=0, lt=2**32)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    sampling_seed: int | None = Field(None, ge=0, lt=2**64)
    stop: StopField | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None

    def options(self, defaults: SamplingDefaults) -> SamplingOptions:
        given = {name: value for name in PLAIN_FIELDS if (value := getattr(self, name, None)) is not None}
        if self.min_new_tokens is not None:
            given["min_tokens"] = self.min_new_tokens
        return SamplingOptions(
            max_tokens=self.max_new_tokens,
            seed=self.sampling_seed,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or (),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            plain={"temperature": DEFAULT_TEMPERATURE, **defaults.plain, **given},
        )


class GenerateRequest(LenientRequest):
    """A text or the token ids of one."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "return_logprob": Unserved("log probabilities are not served here: /v1/completions has logprobs", (False,)),
        "return_hidden_states": REQUEST["return_hidden_states"],
        "input_embeds": REQUEST["input_embeds"],
        "session_params": REQUEST["session_params"],
        "image_data": Unserved("images are not supported by this server", ([],)),
        "video_data": Unserved("videos are not supported by this server", ([],)),
        "audio_data": Unserved("audio is not supported by this server", ([],)),
    }
    # Details of options that are not served.
    hints: ClassVar[frozenset[str]] = frozenset({"logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"})

    text: str | None = None
    input_ids: TokenIds | None = None
    sampling_params: GenerateSampling | None = None
    stream: bool | None = None
    # Name of an adapter.
    lora_path: str | None = None
    rid: Annotated[str, Field(max_length=256)] | None = None


class _Output:
    def __init__(self, generation: Generation, request_id: str) -> None:
        self._generation = generation
        self._id = request_id
        self._text: list[str] = []
        self.finish_reason = ""

    def add(self, text: str, finish_reason: str) -> None:
        self._text.append(text)
        self.finish_reason = finish_reason

    def content(self) -> dict[str, Any]:
        """Returns the text so far: clients expect all of it in every event."""
        num_tokens, tracker = self._generation.num_output_tokens, self._generation.tracker
        reason: dict[str, Any] | None = None
        if self.finish_reason == "length":
            reason = {"type": "length", "length": num_tokens}
        elif self.finish_reason:
            reason = {"type": self.finish_reason}
        text = "".join(self._text)
        self._text = [text]
        info: dict[str, Any] = {
            "id": self._id,
            "finish_reason": reason,
            "prompt_tokens": len(tracker.prompt_ids),
            "completion_tokens": num_tokens,
            "cached_tokens": tracker.prompt_cached_len or 0,
        }
        if reason is not None:
            (e2e,) = [timing for timing in self._generation.timings if timing.name == "e2e"]
            # Seconds.
            info["e2e_latency"] = e2e.duration_ms / 1e3
        return {"text": text, "meta_info": info}


def add_sglang(app: FastAPI, frontend: Frontend) -> None:
    @app.post("/generate", responses={200: {"content": {"text/event-stream": {}}}})
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continues a text or token ids."""
        request_id = body.rid if body.rid and is_request_id(body.rid) else request.state.request_id
        generation = await _begin(frontend, body, request.state.key, request_id)
        output = _Output(generation, request_id)
        if not body.stream:
            return json_response(await unless_client_leaves(request.receive, _whole(generation, output)))
        return await begin_stream(_events(generation, output), request.receive)


async def _begin(frontend: Frontend, body: GenerateRequest, key: str, request_id: str) -> Generation:
    count_unknown_fields(frontend, body)
    with frontend.refusals_counted(request_id):
        prompt = body.text if body.input_ids is None else body.input_ids
        if prompt is None or (body.text is not None and body.input_ids is not None):
            raise InvalidRequestError("one of text and input_ids is needed", "text")
        model = frontend.served_model(body.lora_path or "")
        options = (body.sampling_params or GenerateSampling.model_validate({})).options(frontend.sampling_defaults)
        with frontend.admission(key):
            tokenized = await frontend.tokenize(prompt, frontend.cache_namespace(key, "", model))
        spec = RequestSpec(
            tokenized,
            frontend.sampling_params(options, tokenized, DEFAULT_MAX_NEW_TOKENS),
            key=key,
            client_request_id=request_id,
            stop=options.stop,
            model=model,
        )
        [generation] = frontend.begin(spec)
        return generation


async def _whole(generation: Generation, output: _Output) -> dict[str, Any]:
    async with aclosing(pieces_of([generation])) as pieces:
        async for _, piece in pieces:
            output.add(piece.text, piece.finish_reason)
    return output.content()


async def _events(generation: Generation, output: _Output) -> AsyncGenerator[Event]:
    async with aclosing(pieces_of([generation])) as pieces:
        async for _, piece in pieces:
            output.add(piece.text, piece.finish_reason)
            yield "", to_json(output.content())
