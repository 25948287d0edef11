import logging
from collections.abc import Collection, Mapping
from functools import cached_property

from tandem.router.text.output_parser import OutputParser
from tandem.router.text.reasoning import (
    CLOSING,
    OPENING,
    REASONING_STYLES,
    Beginning,
    ReasoningParser,
    ReasoningStyle,
)
from tandem.router.text.tokenizer import Tokenizer
from tandem.router.text.tool_parsers.base import ToolParser
from tandem.router.text.tool_parsers.table import TOOL_PARSERS

logger = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"


class OutputFormat:
    """The parsers of one model's outputs."""

    def __init__(self, tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> None:
        """
        Args:
            tool_parser, reasoning_parser: names; "auto": fitting the chat template; "none": no parser.
        """
        self._tokenizer = tokenizer
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser

    def find(self) -> None:
        """Loads the parsers. Raises ValueError or ImportError."""
        name, style = self.tool_parser_name, self.reasoning_style
        if name != NONE:
            TOOL_PARSERS.load(name)
        logger.info(
            "tool parser: %s; outputs %s",
            name,
            "may begin with reasoning" if style else "have no reasoning",
        )

    @cached_property
    def tool_parser_name(self) -> str:
        name = self._tool_parser
        return self._tokenizer.chat_format.tool_parser if name == AUTO else name

    @cached_property
    def reasoning_style(self) -> ReasoningStyle | None:
        name = self._reasoning_parser
        return REASONING_STYLES.get(self._tokenizer.chat_format.reasoning_parser if name == AUTO else name)

    @cached_property
    def closing_id(self) -> int | None:
        """Id of the token that ends reasoning, if it is a single token."""
        return self._tokenizer.token_id(CLOSING)

    def special_ids(self, marks: Collection[str]) -> Mapping[int, str]:
        """Returns the special tokens among `marks`. Grammars cannot write them."""
        return self._tokenizer.special_ids(marks)

    def marks(self, tool_parser: str, beginning: Beginning) -> Mapping[int, str]:
        marks = [] if beginning is Beginning.ANSWER else [OPENING, CLOSING]
        if tool_parser != NONE:
            marks += TOOL_PARSERS.load(tool_parser).marks
        return self._tokenizer.special_ids(marks)

    def parser(
        self,
        tool_parser: str,
        beginning: Beginning,
        names: Collection[str],
        *,
        max_calls: int | None,
        calls_only: bool,
        num_seen: int,
    ) -> OutputParser:
        reasoning = None if beginning is Beginning.ANSWER else ReasoningParser(beginning)
        tools: ToolParser | None = None if tool_parser == NONE else TOOL_PARSERS.load(tool_parser)(names)
        return OutputParser(reasoning, tools, max_calls=max_calls, calls_only=calls_only, num_seen=num_seen)
