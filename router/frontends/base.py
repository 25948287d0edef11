"""What every frontend does with a request: check it, tokenize it, serve it, and say how it ended.

A frontend translates between its wire and what is here, and has one table from the errors of tandem.router.errors to
the
codes of its own protocol.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.lifecycle import RECEIVED, TOKENIZED, now_ns
from tandem.router.config import RouterConfig
from tandem.router.errors import InvalidRequestError, OverloadedError, UnknownModelError, mistakes_in
from tandem.router.frontends.access import Access, key_digest
from tandem.router.frontends.cache_namespaces import CacheNamespaces
from tandem.router.frontends.generation import Generation, refusals_counted
from tandem.router.frontends.long_prompts import prefix_identities_in_turns
from tandem.router.frontends.sampling import SEED_BITS, SamplingOptions, check_vocabulary, sampling_params
from tandem.router.requests.trace_context import current_trace_context
from tandem.router.requests.tracker import RequestTracker
from tandem.router.resumption import PARAM as RESUME_PARAM
from tandem.router.resumption import KeptStream, ResumeState, Resumption, Sealer, prompt_digest
from tandem.router.router import Router
from tandem.router.text.chat import Chat
from tandem.router.text.generation_config import SamplingDefaults
from tandem.router.text.output_format import OutputFormat
from tandem.router.text.output_text import OutputText
from tandem.router.text.prompt_encoder import PromptEncoder
from tandem.router.text.structured_output import GrammarChecker, StructuredOutput
from tandem.router.text.tokenizer import Tokenizer
from tandem.router.workers.peer_counts import RouterCounts

# The names that a client gives to what it asks have so many characters at most: a request id comes back with every
# response.
MAX_NAME_LEN = 256
# So many entries may be asked for of all prompts of one request: each prompt token is one, and so is each of the most
# likely tokens beside it. As JSON one takes so much, many times what it takes elsewhere.
MAX_PROMPT_LOGPROBS = 2**18
PROMPT_LOGPROB_BYTES = 100
# Of the age of a request that is resumed so much counts.
MAX_RESUMED_AGE_NS = 10 * 10**9
# A prompt is a text, token ids, or a chat, or the messages of one, each with `role` and `content`.
PromptInput = str | Sequence[int] | list[dict[str, str]] | Chat


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as token ids that fit the model's vocabulary and length.

    Attributes:
        moments: when the request was received and tokenized, in nanoseconds.
        ending: the last few characters of a chat's text.
        namespace: of the workers' caches that it is for, as far as that was told.
        identities: of its prefixes there, by page size, where workers are chosen by them.
    """

    token_ids: list[int]
    moments: dict[str, int]
    ending: str = ""
    namespace: str | None = None
    identities: Mapping[int, Sequence[int]] = field(default_factory=dict)


class Frontend:
    """What the frontends share: who may enter, and how a request becomes a Generation."""

    def __init__(
        self,
        router: Router,
        tokenizer: Tokenizer,
        config: RouterConfig,
        sampling_defaults: SamplingDefaults | None = None,
    ) -> None:
        """Args: sampling_defaults: for frontends whose own contract leaves them to the model."""
        self.router = router
        self.sampling_defaults = sampling_defaults or SamplingDefaults()
        self.tokenizer = tokenizer
        self.config = config
        self.started_at = time.time()
        self._cache_namespaces = CacheNamespaces(config.cluster_token, config.share_cache_between_keys)
        self.access = Access(
            config.api_keys,
            config.max_requests_per_key,
            router.elsewhere,
            config.max_priority,
            config.max_bytes_in_hand,
        )
        self._prompts = PromptEncoder(tokenizer, config.max_model_len)
        self._grammars = GrammarChecker()
        self.output_format = OutputFormat(tokenizer, config.tool_parser, config.reasoning_parser)
        # A router without a cluster can only resume what it began itself.
        self._sealer = Sealer(config.cluster_token or secrets.token_hex(16))

    @contextmanager
    def refusals_counted(self, request_id: str = "") -> Iterator[None]:
        """Counts and logs a RequestError that is raised within; for what a frontend itself refuses.

        Args:
            request_id: what the client knows the request by, as far as that is known.
        """
        with refusals_counted(self.router, request_id):
            yield

    def identify(self, authorization: str | None, request_id: str = "") -> str:
        """Whose request this is; see Access.identify."""
        with self.refusals_counted(request_id):
            return self.access.identify(authorization)

    def counts(self) -> RouterCounts:
        """What this router tells others that it has in hand."""
        return replace(self.router.counts(), num_requests_by_key=self.access.num_requests_by_key())

    @contextmanager
    def admission(self, key: str, num_outputs: int = 1, *, is_resumed: bool = False) -> Iterator[None]:
        """Around all that is done for a request before it is served: tokenizing takes time too.

        Args:
            is_resumed: whether it says that it goes on with one that was taken in before, which `begin` makes sure of.

        Raises:
            InvalidRequestError: so many outputs would never be let in.
            OverloadedError: the queue is full, or this key would have more in hand than it may.
            UnavailableError: the router is draining.
        """
        limits = (self.config.max_requests_per_key or num_outputs, self.config.max_queued_requests)
        if num_outputs > min(limits):
            raise InvalidRequestError(
                f"{num_outputs} outputs are more than the {min(limits)} requests that may be in hand at once", "n"
            )
        self.router.check_capacity(num_outputs, is_resumed=is_resumed)
        with self.access.hold(key, num_outputs):
            yield

    def check_model(self, model: str) -> None:
        """Raises UnknownModelError."""
        if model and model not in self.config.model_names:
            *others, last = map(repr, self.config.model_names)
            served = f"{', '.join(others)} and {last} are" if others else f"{last} is"
            raise UnknownModelError(f"model {model!r} is not served here; {served}", "model")

    def check_num_messages(self, num_messages: int) -> None:
        """Of a chat, before anything is done for each of them. Raises InvalidRequestError."""
        with mistakes_in("messages"):
            self._prompts.check_num_messages(num_messages)

    def check_prompt_logprobs(self, num_tokens: int, num_top: int | None, hold: Callable[[int], None]) -> None:
        """
        Args:
            num_tokens: of all prompts of a request together, as often as the answer shows them.
            num_top: of the most likely tokens, with each of the prompts' tokens; None: nothing is asked for.
            hold: counts bytes as in hand.

        Raises:
            InvalidRequestError: so many are not given.
            OverloadedError: there is no room for them now.
        """
        if num_top is None:
            return
        num_entries = num_tokens * (num_top + 1)
        if num_entries > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"{num_tokens} prompt tokens in the answer with {num_top} of the most likely ones each are "
                f"{num_entries} log probabilities; one request may ask for {MAX_PROMPT_LOGPROBS} of its prompts",
                "prompt_logprobs",
            )
        hold(PROMPT_LOGPROB_BYTES * num_entries)

    def cache_namespace(self, key: str, name: str) -> str:
        """In which namespace of the workers' caches a request is. Args: name: what the client names. Raises
        InvalidRequestError."""
        _check_name("cache_namespace", name)
        return self._cache_namespaces.of(key, name)

    async def tokenize(self, prompt: PromptInput, namespace: str | None = None) -> TokenizedPrompt:
        """
        Args:
            namespace: of the workers' caches; None: no worker gets it.

        Raises:
            InvalidRequestError: with a message for the client.
        """
        moments = {RECEIVED: now_ns()}
        ending = ""
        is_chat = isinstance(prompt, Chat) or (
            not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
        )
        with mistakes_in("messages" if is_chat else "prompt"):
            with _tokenizing():
                if isinstance(prompt, str):
                    token_ids = await self._prompts.encode(prompt)
                elif is_chat:
                    chat: Any = prompt
                    token_ids, ending = await self._prompts.render_and_encode(chat)
                else:
                    ids: Any = prompt
                    token_ids = self._checked_ids(ids)
            if not token_ids:
                raise ValueError("the prompt is empty")
        identities: dict[int, Sequence[int]] = {}
        if namespace is not None and self.router.wants_prefixes:
            for size in {worker.page_size for worker in self.router.workers}:
                identities[size] = await prefix_identities_in_turns(token_ids, size, namespace)
        moments[TOKENIZED] = now_ns()
        return TokenizedPrompt(token_ids, moments, ending, namespace, identities)

    async def token_ids(self, prompt: str | Chat | list[dict[str, Any]], *, add_special_tokens: bool) -> list[int]:
        """The tokens of a text or a chat that fits the model's length, for a client that asks for nothing else. Raises
        InvalidRequestError, OverloadedError."""
        with mistakes_in("prompt" if isinstance(prompt, str) else "messages"), _tokenizing():
            if isinstance(prompt, str):
                return await self._prompts.encode(prompt, add_special_tokens=add_special_tokens)
            return await self._prompts.encode_chat(prompt, add_special_tokens=add_special_tokens)

    async def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of tokens that fit the model's length, special ones included. Raises InvalidRequestError,
        OverloadedError."""
        with mistakes_in("tokens"), _tokenizing():
            return await self._prompts.decode(self._checked_ids(token_ids), skip_special_tokens=False)

    async def grammar(self, wanted: StructuredOutput | None) -> str:
        """What an output is to keep to, in the form that workers follow; "" for None. Raises RequestError."""
        if wanted is None:
            return ""
        try:
            with mistakes_in(wanted.param):
                return await self._grammars.grammar(wanted)
        except TimeoutError as error:
            raise OverloadedError("too many grammars wait to be looked at; try again later") from error

    async def prompt_text(self, prompt: PromptInput) -> str:
        """A prompt that has been tokenized, a text or token ids, as a text. Raises OverloadedError."""
        if isinstance(prompt, str):
            return prompt
        with _tokenizing():
            return await self._prompts.decode(prompt)  # type: ignore[arg-type]

    def close(self) -> None:
        """Nothing more is tokenized."""
        self._prompts.close()
        self._grammars.close()

    def begin(
        self,
        prompt: TokenizedPrompt,
        options: SamplingOptions,
        *,
        key: str,
        default_max_tokens: int | None,
        num_choices: int = 1,
        priority: int = 0,
        cache_namespace: str = "",
        session_id: str = "",
        client_request_id: str = "",
        resumption: Resumption | None = None,
        kept: KeptStream | None = None,
        marks: Mapping[int, str] | None = None,
    ) -> list[Generation]:
        """Makes a Generation for each output; one is served once it is entered.

        Args:
            key: what `identify` said.
            default_max_tokens: for a client that names no limit; None: all that the model's length leaves.
            cache_namespace: among the key's own requests, unless keys share the caches.
            num_choices: outputs; each has a seed of its own.
            session_id: names the conversation that the request belongs to, for the routing policy.
            client_request_id: what the client knows the request by.
            resumption: where to go on, for a request that another router has begun; of one output.
            kept: what workers are to keep of it, for a client that will go on with its text alone; of one output.
            marks: special tokens that are text all the same, by id.

        Raises:
            InvalidRequestError: with a message for the client.
        """
        self.access.check_priority(key, priority)
        namespace = self.cache_namespace(key, cache_namespace)
        _check_name("session_id", session_id)
        _check_name("request_id", client_request_id)
        # What all outputs have alike is checked once.
        first = sampling_params(
            options,
            self.tokenizer,
            num_prompt_tokens=len(prompt.token_ids),
            num_left=self.config.max_model_len - len(prompt.token_ids),
            default_max_tokens=default_max_tokens,
        )
        output_ids: Sequence[int] = ()
        arrival_ns = num_characters = 0
        num_tokens: int | None = None
        if resumption is not None:
            with mistakes_in(RESUME_PARAM):
                state = self._resumed_state(resumption, prompt.token_ids, first.max_tokens, key)
            first = first.with_seed(state.seed)
            output_ids, num_characters = resumption.token_ids, resumption.num_characters
            num_tokens = resumption.num_tokens
            # A token may be kept and shown again: no more of its age counts than a little, or it would be a pass to the
            # front for whoever has an old one.
            arrival_ns = max(state.arrival_ns, now_ns() - MAX_RESUMED_AGE_NS)
        generations = []
        for choice in range(num_choices):
            sampling = first
            if choice:
                # What is known of the prompt is known by the first.
                sampling = first.with_seed((first.seed + choice) % 2**SEED_BITS).without_prompt_logprobs()
            tracker = self.router.make_tracker(
                prompt.token_ids,
                sampling,
                priority=priority,
                cache_namespace=namespace,
                session_id=session_id,
                client_request_id=client_request_id,
                output_ids=output_ids,
                arrival_ns=arrival_ns,
                moments=prompt.moments,
            )
            if prompt.namespace == namespace:
                tracker.prompt_identities = prompt.identities
            tracker.trace_context = current_trace_context.get()
            if kept is not None:
                tracker.record_id = kept.record_id
                state = self._state_of(tracker, key)
                tracker.resume_token = self._sealer.seal(
                    replace(state, body_digest=kept.body_digest, answer_id=kept.answer_id, created=kept.created)
                )
            output = OutputText(self.tokenizer, sampling.stop_token_ids, options.stop, sampling.min_tokens, marks)
            generation = Generation(
                self.router,
                self.access,
                key,
                tracker,
                output,
                num_characters=num_characters,
                num_tokens=num_tokens,
            )
            generations.append(generation)
        return generations

    def resume_token(self, generation: Generation, key: str) -> bytes:
        """What a client of this key needs to go on with an output at another router, beside what it has of it."""
        return self._sealer.seal(self._state_of(generation.tracker, key))

    def open_resume_token(self, token: bytes, key: str) -> ResumeState:
        """What a resume token says. Raises InvalidRequestError: it is not this key's, or none of this cluster's."""
        return self._sealer.open(token, key_digest(key))

    def _state_of(self, tracker: RequestTracker, key: str) -> ResumeState:
        arrival_ns = tracker.arrival_ns or tracker.moments[RECEIVED]
        digests = prompt_digest(tracker.prompt_ids), key_digest(key)
        return ResumeState(tracker.sampling.seed, arrival_ns, *digests)

    def _resumed_state(
        self, resumption: Resumption, prompt_ids: Sequence[int], max_tokens: int, key: str
    ) -> ResumeState:
        """Raises ValueError: these cannot be the tokens of the request that the token is for."""
        state = self.open_resume_token(resumption.token, key)
        if prompt_digest(prompt_ids) != state.prompt_digest:
            raise ValueError("the resume token belongs to a request with another prompt")
        if not 1 <= len(resumption.token_ids) <= max_tokens:
            raise ValueError(f"a request of {max_tokens} output tokens cannot have {len(resumption.token_ids)} of them")
        check_vocabulary(self.tokenizer, resumption.token_ids)
        return state

    def _checked_ids(self, token_ids: Sequence[Any]) -> list[int]:
        """Raises ValueError."""
        self._prompts.check_num_tokens(len(token_ids))
        checked = list(token_ids)
        if checked:
            check_vocabulary(self.tokenizer, checked)
        return checked


@contextmanager
def _tokenizing() -> Iterator[None]:
    """Tokenizing may take too long."""
    try:
        yield
    except TimeoutError as error:
        raise OverloadedError("too many long prompts wait to be tokenized; try again later") from error


def _check_name(field_name: str, name: str) -> None:
    """Raises InvalidRequestError for one that could not travel to the workers, or not be told back."""
    if len(name) > MAX_NAME_LEN:
        raise InvalidRequestError(
            f"{field_name} must have at most {MAX_NAME_LEN} characters, not {len(name)}", field_name
        )
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise InvalidRequestError(f"{field_name} holds half a character", field_name)
