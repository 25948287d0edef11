"""The values of --speculation. Imports no torch: the command line reads this too."""

from collections.abc import Mapping
from typing import NamedTuple

from tandem.decode_worker.drafters.table import DRAFTERS

NO_SPECULATION = "off"
# Lookup, as far as it is expected to gain time.
AUTO_SPECULATION = "auto"
LOOKUP = "ngram"
# Drafts that the engine computes, with the name of their argument, as in draft:MODEL.
MODEL_SOURCES: Mapping[str, str] = {"draft": "MODEL", "eagle": "DIR", "mtp": ""}


class Speculation(NamedTuple):
    """
    Attributes:
        source: a name in DRAFTERS or MODEL_SOURCES, or a drafter's import path; "" for none.
        argument: of a source of MODEL_SOURCES that has one: the model or the directory.
        has_policy: only drafts that are expected to gain time are computed.
    """

    source: str
    has_policy: bool = False
    argument: str = ""

    @property
    def is_lookup(self) -> bool:
        return self.source == LOOKUP

    @property
    def is_by_model(self) -> bool:
        return self.source in MODEL_SOURCES


def model_sources() -> tuple[str, ...]:
    """Returns MODEL_SOURCES as users write them."""
    return tuple(f"{source}:{argument}" if argument else source for source, argument in MODEL_SOURCES.items())


def parse_speculation(text: str) -> Speculation:
    """Raises ValueError; the message names the field and its valid values."""
    source, separator, argument = text.partition(":")
    if (wanted := MODEL_SOURCES.get(source)) is not None:
        if bool(wanted) != bool(argument) or bool(separator) != bool(argument):
            raise ValueError(f"`speculation` must be one of {', '.join(model_sources())}, not {text!r}")
        return Speculation(source, argument=argument)
    DRAFTERS.check("speculation", text, besides=(NO_SPECULATION, AUTO_SPECULATION, *model_sources()))
    if text == NO_SPECULATION:
        return Speculation("")
    if text == AUTO_SPECULATION:
        return Speculation(LOOKUP, has_policy=True)
    return Speculation(text)
