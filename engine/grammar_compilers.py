"""Compiles grammars on threads without the GIL. Clients take turns."""

import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from llguidance import LLMatcher

# The router refuses grammars that need more than 128 MiB or a second to compile.
MAX_NUM_KEPT = 64
MAX_BYTES_KEPT = 2**21
NUM_THREADS = 2
# A new grammar of another client finds a thread at once.
MAX_PER_CLIENT = NUM_THREADS - 1


@dataclass(eq=False, slots=True, weakref_slot=True)
class CompiledGrammar:
    """
    Attributes:
        clients: clients with this grammar in their queues, so that one's long queue does not hold up another.
    """

    text: str
    matcher: "Future[LLMatcher]" = field(default_factory=Future)
    num_users: int = 0
    clients: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def new_user(self) -> LLMatcher:
        with self._lock:
            self.num_users += 1
        return self.matcher.result().deep_copy()


class GrammarCompilers:
    """A queue for each client. A grammar that nobody refers to any more is not compiled."""

    def __init__(self, compile_grammar: Callable[[str], LLMatcher]) -> None:
        """Args: compile_grammar: called by the threads; may raise ValueError."""
        self._compile = compile_grammar
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammars")
        self._lock = threading.Lock()
        # The client whose last turn is the longest ago comes first.
        self._waiting: OrderedDict[str, deque[weakref.ref[CompiledGrammar]]] = OrderedDict()
        self._num_running: Counter[str] = Counter()

    def submit(self, grammar: CompiledGrammar, client: str) -> None:
        """Compiles the grammar in the client's turn; does nothing if that has begun or the client has asked before."""
        with self._lock:
            if client in grammar.clients or _has_begun(grammar):
                return
            grammar.clients.add(client)
            self._waiting.setdefault(client, deque()).append(weakref.ref(grammar))
        self._threads.submit(self._work)

    def close(self) -> None:
        with self._lock:
            self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        while (turn := self._next()) is not None:
            client, grammar = turn
            try:
                grammar.matcher.set_result(self._compile(grammar.text))
            except Exception as error:
                grammar.matcher.set_exception(error)
            finally:
                with self._lock:
                    self._num_running[client] -= 1
                    if not self._num_running[client]:
                        del self._num_running[client]

    def _next(self) -> tuple[str, CompiledGrammar] | None:
        """Returns None if all grammars that wait are of clients at their limit: their threads go on with them."""
        with self._lock:
            for client in list(self._waiting):
                if self._num_running[client] >= MAX_PER_CLIENT:
                    continue
                waiting = self._waiting[client]
                while waiting:
                    grammar = waiting.popleft()()
                    if grammar is not None and not _has_begun(grammar):
                        self._num_running[client] += 1
                        self._forget_or_move(client)
                        grammar.matcher.set_running_or_notify_cancel()
                        return client, grammar
                self._forget_or_move(client)
        return None

    def _forget_or_move(self, client: str) -> None:
        if self._waiting[client]:
            self._waiting.move_to_end(client)
        else:
            del self._waiting[client]


class KeptGrammars:
    """The latest compiled grammars, by text."""

    def __init__(self, compilers: GrammarCompilers) -> None:
        self._compilers = compilers
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def get(self, text: str, client: str) -> CompiledGrammar:
        """Returns the grammar, which may still be waiting for the client's turn."""
        compiled = self._kept.get(text)
        if compiled is None:
            compiled = self._kept[text] = CompiledGrammar(text)
            while len(self._kept) > 1 and (
                len(self._kept) > MAX_NUM_KEPT or sum(map(len, self._kept)) > MAX_BYTES_KEPT
            ):
                self._kept.popitem(last=False)
        self._kept.move_to_end(text)
        self._compilers.submit(compiled, client)
        return compiled

    def drop(self, compiled: CompiledGrammar) -> None:
        """Forgets a grammar whose outputs have used up its limits, unless it is forgotten already."""
        if self._kept.get(compiled.text) is compiled:
            del self._kept[compiled.text]


def _has_begun(grammar: CompiledGrammar) -> bool:
    return grammar.matcher.running() or grammar.matcher.done()
