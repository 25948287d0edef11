"""Structured output in a body, in OpenAI's and vLLM's forms."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.router.frontends.openai import unserved as others
from tandem.router.frontends.openai.lenient import LenientBody

Choices = Annotated[list[str], Field(fail_fast=True)]


class JsonSchema(LenientBody):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(LenientBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(LenientBody):
    """vLLM's form; exactly one is given."""

    unserved = others.STRUCTURED_OUTPUTS
    hints = others.STRUCTURED_OUTPUTS_HINTS

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
