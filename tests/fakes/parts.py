from collections.abc import Iterable

from tandem.router.text.output_parts import Part


def joined(parts: Iterable[Part]) -> list[tuple[str, str]]:
    """Return (kind, text) pairs, with neighbors of one kind joined."""
    found: list[tuple[str, str]] = []
    for part in parts:
        if found and found[-1][0] == part.kind != "call":
            found[-1] = (part.kind, found[-1][1] + part.text)
        else:
            found.append((part.kind, part.text))
    return found
