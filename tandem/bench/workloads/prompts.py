"""Prompts of given lengths, as token ids or as text."""

import random
from array import array
from typing import Literal

from tandem.bench.workloads.base import PromptPart, Role

PromptAs = Literal["ids", "text"]
PROMPT_AS: tuple[PromptAs, ...] = ("ids", "text")
# Common vocabularies have control tokens first or last.
FIRST_TOKEN_ID = 256
DEFAULT_VOCAB_SIZE = 8000
# With a leading space, each is one token in most tokenizers.
_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will no more if out so up said what its about than
into them can only other time new some could these two may first then do any like my now over such our man me even
most made after also did many off before must well back through years where much your way down should because long
each just state those people too world very good make day still work own life here between under last might never
house part high right great old year come since against go few use place water during without small around head war
away number hand night point young less better light city next white room country land end found home system kind
words body name line given order best means turn free open family show form power early group large morning door
money road book table river summer street music letter paper garden window winter
"""


class PromptMaker:
    """The same seed and key make the same part, in any order of calls."""

    def __init__(self, seed: int, prompt_as: PromptAs, vocab_size: int = DEFAULT_VOCAB_SIZE) -> None:
        """Args: vocab_size: token ids are drawn from FIRST_TOKEN_ID up to this."""
        self._seed = seed
        self._prompt_as = prompt_as
        self._words = _WORDS.split()
        self._token_ids = range(FIRST_TOKEN_ID, vocab_size)

    def part(self, role: Role, num_tokens: int, key: str) -> PromptPart:
        draw = random.Random(f"{self._seed}/{key}")
        if self._prompt_as == "ids":
            return PromptPart(role, num_tokens, array("I", draw.choices(self._token_ids, k=num_tokens)))
        return PromptPart(role, num_tokens, text=" ".join(draw.choices(self._words, k=num_tokens)))
