"""Drafts from the outputs of other requests, within the cache namespace of an API key.

A client that times its own requests can tell which drafts were right, so drafts of other clients' outputs would reveal
those outputs. Nothing is kept of a namespace whose key no router has named.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence

from tandem.decode_worker.drafters.base import Drafter
from tandem.decode_worker.drafters.ngram import MAX_MATCH, NgramDrafter
from tandem.decode_worker.drafters.output_index import OutputIndex
from tandem.prefix import owner_of

SHARED_SOURCE = "shared"
# Each takes up to 1.3 MiB. The least recently used one is forgotten first.
MAX_NAMESPACES = 32


class SharedOutputs:
    """Finished outputs by cache namespace."""

    def __init__(self) -> None:
        self._owners: Collection[str] = ()
        self._indexes: OrderedDict[str, OutputIndex] = OrderedDict()

    def set_owners(self, owners: Collection[str]) -> None:
        """Keeps outputs of these owners' namespaces only, now and later: of the current API keys."""
        self._owners = frozenset(owners)
        for namespace in [known for known in self._indexes if owner_of(known) not in self._owners]:
            del self._indexes[namespace]

    def drop(self) -> None:
        """Forgets all outputs."""
        self._indexes.clear()

    def add(self, namespace: str, output_ids: Sequence[int]) -> None:
        if owner_of(namespace) not in self._owners:
            return
        index = self._indexes.setdefault(namespace, OutputIndex())
        self._indexes.move_to_end(namespace)
        index.add(output_ids)
        if len(self._indexes) > MAX_NAMESPACES:
            self._indexes.popitem(last=False)

    def of(self, namespace: str) -> OutputIndex | None:
        return self._indexes.get(namespace)


class SharedLookup(Drafter):
    """Continues the longest repetition, of the request's own tokens or of its namespace's outputs."""

    def __init__(self, outputs: SharedOutputs, namespace: str) -> None:
        self._own = NgramDrafter()
        self._outputs = outputs
        self._namespace = namespace

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> Sequence[int]:
        self.source = ""
        proposed = self._own.propose(token_ids, max_tokens)
        index = self._outputs.of(self._namespace)
        if index is None or self._own.num_matched == MAX_MATCH:
            return proposed
        found = index.propose(token_ids, max_tokens, longer_than=self._own.num_matched)
        if not found:
            return proposed
        self.source = SHARED_SOURCE
        return found
