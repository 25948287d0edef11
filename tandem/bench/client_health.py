"""Warns if the client was too slow for the results to describe the server."""

from typing import Any

from tandem.bench.measures import distribution
from tandem.bench.processes import RunResult

# A request is late if sent this long after its due time.
LATE_S = 0.005
LATE_SHARE = 0.01
# Above this share of a core, a process adds to the measured times.
BUSY_SHARE = 0.8
# Below this share, more processes would not help.
IDLE_SHARE = 0.3
# Maximum p99 of the loop's lateness.
LAG_S = 0.005
MANY_TOKENS_PER_CHUNK = 1.05
# Tolerates a shared page or template.
CACHED_SHARE = 0.1


def client_summary(run: RunResult) -> dict[str, Any]:
    """Summarize all client processes. chunks_per_cpu_s estimates the client's own ceiling."""
    lateness = [record.lateness_s for record in run.records if record.group == "requests" and not record.is_warmup]
    num_late = sum(late > LATE_S for late in lateness)
    cpu_s = sum(usage.cpu_s for usage in run.usages)
    num_chunks = sum(len(record.times) for record in run.records)
    return {
        "num_processes": len(run.usages),
        "cpu_s": cpu_s,
        "cpu_share": max((usage.cpu_s / usage.wall_s for usage in run.usages if usage.wall_s), default=0.0),
        "chunks_per_cpu_s": num_chunks / cpu_s if cpu_s else 0.0,
        "loop_lag": distribution(lag for usage in run.usages for lag in usage.lags_s),
        "lateness": distribution(lateness),
        "num_late": num_late,
        "late_share": num_late / len(lateness) if lateness else 0.0,
    }


def warnings_about(result: dict[str, Any]) -> list[str]:
    client, requests = result["client"], result["requests"]
    warnings = []
    if not result["is_whole"]:
        warnings.append("The run was stopped before its end: these are the requests that had ended by then.")
    if client["late_share"] > LATE_SHARE:
        warnings.append(
            f"{client['num_late']} requests ({client['late_share']:.0%}) left more than {LATE_S * 1e3:g} ms after they "
            "were due, which is in their TTFT and E2E (ttft_from_sent is without it): "
            + (
                "the client did not keep up; try more --processes."
                if client["cpu_share"] > IDLE_SHARE
                else f"the client used {client['cpu_share']:.0%} of a core on average, so either many are due at once "
                "(try more --processes), or something else had the processor (end what else this machine does)."
            )
        )
    if client["cpu_share"] > BUSY_SHARE:
        warnings.append(
            f"A client process used {client['cpu_share']:.0%} of a core: some of the measured times are the client's "
            "own; try more --processes."
        )
    lag = client["loop_lag"]
    if lag is not None and lag["p99"] > LAG_S:
        warnings.append(
            f"One in a hundred of the client's timers fired at least {lag['p99'] * 1e3:.0f} ms late: this machine is "
            "too busy to measure times of a few milliseconds."
        )
    sources = set(requests["counted_by"])
    streams = result.get("streams")
    if "chunks" in sources:
        warnings.append("The server does not count tokens: each chunk was taken for one.")
    elif streams and "chunks" in streams["counted_by"] and requests["tokens_per_chunk"] > MANY_TOKENS_PER_CHUNK:
        warnings.append(
            "Streams were cut before the server had counted their tokens, so each of their chunks was taken for one, "
            "though chunks have more (--continuous-usage asks the server to count with each)."
        )
    if "length" in sources:
        warnings.append(
            "The server does not count tokens, but says that outputs ended by their length: they were taken to have "
            "the number that was asked for."
        )
    if "characters" in sources:
        warnings.append(
            "The server sends several tokens in a chunk, or chunks without text, and does not say how many with each: "
            "its count was shared out by the length of the text (--continuous-usage asks it to say so)."
        )
    if requests["tokens_per_chunk"] > MANY_TOKENS_PER_CHUNK:
        warnings.append(
            f"A chunk had {requests['tokens_per_chunk']:.2f} tokens on average: ITL is between chunks, TPOT for each "
            "token."
        )
    if requests["num_without_output"]:
        warnings.append(f"{requests['num_without_output']} whole answers had no output, and so are in no TTFT.")
    warnings += _warnings_about_cache(result)
    groups = [(requests, "requests"), *([(streams, "steady streams")] if streams else [])]
    for summary, words in groups:
        examples = summary["error_examples"]
        for kind, count in summary["errors"].items():
            warnings.append(f"{count} {words}: {kind} (such as: {examples[kind]})")
    return warnings


def _warnings_about_cache(result: dict[str, Any]) -> list[str]:
    requests, workload = result["requests"], result["config"]["workload"]
    has_common = workload["kind"] in ("multi-turn", "mooncake") or workload["num_system_tokens"]
    share = (requests["num_cached_tokens"] or 0) / max(requests["num_input_tokens"], 1)
    if has_common or share <= CACHED_SHARE:
        return []
    in_cache = (
        f"{share:.0%} of the input tokens were in the server's cache, though no two prompts of this run begin alike"
    )
    better = "and their TTFT is better than new ones' would be."
    before = "an earlier run sent them, as one with the same --seed does"
    if result["config"]["endpoint"]["api"] == "chat":
        return [
            f"{in_cache}: the chat template begins them all with the same text, which is much of short prompts, or "
            f"{before}, {better}"
        ]
    return [f"{in_cache}: {before}, {better}"]
