"""A conversation as a chat template takes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chat:
    """What a prompt is rendered from.

    Attributes:
        messages: each with ``role`` and ``content``; of the assistant's some with ``tool_calls``, whose arguments are
            text, as OpenAI has it; those of role ``tool`` with ``tool_call_id``.
        tools: each with ``type`` and ``function``.
        documents: None: there are none.
        variables: more that the template may name.
        is_continued: the last message is to be gone on with; otherwise the prompt ends where an answer begins.
        add_generation_prompt: whether that beginning is written.
        num_extra_characters: of all that is no text of a message.
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
        """About as many as a template writes."""
        return self.num_extra_characters + sum(
            1 + len(text) for message in self.messages for text in message.values() if isinstance(text, str)
        )
