"""A conversation as input of a chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chat:
    """
    Attributes:
        messages: messages with ``role`` and ``content``; assistant messages may have ``tool_calls`` with arguments as
            text, as in OpenAI's API; messages of role ``tool`` have ``tool_call_id``.
        variables: further template variables.
        is_continued: True if the output continues the last message.
        add_generation_prompt: True if the template writes the start of an answer.
        num_extra_characters: characters outside the messages.
    """

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    documents: Sequence[dict[str, str]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    is_continued: bool = False
    add_generation_prompt: bool = True
    num_extra_characters: int = 0

    @property
    def num_characters(self) -> int:
        """Approximate length of the rendered text."""
        return self.num_extra_characters + sum(
            1 + len(text) for message in self.messages for text in message.values() if isinstance(text, str)
        )
