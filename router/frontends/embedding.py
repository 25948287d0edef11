"""Inputs to embed, common to all frontends: several in one request, some of them in flight at a time."""

import asyncio
import sys
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from tandem.embedding import MAX_INPUTS, EmbeddingParams
from tandem.lifecycle import RECEIVED, TOKENIZED, now_ns
from tandem.router.adapters.names import ServedModel
from tandem.router.errors import InvalidRequestError, OverloadedError, mistakes_in
from tandem.router.frontends.base import Frontend, tokenizing
from tandem.router.frontends.generation import Generation
from tandem.router.frontends.sampling import check_vocabulary
from tandem.router.requests.request_spec import RequestSpec, TokenizedPrompt
from tandem.router.text.prompt_cut import PromptCut
from tandem.sampling_params import SamplingParams

# Inputs of one request in flight: enough for a worker's forward passes, and few beside a full queue.
MAX_AT_ONCE = 64
# Of all inputs of one request, unless the model's length is larger.
MAX_INPUT_TOKENS = 2**18

EmbedInput = str | Sequence[int]
# An embedding is no draw.
_SAMPLING = SamplingParams(max_tokens=1)


def num_at_once(frontend: Frontend, num_inputs: int) -> int:
    """Raises InvalidRequestError: no inputs, or too many."""
    if not num_inputs:
        raise InvalidRequestError("there is no input to embed", "input")
    if num_inputs > MAX_INPUTS:
        raise InvalidRequestError(f"{num_inputs} inputs; one request may have {MAX_INPUTS}", "input")
    config = frontend.config
    return min(num_inputs, MAX_AT_ONCE, config.max_requests_per_key or MAX_AT_ONCE, config.max_queued_requests)


def max_input_tokens(frontend: Frontend) -> int:
    return max(MAX_INPUT_TOKENS, frontend.config.max_model_len)


def embedding_params(frontend: Frontend, dimensions: int | None, *, is_normalized: bool) -> EmbeddingParams:
    """Raises InvalidRequestError."""
    if dimensions is None:
        return EmbeddingParams(is_normalized=is_normalized)
    with mistakes_in("dimensions"):
        frontend.embedding_dimensions.check(dimensions)
    return EmbeddingParams(dimensions, is_normalized)


def input_cut(frontend: Frontend, num_tokens: int | None, *, keeps_end: bool) -> PromptCut | None:
    """Raises InvalidRequestError."""
    with mistakes_in("truncate_prompt_tokens"):
        return frontend.inputs.cut(num_tokens, keeps_end=keeps_end)


async def tokenize_inputs(
    frontend: Frontend,
    inputs: Sequence[EmbedInput],
    namespace: str,
    cut: PromptCut | None,
    *,
    add_special_tokens: bool = True,
) -> list[TokenizedPrompt]:
    """Raises InvalidRequestError, OverloadedError."""
    limit = max_input_tokens(frontend)
    received = now_ns()
    prompts: list[TokenizedPrompt] = []
    num_tokens = 0
    for one in inputs:
        ids: Sequence[int]
        with mistakes_in("input"), tokenizing():
            if isinstance(one, str):
                ids = await frontend.inputs.encode(one, cut, add_special_tokens=add_special_tokens)
            else:
                # As for texts: a request may have thousands of inputs.
                await asyncio.sleep(0)
                ids = frontend.inputs.fitted(one, cut)
                if ids:
                    check_vocabulary(frontend.tokenizer, ids)
            if not ids:
                raise ValueError("an input is empty")
        num_tokens += len(ids)
        if num_tokens > limit:
            raise InvalidRequestError(f"more than {limit} tokens of input; one request may have {limit}", "input")
        identities = await frontend.prefix_identities(ids, namespace)
        moments = {RECEIVED: received, TOKENIZED: now_ns()}
        prompts.append(TokenizedPrompt(tuple(ids), moments, "", namespace, identities))
    return prompts


async def begin_embeddings(
    frontend: Frontend,
    prompts: Sequence[TokenizedPrompt],
    params: EmbeddingParams,
    *,
    key: str,
    request_id: str,
    model: ServedModel,
    priority: int = 0,
    session_id: str = "",
) -> list[Generation]:
    """Makes a Generation for each input, whose tracker gets the embedding. Raises InvalidRequestError."""
    generations: list[Generation] = []
    for prompt in prompts:
        if len(generations) % MAX_AT_ONCE == 0:
            await asyncio.sleep(0)
        spec = RequestSpec(
            prompt,
            _SAMPLING,
            key=key,
            client_request_id=request_id,
            session_id=session_id,
            priority=priority,
            embedding=params,
            model=model,
        )
        generations += frontend.begin(spec)
    return generations


async def embedded(
    frontend: Frontend, key: str, generations: Sequence[Generation], at_once: int
) -> AsyncGenerator[tuple[int, Generation]]:
    """Yields each generation that ended with an embedding, and its index. Closing it, or a failure of one, ends all.

    While the queue is full, or the key has no place left, fewer are in flight.

    Args:
        at_once: maximum in flight.

    Raises as Generation.__enter__ and next_piece.
    """
    waiting = deque(enumerate(generations))
    # Length one: a slow client slows the inputs.
    ended: asyncio.Queue[tuple[int, Generation] | Exception] = asyncio.Queue(1)
    num_taking_turns = min(at_once, len(generations))

    async def take_turns() -> None:
        nonlocal num_taking_turns
        try:
            while waiting:
                if num_taking_turns > 1 and not _has_room(frontend, key):
                    num_taking_turns -= 1
                    return
                index, generation = waiting.popleft()
                with generation:
                    while await generation.next_piece() is not None:
                        pass
                await ended.put((index, generation))
        except Exception as error:
            await ended.put(error)

    tasks = [asyncio.create_task(take_turns()) for _ in range(num_taking_turns)]
    try:
        for _ in generations:
            item = await ended.get()
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def floats(values: bytes) -> list[float]:
    """Args: values: float32, little-endian."""
    numbers = array("f", values)
    if sys.byteorder != "little":
        numbers.byteswap()
    return numbers.tolist()


def _has_room(frontend: Frontend, key: str) -> bool:
    try:
        frontend.router.check_capacity(1)
        with frontend.access.hold(key):
            return True
    except OverloadedError:
        return False
