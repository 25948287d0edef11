"""Makes text of others safe to write to a terminal."""

# C0 without tab and newline, DEL, C1, and characters that reorder or hide text (UAX #9; zero-width, without joiners).
_HIDDEN = (
    *(code for code in range(0x20) if chr(code) not in "\t\n"),
    *range(0x7F, 0xA0),
    *(0x200B, 0x200E, 0x200F, 0x061C, 0x2060, 0xFEFF),
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
)
_VISIBLE = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _HIDDEN}


def printable(text: str) -> str:
    r"""Replace control characters other than tab and newline with escapes such as \x1b.

    A terminal would obey them: retitle its window, answer into standard input, overwrite lines.
    """
    return text.translate(_VISIBLE)
