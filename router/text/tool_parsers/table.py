"""Tool parsers by configuration name (`tool_parser`)."""

from typing import TYPE_CHECKING

from tandem.choices import Choices

if TYPE_CHECKING:
    from tandem.router.text.tool_parsers.base import ToolParser

TOOL_PARSERS: "Choices[ToolParser]" = Choices(
    "tandem.router.text.tool_parsers.base:ToolParser",
    {
        "hermes": "tandem.router.text.tool_parsers.hermes:HermesParser",
        "llama3_json": "tandem.router.text.tool_parsers.bare_json:Llama3Parser",
        "mistral": "tandem.router.text.tool_parsers.mistral:MistralParser",
        "json": "tandem.router.text.tool_parsers.bare_json:JsonParser",
    },
)
