"""Plans a chat: its prompt, sampling options, calls and the form of its output."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

from tandem.router.adapters.names import ServedModel
from tandem.router.errors import InvalidRequestError
from tandem.router.frontends.base import Frontend, PromptInput
from tandem.router.frontends.openai.body import MAX_OTHER_ITEMS, check_structure
from tandem.router.frontends.openai.request import (
    WantedLogprobs,
    check_num_choices,
    prompt_cut,
    structured_output,
)
from tandem.router.frontends.openai.resumable import EventId, is_resumable, last_event
from tandem.router.frontends.openai.sampling import sampling_options
from tandem.router.frontends.openai.tools_schema import ChatRequest, Message, NamedTool, TemplateFields, Tool
from tandem.router.frontends.sampling import SamplingOptions
from tandem.router.requests.request_spec import TokenizedPrompt
from tandem.router.text import structured_output as structures
from tandem.router.text.chat import Chat
from tandem.router.text.output_format import NONE, OutputFormat
from tandem.router.text.output_parser import OutputParser
from tandem.router.text.prompt_cut import PromptCut
from tandem.router.text.reasoning import CLOSING, OPENING, Beginning
from tandem.router.text.structured_output import StructuredOutput
from tandem.router.text.tool_grammar import CALL_STYLES

ASSISTANT = "assistant"
PARAM_TOOLS, PARAM_CHOICE = "tools", "tool_choice"


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The calls in an output, and its structure.

    Attributes:
        parser: name of the calls' parser; "none": the output has no calls.
        structure: of the output, or of the part behind its reasoning.
        is_named: whether the client names the function to call.
    """

    parser: str
    names: Collection[str]
    structure: StructuredOutput | None
    is_named: bool
    max_calls: int | None
    calls_only: bool


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A checked chat, before anything is computed for it.

    Attributes:
        cut: truncation of the prompt.
        continued: text of the message that the output continues; "": a new message.
        role: of the output's message.
        echo: text of the last message, to put in front of the output.
        options: sampling options without the grammar.
    """

    body: ChatRequest
    model: ServedModel
    prompt: PromptInput
    cut: PromptCut | None
    continued: str
    role: str
    echo: str
    calls: CallPlan
    options: SamplingOptions
    wanted_logprobs: WantedLogprobs
    is_resumable: bool
    last_event: EventId | None


@dataclass(frozen=True, slots=True)
class Reading:
    """The form of one request's outputs. Attributes: marks: special tokens in their text, by id."""

    calls: CallPlan
    beginning: Beginning
    marks: Mapping[int, str]
    format: OutputFormat

    def parser(self, num_seen: int) -> OutputParser:
        """Args: num_seen: characters of the text whose parts the client has."""
        calls = self.calls
        return self.format.parser(
            calls.parser,
            self.beginning,
            calls.names,
            max_calls=calls.max_calls,
            calls_only=calls.calls_only,
            num_seen=num_seen,
        )


def plan_chat(frontend: Frontend, body: ChatRequest, last_event_id: str | None = None) -> ChatPlan:
    """May run in another thread than the loop's. Raises InvalidRequestError."""
    model = frontend.served_model(body.model or "")
    check_num_choices(1, body.n)
    num_logprobs = _num_logprobs(body)
    max_tokens = _max_tokens(body)
    wanted_logprobs = WantedLogprobs.of(body)
    options = sampling_options(frontend, body, max_tokens, num_logprobs, wanted_logprobs.num_top)
    frontend.check_num_messages(len(body.messages))
    check_arguments(body.messages)
    calls = plan_calls(frontend.output_format, body)
    prompt = chat_prompt(frontend, body.messages, body, [] if body.tool_choice == "none" else body.tools or [])
    last_message = body.messages[-1]
    continued = last_message.text if body.continue_final_message else ""
    is_new = body.add_generation_prompt is not False and not body.continue_final_message
    role = ASSISTANT if is_new else last_message.role
    echo = last_message.text if body.echo and last_message.role == role else ""
    cut = prompt_cut(frontend, body, max_tokens)
    resumable = is_resumable(body, options, 1)
    last = last_event(last_event_id, is_resumable=resumable)
    return ChatPlan(body, model, prompt, cut, continued, role, echo, calls, options, wanted_logprobs, resumable, last)


def _num_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _max_tokens(body: ChatRequest) -> int | None:
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequestError("max_tokens and max_completion_tokens differ: send one of them", "max_tokens")
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def check_arguments(messages: Sequence[Message]) -> None:
    """Bounds the arguments of past calls, which are JSON within JSON, before they are parsed. Raises
    InvalidRequestError."""
    try:
        check_structure(",".join(_arguments(messages)).encode(), MAX_OTHER_ITEMS)
    except HTTPException as error:
        raise InvalidRequestError(f"the arguments of past calls: {error.detail}", "messages") from error


def _arguments(messages: Sequence[Message]) -> list[str]:
    return [call.function.arguments for message in messages for call in message.tool_calls or ()]


def plan_calls(output_format: OutputFormat, body: ChatRequest) -> CallPlan:
    """Raises InvalidRequestError: tools and tool_choice do not fit each other or the model.

    A forced call has no room for an answer, so structured output has no effect on it. A client sends the format with
    every turn of a conversation, and it binds the answer after the call.
    """
    tools, choice = body.tools or [], body.tool_choice or "auto"
    named = choice if isinstance(choice, NamedTool) else None
    calls_only = named is not None or choice == "required"
    if calls_only and not tools:
        raise InvalidRequestError("tool_choice asks for a call, and there are no tools", PARAM_CHOICE)
    structure = structured_output(body)
    max_calls = 1 if named is not None or body.parallel_tool_calls is False else None
    parser = NONE
    if tools and choice != "none":
        _check_read(output_format, calls_only=calls_only)
        parser = output_format.tool_parser_name
        if calls_only or structure is not None:
            parser = _bound_parser(output_format)
            bound = _calls_structure(parser, tools if named is None else _named(tools, named), max_calls)
            structure = bound if calls_only or structure is None else structures.either(bound, structure)
    names = frozenset(tool.function.name for tool in tools)
    return CallPlan(parser, names, structure, named is not None, max_calls, calls_only)


def _check_read(output_format: OutputFormat, *, calls_only: bool) -> None:
    if not calls_only and output_format.tool_parser_name == NONE:
        raise InvalidRequestError(
            "this model's own calls are not read here (--tool-parser): use a tool_choice that asks for one",
            PARAM_TOOLS,
        )


def _named(tools: Sequence[Tool], named: NamedTool) -> list[Tool]:
    called = [tool for tool in tools if tool.function.name == named.function.name]
    if not called:
        raise InvalidRequestError(f"there is no tool {named.function.name!r} among the tools", PARAM_CHOICE)
    return called


def _bound_parser(output_format: OutputFormat) -> str:
    """Returns the parser of grammar-made calls: the model's own, if a grammar can write its form."""
    name = output_format.tool_parser_name
    style = CALL_STYLES.get(name)
    if style is None or output_format.special_ids((style.opening.strip(), style.closing.strip())):
        return "json"
    return name


def _calls_structure(parser: str, tools: Sequence[Tool], max_calls: int | None) -> StructuredOutput:
    functions = [(tool.function.name, json.dumps(tool.function.schema_of_arguments)) for tool in tools]
    return structures.tool_calls(parser, functions, may_be_several=max_calls is None, param=PARAM_TOOLS)


def read_from(output_format: OutputFormat, plan: ChatPlan, prompt: TokenizedPrompt) -> Reading | None:
    """Returns None if the outputs are content alone."""
    style = output_format.reasoning_style
    if style is None:
        beginning = Beginning.ANSWER
    elif plan.continued:
        beginning = style.beginning_within(plan.continued)
    else:
        beginning = style.beginning(prompt.ending)
    calls = plan.calls
    if calls.parser == NONE and beginning is Beginning.ANSWER:
        return None
    return Reading(calls, beginning, output_format.marks(calls.parser, beginning), output_format)


def whole_structure(structure: StructuredOutput | None, reading: Reading | None) -> StructuredOutput | None:
    """Adds the reasoning to the structure. Raises InvalidRequestError."""
    if structure is None or reading is None or reading.beginning is Beginning.ANSWER:
        return structure
    if reading.format.special_ids((OPENING, CLOSING)):
        raise InvalidRequestError(
            f"{structure.param} cannot be had behind this model's reasoning, which special tokens end: turn its "
            "reasoning off, if its chat template has a way to do so",
            structure.param,
        )
    return structures.after_reasoning(structure, is_open=reading.beginning is Beginning.OPEN)


def chat_prompt(
    frontend: Frontend, messages: Sequence[Message], body: TemplateFields, tools: Sequence[Tool]
) -> Chat | list[dict[str, Any]]:
    """Raises InvalidRequestError: fields exclude each other, or the template does not use documents."""
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other: send one of them",
            "continue_final_message",
        )
    frontend.check_roles({message.role for message in messages})
    rendered = [_message(message) for message in messages]
    is_continued = bool(body.continue_final_message)
    add_generation_prompt = body.add_generation_prompt is not False and not is_continued
    variables = body.chat_template_kwargs or {}
    if body.reasoning_effort is not None and frontend.tokenizer.chat_format.knows_effort:
        variables = {"reasoning_effort": body.reasoning_effort, **variables}
    arguments = _arguments(messages)
    if not (tools or arguments or body.documents or variables or is_continued) and add_generation_prompt:
        return rendered
    if body.documents and not frontend.tokenizer.knows_documents:
        raise InvalidRequestError("the model's chat template does not know documents", "documents")
    functions = [{"type": "function", "function": tool.function.for_template()} for tool in tools]
    # Texts that templates write for each call.
    named = [
        text for message in messages for call in message.tool_calls or () for text in (call.id, call.function.name)
    ]
    texts = [*arguments, *named, *(text for document in body.documents or () for text in document.values())]
    num_characters = sum(len(json.dumps(function)) for function in functions) + sum(map(len, texts))
    return Chat(
        rendered,
        functions,
        body.documents,
        variables,
        is_continued,
        add_generation_prompt,
        num_characters,
    )


def _message(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    for name, value in (
        ("name", message.name),
        ("tool_call_id", message.tool_call_id),
        ("reasoning_content", reasoning),
    ):
        if value is not None:
            found[name] = value
    return found
