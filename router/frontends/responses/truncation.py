"""`truncation: auto`: drops a conversation's oldest items until its prompt fits."""

from collections.abc import Awaitable, Callable, Sequence

from tandem.router.frontends.base import Frontend
from tandem.router.frontends.responses.schema import CallItem, CallOutputItem, Item, MessageItem
from tandem.router.text.prompt_encoder import MAX_MESSAGES

# Each try tokenizes the prompt: the choice is among this many cuts, which takes at most 9 tries.
MAX_CUTS = 256
# Tokens left for an answer without a limit of its own, unless the model's length is short.
ANSWER_TOKENS = 1024


def max_prompt_tokens(frontend: Frontend, max_output_tokens: int | None) -> int:
    length = frontend.config.max_model_len
    if workers := frontend.router.workers.max_request_tokens:
        length = min(length, workers)
    return length - (max_output_tokens or min(ANSWER_TOKENS, length // 4))


async def fitting(items: Sequence[Item], fits: Callable[[Sequence[Item]], Awaitable[bool]]) -> Sequence[Item]:
    """Returns the longest end of a conversation that fits; its shortest, if none does.

    Messages of role system and developer stay, and so does everything from the last user message on.
    """
    kept_from = max((place for place, item in enumerate(items) if _is_user(item)), default=0)
    droppable = [place for place in range(kept_from) if not _is_instruction(items[place])]
    # A chat has a limit of messages besides the model's length.
    at_least = min(len(droppable), max(0, len(items) - (MAX_MESSAGES - 1)))
    num_cuts = len(droppable) - at_least
    step = max(1, -(-num_cuts // MAX_CUTS))
    cuts = [*range(at_least, len(droppable), step), len(droppable)]
    if await fits(found := _without(items, droppable[: cuts[0]])):
        return found
    low, high = 1, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(_without(items, droppable[: cuts[middle]])):
            high = middle
        else:
            low = middle + 1
    return _without(items, droppable[: cuts[high]])


def _without(items: Sequence[Item], dropped: Sequence[int]) -> list[Item]:
    """Results without their call go too."""
    places = set(dropped)
    left = [item for place, item in enumerate(items) if place not in places]
    lost = {item.call_id for place in places if isinstance(item := items[place], CallItem)}
    return [item for item in left if not (isinstance(item, CallOutputItem) and item.call_id in lost)]


def _is_user(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role == "user"


def _is_instruction(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role in ("system", "developer")
