"""TTFT of prompts from each tier, and hit rates of restarted workers."""

import statistics
from collections.abc import Sequence

from benchmarks.page_store.serving import Asked, Cluster
from benchmarks.page_store.sizes import Sizes
from benchmarks.rows import Row

# Share of a prompt's tokens that the named tier must have held, for its TTFT to count.
_MIN_SHARE = 0.9


def measure_tiers(cluster: Cluster, sizes: Sizes) -> list[Row]:
    """Send the same prompts again and again. The workers' death empties the pool, and the store's its memory."""
    prompts = [cluster.prompt(sizes.prefix_tokens) for _ in range(sizes.num_prefixes)]
    cluster.warm_up(sizes.prefix_tokens)
    # The pool need not hold all prompts.
    pairs = [(cluster.ask(prompt), cluster.ask(prompt)) for prompt in prompts]
    asked = {"computed": [first for first, _ in pairs], "pool": [second for _, second in pairs]}
    cluster.wait_stored()
    cluster.kill_workers()
    asked["host"] = _ask_stored(cluster, sizes, prompts)
    cluster.kill_store_and_workers()
    asked["disk"] = _ask_stored(cluster, sizes, prompts)
    rows = []
    for tier, answers in asked.items():
        name = f"TTFT of {sizes.prefix_tokens:,} tokens, {tier if tier == 'computed' else f'from {tier}'}"
        rows.append(Row(name, statistics.median(one.ttft_s for one in answers) * 1e3, "ms"))
        if tier != "computed":
            # A worker loads nothing from a disk that is slower than computing.
            low = None if tier == "disk" else 100 * _MIN_SHARE
            rows.append(Row(f"  tokens from {tier}", 100 * _share(answers, (tier,)), "%", low=low))
    return rows


def _ask_stored(cluster: Cluster, sizes: Sizes, prompts: Sequence[list[int]]) -> list[Asked]:
    cluster.wait_stored()
    cluster.warm_up(sizes.prefix_tokens)
    return [cluster.ask(prompt) for prompt in prompts]


def measure_restart(cluster: Cluster, sizes: Sizes, name: str, *, has_store: bool) -> list[Row]:
    """Kill the worker between two turns of every conversation."""
    conversations = [cluster.prompt(sizes.conversation_tokens) for _ in range(sizes.num_restarted)]
    for conversation in conversations:
        cluster.ask(conversation)
    if has_store:
        cluster.wait_stored()
    ready_s = cluster.kill_workers()
    asked = [cluster.ask([*one, *cluster.prompt(sizes.question_tokens)]) for one in conversations]
    hits = 100 * _share(asked, ("pool", "host", "disk"))
    return [
        Row(f"{name}: hit rate of the next {len(asked)} requests", hits, "%"),
        Row(f"{name}: median TTFT of these", statistics.median(one.ttft_s for one in asked) * 1e3, "ms"),
        Row(f"{name}: worker ready again after", ready_s, "s"),
    ]


def _share(asked: Sequence[Asked], tiers: Sequence[str]) -> float:
    return sum(one.tokens[tier] for one in asked for tier in tiers) / sum(one.usage.prompt_tokens for one in asked)
