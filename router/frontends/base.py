"""The frontends' shared part: checks a request, tokenizes it and makes its generations."""

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tandem.config import parse_api_key
from tandem.lifecycle import RECEIVED, TOKENIZED, now_ns
from tandem.prefix import ADAPTER_MARK, adapted_namespace, split_namespace
from tandem.router.adapters.names import ServedModel
from tandem.router.config import RouterConfig
from tandem.router.errors import (
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
    mistakes_in,
    shortened,
)
from tandem.router.frontends.access import Access, CacheNamespaces, key_digest, secret_digest
from tandem.router.frontends.generation import Generation
from tandem.router.frontends.long_prompts import prefix_identities_in_turns
from tandem.router.frontends.sampling import SEED_BITS, SamplingOptions, check_vocabulary, sampling_params
from tandem.router.requests.request_spec import RequestSpec, TokenizedPrompt
from tandem.router.resumption import PARAM as RESUME_PARAM
from tandem.router.resumption import OutputProof, ResumeState, Resumption, Sealer, new_stream_id, prompt_digest
from tandem.router.router import Router
from tandem.router.text.chat import Chat
from tandem.router.text.embedding_dimensions import EmbeddingDimensions
from tandem.router.text.generation_config import SamplingDefaults
from tandem.router.text.input_encoder import InputEncoder
from tandem.router.text.output_format import OutputFormat
from tandem.router.text.output_text import OutputText
from tandem.router.text.prompt_cut import PromptCut
from tandem.router.text.prompt_encoder import MAX_ROLE_LEN, PromptEncoder
from tandem.router.text.structured_output import GrammarChecker, StructuredOutput
from tandem.router.text.tokenizer import Tokenizer
from tandem.router.workers.peer_counts import RouterCounts
from tandem.sampling_params import ALL_LOGPROBS, SamplingParams

# Characters; a request id comes back with every response.
MAX_NAME_LEN = 256
# Each JSON entry is many times larger.
MAX_PROMPT_LOGPROBS = 2**18
PROMPT_LOGPROB_BYTES = 100
KNOWN_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
# Each takes a rendering or two.
MAX_OTHER_ROLES = 8
PromptInput = str | Sequence[int] | list[dict[str, str]] | Chat


class Frontend:
    def __init__(
        self,
        router: Router,
        tokenizer: Tokenizer,
        config: RouterConfig,
        sampling_defaults: SamplingDefaults | None = None,
        embedding_dimensions: EmbeddingDimensions | None = None,
    ) -> None:
        self.router = router
        self.sampling_defaults = sampling_defaults or SamplingDefaults()
        self.embedding_dimensions = embedding_dimensions or EmbeddingDimensions()
        self.tokenizer = tokenizer
        self.config = config
        self.started_at = time.time()
        self._cache_namespaces = CacheNamespaces(
            config.namespace_secret or config.cluster_token, config.share_cache_between_keys
        )
        self.access = Access(
            config.api_keys,
            config.max_requests_per_key,
            router.elsewhere,
            config.max_priority,
            config.max_bytes_in_hand,
            config.admin_keys,
        )
        self._prompts = PromptEncoder(tokenizer, config.max_model_len)
        self.inputs = InputEncoder(tokenizer, config.max_model_len, self._prompts.encode_beside)
        self._grammars = GrammarChecker(closes_objects=not config.open_objects)
        self.output_format = OutputFormat(tokenizer, config.tool_parser, config.reasoning_parser)
        # A router without a cluster can only resume its own requests.
        self._sealer = Sealer(config.cluster_token or secrets.token_hex(16))
        self.set_keys(config.api_keys)

    def set_keys(self, api_keys: Sequence[str]) -> None:
        """Replaces the API keys. Args: api_keys: "KEY" or "KEY MAX_PRIORITY" each."""
        self.access.set_keys(api_keys)
        if self.config.shares_drafts:
            keys = [parse_api_key(text).key for text in api_keys]
            self.router.set_namespace_owners([self._cache_namespaces.owner(key) for key in keys])

    @contextmanager
    def refusals_counted(self, request_id: str = "") -> Iterator[None]:
        with self.router.observers.refusals_counted(request_id):
            yield

    def identify(self, authorization: str | None, request_id: str = "") -> str:
        with self.refusals_counted(request_id):
            return self.access.identify(authorization)

    def counts(self) -> RouterCounts:
        return replace(self.router.counts(), num_requests_by_key=self.access.num_requests_by_key())

    @contextmanager
    def admission(self, key: str, num_outputs: int = 1) -> Iterator[None]:
        """Admits a request before tokenizing, which takes time too.

        Raises InvalidRequestError: too many outputs for any time; OverloadedError; UnavailableError: draining.
        """
        limits = (self.config.max_requests_per_key or num_outputs, self.config.max_queued_requests)
        if num_outputs > min(limits):
            raise InvalidRequestError(
                f"{num_outputs} outputs are more than the {min(limits)} requests that may be in hand at once", "n"
            )
        self.router.check_capacity(num_outputs)
        with self.access.hold(key, num_outputs):
            yield

    def served_model(self, name: str) -> ServedModel:
        """Returns the model of a request. Args: name: the client's; "": the base model.

        Raises:
            UnknownModelError: nothing is served by this name.
            UnavailableError: this router has just started, and nobody has told it the adapters yet.
        """
        if not name or name in self.config.model_names:
            return ServedModel(self.config.model_name)
        names = self.router.adapters
        if (adapter := names.find(name)) is not None:
            return ServedModel(name, adapter)
        if self.config.takes_adapters and not names.is_complete:
            raise UnavailableError(f"model {name!r} is not known yet: this router has just started; try again")
        *others, last = map(repr, self.config.model_names)
        served = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        if num_adapters := len(names.loaded()):
            served += f", and {num_adapters} adapters" if num_adapters > 1 else ", and an adapter"
            served += " (listed by /v1/models)"
        raise UnknownModelError(f"model {name!r} is not served here; {served}", "model")

    def check_num_messages(self, num_messages: int) -> None:
        with mistakes_in("messages"):
            self._prompts.check_num_messages(num_messages)

    def check_roles(self, roles: Collection[str]) -> None:
        """A template may drop messages of a role that it does not know. Raises InvalidRequestError."""
        others = set(roles) - KNOWN_ROLES
        if len(others) > MAX_OTHER_ROLES:
            raise InvalidRequestError(
                f"{len(others)} roles besides the usual ones; at most {MAX_OTHER_ROLES} are taken", "messages"
            )
        with mistakes_in("messages"):
            for role in sorted(others):
                if len(role) > MAX_ROLE_LEN or not self.tokenizer.takes_role(role):
                    raise ValueError(f"the model's chat template does not take messages of role {shortened(role)!r}")

    def check_prompt_logprobs(self, num_tokens: int, num_top: int | None, hold: Callable[[int], None]) -> None:
        """Raises InvalidRequestError, OverloadedError. Args: num_top: None: no log probabilities."""
        if num_top is None:
            return
        if num_top == ALL_LOGPROBS:
            num_top = self.tokenizer.vocab_size
        num_entries = num_tokens * (num_top + 1)
        if num_entries > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"{num_tokens} prompt tokens in the answer with {num_top} of the most likely ones each are "
                f"{num_entries} log probabilities; one request may ask for {MAX_PROMPT_LOGPROBS} of its prompts",
                "prompt_logprobs",
            )
        hold(PROMPT_LOGPROB_BYTES * num_entries)

    def cache_namespace(self, key: str, name: str, model: ServedModel) -> str:
        """Returns the namespace of the workers' caches. Args: name: the client's; ""."""
        _check_name("cache_namespace", name)
        return adapted_namespace(self._cache_namespaces.of(key, name), model.content_hash)

    async def tokenize(
        self, prompt: PromptInput, namespace: str | None = None, cut: PromptCut | None = None
    ) -> TokenizedPrompt:
        """
        Args:
            namespace: of the workers' caches; None: no worker gets the prompt.
            cut: truncates the prompt; None: a prompt that is too long is refused.

        Raises InvalidRequestError.
        """
        moments = {RECEIVED: now_ns()}
        ending = ""
        is_chat = isinstance(prompt, Chat) or (
            not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
        )
        with mistakes_in("messages" if is_chat else "prompt"):
            with tokenizing():
                if isinstance(prompt, str):
                    token_ids = await self._prompts.encode(prompt, cut=cut)
                elif is_chat:
                    chat: Any = prompt
                    token_ids, ending = await self._prompts.render_and_encode(chat, cut=cut)
                else:
                    ids: Any = prompt
                    token_ids = self._checked_ids(ids if cut is None else cut.of(ids))
            if not token_ids:
                raise ValueError("the prompt is empty")
        identities = {} if namespace is None else await self.prefix_identities(token_ids, namespace)
        moments[TOKENIZED] = now_ns()
        return TokenizedPrompt(tuple(token_ids), moments, ending, namespace, identities)

    async def prefix_identities(self, token_ids: Sequence[int], namespace: str) -> dict[int, Sequence[int]]:
        """Returns the identities of a prompt's prefixes by page size, if the routing policy wants them."""
        if not self.router.wants_prefixes:
            return {}
        sizes = {worker.page_size for worker in self.router.workers}
        return {size: await prefix_identities_in_turns(token_ids, size, namespace) for size in sizes}

    async def token_ids(self, prompt: str | Chat | list[dict[str, Any]], *, add_special_tokens: bool) -> list[int]:
        """Tokenizes within the model's length, without serving. Raises InvalidRequestError, OverloadedError."""
        with mistakes_in("prompt" if isinstance(prompt, str) else "messages"), tokenizing():
            if isinstance(prompt, str):
                return await self._prompts.encode(prompt, add_special_tokens=add_special_tokens)
            return await self._prompts.encode_chat(prompt, add_special_tokens=add_special_tokens)

    async def text_of(self, token_ids: Sequence[int]) -> str:
        with mistakes_in("tokens"), tokenizing():
            return await self._prompts.decode(self._checked_ids(token_ids), skip_special_tokens=False)

    def turn_of(self, client: str, grammar: str) -> str:
        """Returns the workers' name of the client, "" without a grammar. Args: client: as for `grammar`."""
        return secret_digest(self.config.cluster_token, client) if grammar else ""

    async def grammar(self, wanted: StructuredOutput | None, client: str) -> str:
        """Returns the grammar in the workers' form; "" for None. Raises RequestError.

        Args:
            client: its API key, or its address where there are no keys.
        """
        if wanted is None:
            return ""
        try:
            with mistakes_in(wanted.param):
                return await self._grammars.grammar(wanted, client)
        except TimeoutError as error:
            raise OverloadedError("too many grammars wait to be checked; try again later") from error

    async def prompt_text(self, prompt: PromptInput) -> str:
        if isinstance(prompt, str):
            return prompt
        with tokenizing():
            return await self._prompts.decode(prompt)  # type: ignore[arg-type]

    def close(self) -> None:
        self._prompts.close()
        self._grammars.close()

    def sampling_params(
        self, options: SamplingOptions, prompt: TokenizedPrompt, default_max_tokens: int | None
    ) -> SamplingParams:
        """Raises InvalidRequestError."""
        return sampling_params(
            options,
            self.tokenizer,
            num_prompt_tokens=len(prompt.token_ids),
            num_left=self.config.max_model_len - len(prompt.token_ids),
            default_max_tokens=default_max_tokens,
        )

    def begin(self, spec: RequestSpec, num_outputs: int = 1) -> list[Generation]:
        """Makes a Generation for each output, each with its own seed; entering one sends it to workers.

        Raises InvalidRequestError. A spec with `resumption` or `kept` has one output.
        """
        # Without it the request would share its cached prefixes with all keys.
        assert spec.prompt.namespace is not None
        # Nor may it share pages of another adapter.
        assert split_namespace(spec.prompt.namespace)[1] == spec.model.content_hash
        self.access.check_priority(spec.key, spec.priority)
        _check_name("session_id", spec.session_id)
        _check_name("request_id", spec.client_request_id)
        if spec.resumption is not None:
            with mistakes_in(RESUME_PARAM):
                spec = self._resumed(spec, spec.resumption)
        if spec.kept is not None:
            stream_id, digest = bytes.fromhex(spec.kept.record_id), spec.kept.body_digest
            spec = replace(spec, resume_token=self._sealer.seal(_state_of(spec, stream_id, digest)))
        return [self._generation(_output_of(spec, number)) for number in range(num_outputs)]

    def _generation(self, spec: RequestSpec) -> Generation:
        sampling = spec.sampling
        output = OutputText(self.tokenizer, sampling.stop_token_ids, spec.stop, sampling.min_tokens, spec.marks)
        return Generation(self.router, self.access, self.router.make_tracker(spec), output)

    def resume_token(self, spec: RequestSpec, request_digest: bytes) -> tuple[bytes, OutputProof]:
        """Returns the token of a new stream, and the proof of its tokens, which begins with a resumed output."""
        token = self._sealer.seal(_state_of(spec, new_stream_id(), request_digest))
        return token, self._sealer.proof(token, spec.resumption.token_ids if spec.resumption is not None else ())

    def open_resume_token(self, token: bytes, key: str) -> ResumeState:
        """Raises InvalidRequestError: the token belongs to another key or cluster."""
        return self._sealer.open(token, bytes.fromhex(key_digest(key)))

    def new_stream_name(self, key: str) -> str:
        return self._sealer.new_name(bytes.fromhex(key_digest(key)))

    def knows_stream_name(self, name: str, key: str) -> bool:
        return self._sealer.knows_name(name, bytes.fromhex(key_digest(key)))

    def check_output_proof(self, token: bytes, token_ids: Sequence[int], proof: bytes) -> None:
        """Raises InvalidRequestError."""
        self._sealer.check_proof(token, token_ids, proof)

    def _resumed(self, spec: RequestSpec, resumption: Resumption) -> RequestSpec:
        max_tokens = spec.sampling.max_tokens
        if not 1 <= len(resumption.token_ids) <= max_tokens:
            raise ValueError(f"a request of {max_tokens} output tokens cannot have {len(resumption.token_ids)} of them")
        check_vocabulary(self.tokenizer, resumption.token_ids)
        return replace(spec, sampling=spec.sampling.with_seed(resumption.state.seed))

    def _checked_ids(self, token_ids: Sequence[Any]) -> list[int]:
        self._prompts.check_num_tokens(len(token_ids))
        checked = list(token_ids)
        if checked:
            check_vocabulary(self.tokenizer, checked)
        return checked


@contextmanager
def tokenizing() -> Iterator[None]:
    """Raises OverloadedError for a TimeoutError within."""
    try:
        yield
    except TimeoutError as error:
        raise OverloadedError("too many long prompts wait to be tokenized; try again later") from error


def _output_of(spec: RequestSpec, number: int) -> RequestSpec:
    if number == 0:
        return spec
    seed = (spec.sampling.seed + number) % 2**SEED_BITS
    return replace(spec, sampling=spec.sampling.with_seed(seed).without_prompt_logprobs())


def _state_of(spec: RequestSpec, stream_id: bytes, request_digest: bytes) -> ResumeState:
    resumption, kept = spec.resumption, spec.kept
    return ResumeState(
        spec.sampling.seed,
        resumption.state.arrival_ns if resumption is not None else spec.prompt.moments[RECEIVED],
        stream_id,
        bytes.fromhex(key_digest(spec.key)),
        request_digest,
        # Over gRPC, the request's digest includes the prompt.
        *((prompt_digest(spec.prompt.token_ids), kept.answer_id, kept.created) if kept is not None else ()),
    )


def _check_name(field_name: str, name: str) -> None:
    if len(name) > MAX_NAME_LEN:
        raise InvalidRequestError(
            f"{field_name} must have at most {MAX_NAME_LEN} characters, not {len(name)}", field_name
        )
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise InvalidRequestError(f"{field_name} holds half a character", field_name)
    if ADAPTER_MARK in name:
        raise InvalidRequestError(f"{field_name} holds a null character", field_name)
