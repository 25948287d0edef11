"""Limits of grammars, the same for checking and for generation."""

from llguidance import LLParserLimits

# Bound a mask, for which a step waits, and with it the token after it, whose items the mask has already parsed. Most
# take hundredths of a millisecond. Ambiguous grammars take up to 60 ms, because llguidance does not count items that it
# finds again. The defaults allow 300 ms.
LIMITS = LLParserLimits(max_items_in_row=2_000, step_lexer_fuel=40_000, step_max_items=5_000, max_lexer_states=20_000)
# llguidance's errors quote the grammar and the parser's state.
MAX_ERROR_LENGTH = 300


def one_line(error: str) -> str:
    """Shorten an error of llguidance to one line for a client."""
    text = " ".join(error.partition("<state>")[0].split())
    return text if len(text) <= MAX_ERROR_LENGTH else f"{text[: MAX_ERROR_LENGTH - 1]}…"
