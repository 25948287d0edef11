"""Calls of fake actors, in place of Ray's."""

from typing import Any


class Ref:
    """Attributes: value: result of the call; None: not ended."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Ray:
    def wait(self, refs: list[Ref], **_: Any) -> tuple[list[Ref], list[Ref]]:
        return [r for r in refs if r.value is not None], [r for r in refs if r.value is None]

    def get(self, ref: Ref) -> Any:
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value
