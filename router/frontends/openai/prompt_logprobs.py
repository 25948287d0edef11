"""A prompt's log probabilities as JSON, in vLLM's and OpenAI's forms.

There may be hundreds of thousands of numbers, so the loop runs between pieces of JSON.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.router.frontends.openai.request import WantedLogprobs
from tandem.router.frontends.openai.streaming import to_json
from tandem.router.requests.prompt_logprobs import PromptLogprobs
from tandem.router.requests.request_spec import TokenizedPrompt
from tandem.router.text.detokenizer import IncrementalDetokenizer
from tandem.router.text.tokenizer import Tokenizer
from tandem.sampling_params import ALL_LOGPROBS, TokenLogprobs

# About a millisecond.
PIECE_ENTRIES = 512
ECHO_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass(slots=True)
class EchoTexts:
    """A part of OpenAI's lists: JSON of one or more of their items at a time."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[str] = field(default_factory=list)
    top_logprobs: list[str] = field(default_factory=list)
    text_offset: list[str] = field(default_factory=list)

    def add(self, lists: Mapping[str, list[Any]]) -> None:
        for name in ECHO_LISTS:
            getattr(self, name).append(to_json(lists[name])[1:-1])

    def before(self, output: "EchoTexts") -> str:
        lists = {name: [*getattr(self, name), *getattr(output, name)] for name in ECHO_LISTS}
        return object_text({}, {name: f"[{','.join(items)}]" for name, items in lists.items()})


class PromptTexts:
    """One prompt's log probabilities as JSON, made once for all outputs."""

    def __init__(
        self, tokenizer: Tokenizer, name: Callable[[int], str], prompt: TokenizedPrompt, wanted: WantedLogprobs
    ) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._token_ids = prompt.token_ids
        self._wanted = wanted
        self._listed: str | None = None
        self._echoed: EchoTexts | None = None

    async def listed(self, logprobs: PromptLogprobs) -> str:
        """Returns vLLM's form: entries by token id, null for the first token."""
        if self._listed is None:
            num_top = logprobs.num_top if self._wanted.listed == ALL_LOGPROBS else self._wanted.listed or 0
            pieces = ["null"]
            async for start, end in self._pieces(num_top):
                if num_top > PIECE_ENTRIES:
                    pieces.append(await self._long_entry(logprobs, start, num_top))
                    continue
                entries = [self._listed_entry(logprobs, position, num_top) for position in range(start, end)]
                pieces.append(to_json(entries)[1:-1])
            self._listed = f"[{','.join(pieces)}]"
        return self._listed

    async def echoed(self, logprobs: PromptLogprobs) -> EchoTexts:
        """Returns OpenAI's form, null for the first token."""
        if self._echoed is None:
            num_top = self._wanted.echoed or 0
            first = self._token_ids[0]
            detokenizer = IncrementalDetokenizer(self._tokenizer)
            num_characters = len(detokenizer.decode_next((first,)))
            texts = EchoTexts([to_json(self._name(first))], ["null"], ["null"], ["0"])
            async for start, end in self._pieces(num_top):
                token_ids = self._token_ids[start:end]
                tokens = [self._name(token_id) for token_id in token_ids]
                values = logprobs.logprobs[start - 1 : end - 1].tolist()
                offsets = []
                for token_id in token_ids:
                    offsets.append(num_characters)
                    num_characters += len(detokenizer.decode_next((token_id,)))
                top = [
                    {token: value} | {self._name(t.token_id): t.logprob for t in logprobs.top(position)[:num_top]}
                    for position, token, value in zip(range(start, end), tokens, values, strict=True)
                ]
                texts.add(dict(zip(ECHO_LISTS, (tokens, values, top, offsets), strict=True)))
            self._echoed = texts
        return self._echoed

    async def _pieces(self, num_top: int) -> AsyncIterator[tuple[int, int]]:
        step = max(1, PIECE_ENTRIES // (num_top + 1))
        for start in range(1, len(self._token_ids), step):
            yield start, min(start + step, len(self._token_ids))
            await asyncio.sleep(0)

    def _listed_entry(self, logprobs: PromptLogprobs, position: int, num_top: int) -> dict[int, dict[str, Any]]:
        token_id = self._token_ids[position]
        own = self._entry(token_id, logprobs.logprobs[position - 1], logprobs.ranks[position - 1])
        top = enumerate(logprobs.top(position)[:num_top], 1)
        others = {t.token_id: self._entry(t.token_id, t.logprob, rank) for rank, t in top}
        return {token_id: own} | {other: entry for other, entry in others.items() if other != token_id}

    async def _long_entry(self, logprobs: PromptLogprobs, position: int, num_top: int) -> str:
        token_id = self._token_ids[position]
        own = self._entry(token_id, logprobs.logprobs[position - 1], logprobs.ranks[position - 1])
        pieces = [to_json({token_id: own})[1:-1]]
        for begin in range(0, num_top, PIECE_ENTRIES):
            top = enumerate(logprobs.top(position, begin, begin + PIECE_ENTRIES), begin + 1)
            entries = {
                t.token_id: self._entry(t.token_id, t.logprob, rank) for rank, t in top if t.token_id != token_id
            }
            pieces.append(to_json(entries)[1:-1])
            await asyncio.sleep(0)
        return "{" + ",".join(filter(None, pieces)) + "}"

    def _entry(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self._name(token_id)}


def slices_of(logprobs: Sequence[TokenLogprobs]) -> Iterator[slice]:
    """Yields slices of about PIECE_ENTRIES entries, for a list whose tokens have equally many."""
    step = max(1, PIECE_ENTRIES // (len(logprobs[0].top) + 1)) if logprobs else 1
    for start in range(0, len(logprobs), step):
        yield slice(start, start + step)


def object_text(fields: Mapping[str, Any], made: Mapping[str, str]) -> str:
    """Args: made: JSON by name, which replaces the values of `fields`."""
    values = {name: made.get(name) or to_json(value) for name, value in fields.items()} | dict(made)
    return "{" + ",".join(f"{to_json(name)}:{value}" for name, value in values.items()) + "}"
