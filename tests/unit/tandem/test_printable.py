"""Text of others cannot control a terminal."""

import pytest

from tandem.printable import printable


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("over\rwritten\x08", r"over\x0dwritten\x08"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
    ],
)
def test_control_sequences_become_visible(hostile: str, shown: str) -> None:
    assert printable(hostile) == shown


def test_text_stays_as_it_is() -> None:
    text = "a\tline\nand naïve 東京 👩\u200d👩 \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
    assert printable(text) == text
