"""The part of a prompt that a worker computes, beside the parts in its pool and in the node's page store."""

from dataclasses import dataclass

from tandem.deploy.estimate.worker import Worker


@dataclass(frozen=True, slots=True)
class Prompt:
    """
    Attributes:
        num_cached: first tokens, found in the pool.
        num_loaded: tokens behind these, loaded from the store's memory.
        num_computed: all others, at least 1.
        loading_s: seconds of the loads.
    """

    num_cached: int
    num_loaded: int
    num_computed: int
    loading_s: float

    @property
    def num_before(self) -> int:
        return self.num_cached + self.num_loaded


def prompt_of(worker: Worker, prompt_len: int, hit_rate: float, store_hit_rate: float) -> Prompt:
    """Splits a prompt. Workers load nothing that they compute as fast.

    Args:
        hit_rate, store_hit_rate: shares of the prompt in the pool, and behind it in the store's memory.

    Raises:
        ValueError: hits in the store, but the GPU's link to the host is unknown.
    """
    # The last token is computed in any case, for its logits.
    num_cached = min(round(prompt_len * hit_rate), prompt_len - 1)
    num_loaded = min(round(prompt_len * store_hit_rate), prompt_len - 1 - num_cached)
    if num_loaded:
        loading_s = worker.load(num_loaded)
        without = worker.prefill(1, prompt_len - num_cached, num_before=num_cached)
        num_before = num_cached + num_loaded
        if loading_s + worker.prefill(1, prompt_len - num_before, num_before=num_before) < without:
            return Prompt(num_cached, num_loaded, prompt_len - num_before, loading_s)
    return Prompt(num_cached, 0, prompt_len - num_cached, 0.0)
