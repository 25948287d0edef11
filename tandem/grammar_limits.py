"""Limits of grammars, the same for checking and for generation."""

from llguidance import LLParserLimits

# Bound a mask, for which a step waits, and the token after it, whose items the mask has parsed. Most take hundredths of
# a millisecond, and the defaults allow 300 ms. Items that are found again do not count, so the masks of ambiguous
# grammars grow up to 60 ms: MAX_MASK_CPU_S ends those outputs.
LIMITS = LLParserLimits(max_items_in_row=2_000, step_lexer_fuel=40_000, step_max_items=5_000, max_lexer_states=20_000)
# An output ends at its second mask in a row that takes longer, in seconds of a processor. Others take up to 8 ms.
MAX_MASK_CPU_S = 0.02
TOO_COSTLY = f"a token takes more than {1e3 * MAX_MASK_CPU_S:g} ms of a processor; make the grammar less ambiguous"
# For the masks of all outputs in a step: beyond it, the costliest outputs end.
MAX_STEP_CPU_S = 0.05
TOO_COSTLY_TOGETHER = (
    f"the grammars of the outputs in progress take more than {1e3 * MAX_STEP_CPU_S:g} ms of a processor for each "
    "token, and this one is among the costliest; make it simpler, or ask for fewer outputs at once"
)
# llguidance's errors quote the grammar and the parser's state.
MAX_ERROR_LENGTH = 300


def one_line(error: str) -> str:
    """Shorten an error of llguidance to one line for a client."""
    text = " ".join(error.partition("<state>")[0].split())
    return text if len(text) <= MAX_ERROR_LENGTH else f"{text[: MAX_ERROR_LENGTH - 1]}…"
