"""Common parts of completions and chat completions."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from tandem.router.errors import InvalidRequestError
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.openai.lenient import LenientRequest
from tandem.router.frontends.openai.schema import MAX_CHOICES, ChatCompletionRequest, CompletionRequest
from tandem.router.frontends.openai.streaming import unless_client_leaves
from tandem.router.requests.request_spec import TokenizedPrompt
from tandem.router.text.prompt_cut import PromptCut
from tandem.router.text.structured_output import JSON_OBJECT, StructuredOutput, choices
from tandem.sampling_params import ALL_LOGPROBS

logger = logging.getLogger(__name__)

# Limit for all outputs of one request together, unless the model's length is larger.
MAX_PROMPT_TOKENS = 2**18

Body = CompletionRequest | ChatCompletionRequest


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """Numbers of most likely tokens that a body asks for with its prompt; None: no log probabilities.

    Attributes:
        listed: in `prompt_logprobs`; ALL_LOGPROBS: the whole vocabulary.
        echoed: in front of the output's.
    """

    listed: int | None
    echoed: int | None

    @classmethod
    def of(cls, body: Body) -> "WantedLogprobs":
        """Raises InvalidRequestError: a stream cannot have them."""
        if body.stream and body.prompt_logprobs is not None:
            raise InvalidRequestError("a stream has no prompt_logprobs: leave out one of them", "prompt_logprobs")
        echoed = body.logprobs if isinstance(body, CompletionRequest) and body.echo else None
        if echoed is not None and body.stream and (body.n or 1) > 1:
            # Only one output of each prompt computes them.
            raise InvalidRequestError("a stream of several outputs has no log probabilities of the prompt", "n")
        return cls(body.prompt_logprobs, echoed)

    @property
    def num_forms(self) -> int:
        return (self.listed is not None) + (self.echoed is not None)

    @property
    def num_top(self) -> int | None:
        asked = [number for number in (self.listed, self.echoed) if number is not None]
        if ALL_LOGPROBS in asked:
            return ALL_LOGPROBS
        return max(asked, default=None)


def count_unknown_fields(frontend: Frontend, body: LenientRequest) -> None:
    unknown = body.unknown_fields
    if unknown.num_fields:
        frontend.router.metrics.unknown_fields(unknown.num_fields)
        logger.debug("%d unknown fields, for example %s", unknown.num_fields, json.dumps(unknown.names))


def check_num_choices(num_prompts: int, n: int | None) -> None:
    num_choices = num_prompts * (n or 1)
    if num_choices > MAX_CHOICES:
        raise InvalidRequestError(f"at most {MAX_CHOICES} outputs for one request, not {num_choices}", "n")


def prompt_cut(frontend: Frontend, body: Body, max_tokens: int | None) -> PromptCut | None:
    """Returns how the body's prompts are truncated; None: not at all. Raises InvalidRequestError."""
    num_tokens, longest = body.truncate_prompt_tokens, frontend.config.max_model_len - 1
    if num_tokens is None:
        return None
    if num_tokens == -1:
        # Leaves room for the output. One that has none is refused later, with its own words.
        num_tokens = max(1, longest + 1 - (max_tokens or 1))
    if not 1 <= num_tokens <= longest:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1 or between 1 and {longest}, not {num_tokens}", "truncate_prompt_tokens"
        )
    return PromptCut(num_tokens, keeps_end=body.truncation_side != "right")


def max_prompt_tokens(frontend: Frontend) -> int:
    return max(MAX_PROMPT_TOKENS, frontend.config.max_model_len)


def structured_output(body: Body) -> StructuredOutput | None:
    given: list[StructuredOutput] = []
    response_format, outputs = body.response_format, body.structured_outputs
    if response_format is not None and response_format.type == "json_object":
        given.append(StructuredOutput("json_schema", JSON_OBJECT, "response_format"))
    elif response_format is not None and response_format.type == "json_schema":
        if response_format.json_schema is None or response_format.json_schema.schema_ is None:
            raise InvalidRequestError(
                "response_format of type json_schema needs a json_schema with a schema", "response_format"
            )
        given.append(_json_schema(response_format.json_schema.schema_, "response_format"))
    named: list[tuple[str, Any, str | None, list[str] | None, str | None]] = [
        ("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    ]
    if outputs is not None:
        named.append(("structured_outputs.", outputs.json_, outputs.regex, outputs.choice, outputs.grammar))
        if not any(outputs.model_dump().values()):
            raise InvalidRequestError(
                "structured_outputs is empty: set json, regex, choice, grammar or json_object", "structured_outputs"
            )
        if outputs.json_object:
            given.append(StructuredOutput("json_schema", JSON_OBJECT, "structured_outputs.json_object"))
    for prefix, schema, regex, options, grammar in named:
        if schema is not None:
            given.append(_json_schema(schema, f"{prefix}json"))
        if regex is not None:
            given.append(StructuredOutput("regex", regex, f"{prefix}regex"))
        if options is not None:
            given.append(choices(options, f"{prefix}choice"))
        if grammar is not None:
            given.append(StructuredOutput("grammar", grammar, f"{prefix}grammar"))
    if len(given) > 1:
        names = " and ".join(wanted.param for wanted in given)
        raise InvalidRequestError(f"an output keeps to one thing, not to {names}", given[1].param)
    return given[0] if given else None


async def checked_grammar(frontend: Frontend, wanted: StructuredOutput | None, request: Request) -> str:
    """Returns the grammar in the workers' form; "" for None. Raises RequestError, ClientGoneError."""
    if wanted is None:
        return ""
    return await unless_client_leaves(request.receive, frontend.grammar(wanted, request.state.client))


def _json_schema(schema: dict[str, Any] | str, param: str) -> StructuredOutput:
    try:
        return StructuredOutput("json_schema", schema if isinstance(schema, str) else json.dumps(schema), param)
    except RecursionError as error:
        raise InvalidRequestError("the schema is nested too deeply", param) from error


def cache_namespace(body: Body) -> str:
    return body.cache_namespace or body.cache_salt or ""


def check_num_prompt_tokens(frontend: Frontend, prompts: Sequence[TokenizedPrompt], n: int | None) -> None:
    """Raises InvalidRequestError: the workers of each output are sent its whole prompt."""
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts) * (n or 1)
    limit = max_prompt_tokens(frontend)
    if num_tokens > limit:
        raise InvalidRequestError(f"{num_tokens} prompt tokens over all outputs; one request may have {limit}", "n")
