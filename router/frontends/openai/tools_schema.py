"""Tools, reasoning and template fields of a chat's body, all bounded: they are rendered or compiled."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from tandem.router.frontends.openai.lenient import LenientBody, refusal_of
from tandem.router.frontends.openai.schema import ChatCompletionRequest, ChatMessage
from tandem.router.text.chat_template import RESERVED
from tandem.router.text.prompt_encoder import MAX_MESSAGES

# OpenAI's own limits.
MAX_TOOLS = 128
FUNCTION_NAME = r"^[A-Za-z0-9_-]{1,64}$"
MAX_TOOLS_CHARACTERS = 2**18
MAX_VARIABLES_CHARACTERS = 2**14
MAX_DEPTH = 32
MAX_VARIABLES = 32
MAX_DOCUMENTS = 256
MAX_ID = 256
MAX_NAME = 64
_FAIL_FAST = Field(fail_fast=True)


def check_bounded(value: Any, max_characters: int, max_depth: int = MAX_DEPTH) -> int:
    """Counts the characters of a value's parts. Raises ValueError above a limit."""
    num_characters = 0
    level = [value]
    for _ in range(max_depth + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, int):
                # Estimates the digits: printing them would take long.
                num_characters += 2 + item.bit_length() // 4
            else:
                num_characters += len(item) if isinstance(item, str) else 2
            if isinstance(item, dict):
                num_characters += sum(map(len, item))
                below += item.values()
            elif isinstance(item, list):
                below += item
            if num_characters > max_characters:
                raise ValueError(f"at most {max_characters} characters are taken")
        if not below:
            return num_characters
        level = below
    raise ValueError(f"nested more than {max_depth} deep")


class FunctionDefinition(LenientBody):
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _not_deep(cls, value: Any) -> Any:
        check_bounded(value, MAX_TOOLS_CHARACTERS)
        return value

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        # As with OpenAI, a function without parameters takes no arguments.
        return self.parameters or {"type": "object", "properties": {}}

    def for_template(self) -> dict[str, Any]:
        described = {} if self.description is None else {"description": self.description}
        return {"name": self.name, **described, "parameters": self.schema_of_arguments}


class Tool(LenientBody):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(LenientBody):
    name: str


class NamedTool(LenientBody):
    type: Literal["function"]
    function: FunctionName


def _choice_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "#text"
    if isinstance(value, dict):
        return "#allowed" if value.get("type") == "allowed_tools" else "#named"
    return None


class AllowedTools(LenientBody):
    """Not served."""

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, value: Any) -> Any:
        raise ValueError("allowed_tools is not supported by this server: send those that are allowed as tools")


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("#text")]
    | Annotated[NamedTool, Tag("#named")]
    | Annotated[AllowedTools, Tag("#allowed")],
    Discriminator(
        _choice_kind,
        custom_error_type="tool_choice_type",
        custom_error_message="Input should be 'none', 'auto', 'required', or a function: "
        '{"type": "function", "function": {"name": …}}',
    ),
]


class CalledFunction(BaseModel):
    # There may be thousands, so no validator runs in Python.
    model_config = ConfigDict(extra="ignore", strict=True)

    name: str = Field(min_length=1, max_length=MAX_ID)
    arguments: str


class PastCall(BaseModel):
    """A call made by an assistant."""

    model_config = ConfigDict(extra="ignore", strict=True)

    id: str = Field(max_length=MAX_ID)
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(ChatMessage):
    tool_calls: Annotated[list[PastCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = Field(None, max_length=MAX_ID)
    reasoning_content: str | None = None
    # vLLM's name of reasoning_content.
    reasoning: str | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise refusal_of("tool_calls", f"a message of role {self.role} has none")
        if self.role == "tool" and self.tool_call_id is None:
            raise refusal_of("tool_call_id", "a message of role tool needs the id of the call that it answers")
        return self


class TemplateFields(LenientBody):
    """Input of a chat template besides the messages."""

    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Annotated[list[dict[str, str]], Field(fail_fast=True, max_length=MAX_DOCUMENTS)] | None = None
    # For templates that know it.
    reasoning_effort: Annotated[str, Field(max_length=MAX_NAME)] | None = None

    @field_validator("tools")
    @classmethod
    def _bounded(cls, tools: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in tools or []]
        for place, name in enumerate(names):
            if name in names[:place]:
                raise ValueError(f"the function {name!r} is there twice")
        # Schemas are nested within lists and objects here.
        check_bounded([tool.function.for_template() for tool in tools or []], MAX_TOOLS_CHARACTERS, MAX_DEPTH + 4)
        return tools

    @field_validator("chat_template_kwargs")
    @classmethod
    def _variables(cls, variables: dict[str, Any] | None) -> dict[str, Any] | None:
        if variables is None:
            return None
        for name in variables:
            if not name.isidentifier() or len(name) > MAX_NAME:
                raise ValueError(f"names have at most {MAX_NAME} letters, digits and underscores")
            if name in RESERVED or name.endswith("_token"):
                raise ValueError(f"{name} cannot be set here")
        check_bounded(variables, MAX_VARIABLES_CHARACTERS)
        return variables


class ChatRequest(TemplateFields, ChatCompletionRequest):
    """A chat's body."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)  # type: ignore[assignment]
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
