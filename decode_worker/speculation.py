"""The values of --speculation. Imports no torch: the command line reads this too."""

from typing import NamedTuple

from tandem.decode_worker.drafters.table import DRAFTERS

NO_SPECULATION = "off"
# Lookup, as far as it is expected to gain time.
AUTO_SPECULATION = "auto"
LOOKUP = "ngram"


class Speculation(NamedTuple):
    """
    Attributes:
        source: a name in DRAFTERS, or a drafter's import path; "" for none.
        has_policy: only drafts that are expected to gain time are computed.
    """

    source: str
    has_policy: bool = False

    @property
    def is_lookup(self) -> bool:
        return self.source == LOOKUP


def parse_speculation(text: str) -> Speculation:
    """Raises ValueError; the message names the field and its valid values."""
    DRAFTERS.check("speculation", text, besides=(NO_SPECULATION, AUTO_SPECULATION))
    if text == NO_SPECULATION:
        return Speculation("")
    if text == AUTO_SPECULATION:
        return Speculation(LOOKUP, has_policy=True)
    return Speculation(text)
