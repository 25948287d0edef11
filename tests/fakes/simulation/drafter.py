"""Drafts of the simulation's tokens, of which half are right."""

from collections.abc import Sequence

from tandem.decode_worker.drafters.base import Drafter
from tests.fakes.engine import next_token
from tests.fakes.tokenizer import ByteTokenizer

PATH = f"{__name__}:HalfRight"


class HalfRight(Drafter):
    """Proposes one of the two tokens between which Samples chooses."""

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        known = list(token_ids)
        for _ in range(max_tokens):
            known.append(next_token(known) % ByteTokenizer.vocab_size)
        return known[len(token_ids) :]
