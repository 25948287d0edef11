"""A request and an answer that the model can confirm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Case:
    """One output.

    Attributes:
        prompt: token ids; a completion's text; or, if `is_chat`, the user's message.
        sampling: of SamplingParams, and `ignore_eos`.
        output: token ids or text.
        structure: kind and content, as in `tandem.router.text.structured_output`.
        is_whole: False: the client may have left before the end.
        finish_reason: "stop" or "length"; "": unknown.
    """

    prompt: Sequence[int] | str
    sampling: Mapping[str, Any]
    output: Sequence[int] | str
    structure: tuple[str, str] | None = None
    is_chat: bool = False
    is_whole: bool = True
    finish_reason: Literal["stop", "length", ""] = ""
