"""How much a grammar may take: the same where it is looked at and where it is followed, so that what the one takes the
other can do."""

from llguidance import LLParserLimits

# A mask takes some hundredths of a millisecond; with these limits none takes more than about four, for they are what a
# step is computed with. llguidance's own let one take 300.
LIMITS = LLParserLimits(max_items_in_row=2_000, step_lexer_fuel=40_000, step_max_items=5_000, max_lexer_states=20_000)
# Errors quote the grammar and the parser's state, tens of thousands of characters.
MAX_ERROR_LENGTH = 300


def one_line(error: str) -> str:
    """What a client is told of an error of llguidance."""
    text = " ".join(error.partition("<state>")[0].split())
    return text if len(text) <= MAX_ERROR_LENGTH else f"{text[: MAX_ERROR_LENGTH - 1]}…"
