"""argparse, with a suggestion for what was probably meant."""

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

_UNKNOWN_FLAGS = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)
_INVALID_CHOICE = re.compile(r"(?:argument [^:]+: )?invalid choice: '([^']*)' \(choose from (.*)\)", re.DOTALL)


class SuggestingParser(argparse.ArgumentParser):
    """Says which flag, command or value is nearest to one that does not exist. Parsers of its subcommands do too."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown and not any(isinstance(action, argparse._SubParsersAction) for action in self._actions):
            # A subcommand would leave this to the parser above it, which does not know the subcommand's flags.
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        super().error(message + self._suggestion(message))

    def _suggestion(self, message: str) -> str:
        if unknown := _UNKNOWN_FLAGS.fullmatch(message):
            typed, known = unknown.group(1).split()[0].partition("=")[0], list(self._option_string_actions)
        elif invalid := _INVALID_CHOICE.fullmatch(message):
            typed, known = invalid.group(1), re.findall(r"[^\s,']+", invalid.group(2))
        else:
            return ""
        nearest = difflib.get_close_matches(typed, known, n=1)
        return f" (did you mean {nearest[0]}?)" if nearest else ""
