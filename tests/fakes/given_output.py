"""An output with given parts, for tests of the APIs' formats."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from tandem.router.text.output_parts import Part
from tandem.sampling_params import SamplingParams


@dataclass
class GivenOutput:
    finish_reason: str = "stop"
    stop_string: str | None = None
    has_calls: bool = False
    num_prompt_tokens: int = 10
    num_cached_tokens: int = 4
    cached_details: dict[str, int] = field(default_factory=lambda: {"cached_tokens": 4})
    num_newly_cached_tokens: int = 3
    num_output_tokens: int = 5
    num_reasoning_tokens: int = 1
    sampling: Any = field(default_factory=lambda: SamplingParams(5))

    def take_logprobs(self, part: Part) -> list[dict[str, Any]]:
        return [{"token": part.text}]

    def digest_of(self, call: int) -> str:
        return f"digest-{call}"


@st.composite
def outputs(draw: st.DrawFn) -> list[Part]:
    """Draw parts in a possible order: reasoning first, then content and calls, each in pieces."""
    texts = st.lists(st.text('ab{}"', min_size=1, max_size=3), max_size=3)
    parts = [Part("reasoning", text, 0) for text in draw(texts)]
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["content", "call"]), max_size=4)):
        if kind == "call":
            parts.append(Part("call", draw(st.sampled_from(["f", "g"])), 0, num_calls))
            parts += [Part("arguments", text, 0, num_calls) for text in draw(texts)]
            num_calls += 1
        else:
            parts += [Part("content", text, 0) for text in draw(texts)]
    return parts
