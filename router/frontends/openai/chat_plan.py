"""What a chat's body asks for, put together: what the template is given, what the output is bound to, and how it is
read."""

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

from tandem.router.errors import InvalidRequestError, OverloadedError
from tandem.router.frontends.base import Frontend, PromptInput, TokenizedPrompt
from tandem.router.frontends.openai.body import MAX_INLINE_BYTES, MAX_OTHER_ITEMS, PARSE_TIMEOUT_S, check_structure
from tandem.router.frontends.openai.request import structured_output as wanted_output
from tandem.router.frontends.openai.tools_schema import ChatRequest, Message, NamedTool, TemplateFields, Tool
from tandem.router.text import structured_output
from tandem.router.text.chat import Chat
from tandem.router.text.output_format import NONE, OutputFormat
from tandem.router.text.output_parser import OutputParser
from tandem.router.text.reasoning import CLOSING, OPENING, Beginning
from tandem.router.text.structured_output import StructuredOutput
from tandem.router.text.tool_grammar import CALL_STYLES

PARAM_TOOLS, PARAM_CHOICE = "tools", "tool_choice"


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """
    Attributes:
        prompt: for `Frontend.tokenize`.
        tool_parser: what reads calls from the output; "none": it has none.
        names: of the functions that may be called.
        wanted: what the output, or what follows its reasoning, is to keep to.
        is_named: the one function to be called is named.
        max_calls: in one output; None: any number.
        calls_only: the output is bound to calls.
        continued: the text of the message that the output goes on with.
    """

    prompt: PromptInput
    tool_parser: str
    names: Collection[str]
    wanted: StructuredOutput | None
    is_named: bool
    max_calls: int | None
    calls_only: bool
    continued: str


@dataclass(frozen=True, slots=True)
class Reading:
    """How the outputs of one request are read. Attributes: marks: special tokens that their text has, by id."""

    plan: ChatPlan
    beginning: Beginning
    marks: Mapping[int, str]
    format: OutputFormat

    def parser(self, num_seen: int) -> OutputParser:
        """For one output. Args: num_seen: characters of its text whose parts the client has."""
        plan = self.plan
        return self.format.parser(
            plan.tool_parser,
            self.beginning,
            plan.names,
            max_calls=plan.max_calls,
            calls_only=plan.calls_only,
            num_seen=num_seen,
        )


async def check_arguments(messages: Sequence[Message], threads: Executor) -> None:
    """Of past calls, before they are read. They are JSON within JSON, and what a body may hold is bounded there too.

    Args:
        threads: to look at long ones in, which takes some hundredths of a second.

    Raises:
        InvalidRequestError: they hold too much.
        OverloadedError: too many others are looked at.
    """
    arguments = _arguments(messages)
    if sum(map(len, arguments)) <= MAX_INLINE_BYTES:
        return
    try:
        async with asyncio.timeout(PARSE_TIMEOUT_S):
            await asyncio.get_running_loop().run_in_executor(threads, _check_structure, arguments)
    except HTTPException as error:
        raise InvalidRequestError(f"the arguments of past calls: {error.detail}", "messages") from error
    except TimeoutError as error:
        raise OverloadedError("too many large bodies wait to be read; try again later") from error


def _check_structure(arguments: Sequence[str]) -> None:
    check_structure(",".join(arguments).encode(), MAX_OTHER_ITEMS)


def _arguments(messages: Sequence[Message]) -> list[str]:
    return [call.function.arguments for message in messages for call in message.tool_calls or ()]


def plan_chat(frontend: Frontend, body: ChatRequest) -> ChatPlan:
    """Raises InvalidRequestError."""
    tools = body.tools or []
    choice = body.tool_choice or "auto"
    if not tools and (choice == "required" or isinstance(choice, NamedTool)):
        raise InvalidRequestError("tool_choice asks for a call, and there are no tools", PARAM_CHOICE)
    wanted = wanted_output(body)
    may_be_several = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    parser = NONE
    if tools and choice != "none":
        parser = frontend.output_format.tool_parser_name
        if choice == "auto" and parser == NONE:
            raise InvalidRequestError(
                "this model's own calls are not read here (--tool-parser): use a tool_choice that asks for one",
                PARAM_TOOLS,
            )
        if choice != "auto" and wanted is not None:
            raise InvalidRequestError(
                f"{wanted.param} cannot be had with a tool_choice that asks for a call", wanted.param
            )
        if choice != "auto" or wanted is not None:
            parser = _bound_parser(frontend.output_format)
            called = _called(tools, choice)
            functions = [(tool.function.name, json.dumps(tool.function.schema_of_arguments)) for tool in called]
            bound = structured_output.tool_calls(parser, functions, may_be_several=may_be_several, param=PARAM_TOOLS)
            wanted = bound if wanted is None else structured_output.either(bound, wanted)
    return ChatPlan(
        prompt=chat_prompt(frontend, body.messages, body, [] if choice == "none" else tools),
        tool_parser=parser,
        names=frozenset(tool.function.name for tool in tools),
        wanted=wanted,
        is_named=isinstance(choice, NamedTool),
        max_calls=None if may_be_several else 1,
        calls_only=bool(tools) and choice not in ("none", "auto"),
        continued=body.messages[-1].text if body.continue_final_message else "",
    )


def read_from(frontend: Frontend, plan: ChatPlan, prompt: TokenizedPrompt) -> Reading | None:
    """How outputs of this prompt are read; None: they are content alone."""
    style = frontend.output_format.reasoning_style
    if style is None:
        beginning = Beginning.ANSWER
    elif plan.continued:
        beginning = style.beginning_within(plan.continued)
    else:
        beginning = style.beginning(prompt.ending)
    if plan.tool_parser == NONE and beginning is Beginning.ANSWER:
        return None
    marks = frontend.output_format.marks(plan.tool_parser, beginning)
    return Reading(plan, beginning, marks, frontend.output_format)


def bound_output(frontend: Frontend, plan: ChatPlan, reading: Reading | None) -> StructuredOutput | None:
    """What the whole output is to keep to. Raises InvalidRequestError."""
    if plan.wanted is None or reading is None or reading.beginning is Beginning.ANSWER:
        return plan.wanted
    if frontend.output_format.special_ids((OPENING, CLOSING)):
        raise InvalidRequestError(
            f"{plan.wanted.param} cannot be had behind this model's reasoning, which special tokens end: turn its "
            "reasoning off, if its chat template has a way to do so",
            plan.wanted.param,
        )
    return structured_output.after_reasoning(plan.wanted, is_open=reading.beginning is Beginning.OPEN)


def _bound_parser(output_format: OutputFormat) -> str:
    """Which parser reads calls that a grammar makes: the model's own, if a grammar can write what that reads."""
    name = output_format.tool_parser_name
    style = CALL_STYLES.get(name)
    if style is None or output_format.special_ids((style.opening.strip(), style.closing.strip())):
        return "json"
    return name


def _called(tools: list[Tool], choice: Any) -> list[Tool]:
    if not isinstance(choice, NamedTool):
        return tools
    called = [tool for tool in tools if tool.function.name == choice.function.name]
    if not called:
        raise InvalidRequestError(f"there is no tool {choice.function.name!r} among the tools", PARAM_CHOICE)
    return called


def chat_prompt(
    frontend: Frontend, messages: Sequence[Message], body: TemplateFields, tools: Sequence[Tool]
) -> Chat | list[dict[str, Any]]:
    """What a chat is rendered from.

    Args:
        tools: those that the model is shown.

    Raises:
        InvalidRequestError: what is asked for excludes each other, or the template does not know it.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other: send one of them",
            "continue_final_message",
        )
    rendered = [_message(message) for message in messages]
    is_continued = bool(body.continue_final_message)
    add_generation_prompt = body.add_generation_prompt is not False and not is_continued
    variables = body.chat_template_kwargs or {}
    arguments = _arguments(messages)
    if not (tools or arguments or body.documents or variables or is_continued) and add_generation_prompt:
        return rendered
    if body.documents and not frontend.tokenizer.knows_documents:
        raise InvalidRequestError("the model's chat template does not know documents", "documents")
    functions = [{"type": "function", "function": tool.function.for_template()} for tool in tools]
    # A template writes these of each call, and something around it.
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
    for name in ("tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    return found
