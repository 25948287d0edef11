"""A drafter whose drafts a test decides."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from tandem.decode_worker import drafting
from tandem.decode_worker.drafters.base import Drafter

PATH = f"{__name__}:ScriptedDrafter"


class ScriptedDrafter(Drafter):
    """Attributes: script: gets the tokens so far and the most drafts."""

    script: Callable[[Sequence[int], int], Sequence[int]]

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> Sequence[int]:
        return ScriptedDrafter.script(token_ids, max_tokens)


@contextmanager
def scripted(script: Callable[[Sequence[int], int], Sequence[int]], max_drafts: int) -> Iterator[str]:
    """Yields the drafter's path, for `DecodeConfig.speculation`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedDrafter, "script", staticmethod(script), raising=False)
        patch.setattr(drafting, "MAX_DRAFTS", max_drafts)
        yield PATH
