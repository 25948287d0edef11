"""In which namespace of the workers' caches a request is."""

import hashlib


class CacheNamespaces:
    """A namespace for each API key, unless keys are to share: else the time that a prompt takes would tell the one what
    the other asked.

    All routers of a cluster give the same ones. Workers learn no key: they see a digest that only this cluster makes.
    """

    def __init__(self, cluster_token: str, share_between_keys: bool) -> None:
        self._cluster_token = cluster_token
        self._share_between_keys = share_between_keys

    def of(self, key: str, asked_for: str) -> str:
        """
        Args:
            key: whose request it is; empty where there are no keys.
            asked_for: what the client names, which tells apart among the key's own requests alone.
        """
        if not key or self._share_between_keys:
            return asked_for
        own = hashlib.blake2b(key.encode(), key=self._cluster_token.encode(), digest_size=16).hexdigest()
        return f"{own}/{asked_for}"
