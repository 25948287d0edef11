"""The report, as Markdown: of every experiment its tables, its plots and what they say."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.lab.findings import (
    PHASE_WORDS,
    SAME,
    Change,
    answers_sentence,
    balance,
    bottleneck_moved,
    burst_changes,
    busy_sentence,
    cache_changes,
    concurrency_changes,
    equal_answers,
    eviction_sentence,
    integrity_sentence,
    largest_stage,
    ms,
    of_bottleneck,
    sentences,
    shares,
)
from benchmarks.lab.measuring import LAYOUT_WORDS

CACHE_WORDS = {
    "cold": "prompts that nobody knows, one after the other",
    "warm": "the same again",
    "own": "eight at once, no two alike",
    "shared": "eight at once, all with one prefix",
    "others": "others, until the pools are full",
    "again": "the first ones again",
}
NOT_MEASURED = "This was not measured (see the end)."


def write_report(results: dict[str, Any], figures: Iterable[str], results_file: str) -> str:
    """Args: figures: names of PNG files beside the report; results_file: the name of the file with all figures."""
    pictures = set(figures)
    parts = [
        _head(results, results_file),
        _summary(results),
        _burst(results, pictures),
        _concurrency(results, pictures),
        _cache(results, pictures),
        _starts(results, pictures),
    ]
    if results["failures"]:
        failed = "\n".join(f"- {name}: {why}" for name, why in results["failures"].items())
        parts.append(f"## What was not measured\n\n{failed}")
    return "\n\n".join(parts) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column is text, the others are figures."""
    lines = [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _head(results: dict[str, Any], results_file: str) -> str:
    load = ", random weights" if results["load_format"] == "dummy" else ""
    machine = [*results["machine"].items(), *results["versions"].items()]
    busy = f"{said}\n\n" if (said := busy_sentence(results["machine"])) else ""
    return f"""# Disaggregated serving, measured: {results["model"]} on {_device(results)}

Made by `{results["command"]}` ({results["began"]}, {results["seconds"]:.0f} s). The model is {results["model"]}{load}.
What stands here in words is made of the figures of this run; two figures within {SAME:.0%} of each other are called the
same, for it is one run. All figures are in [{results_file}]({results_file}).

{busy}{table(("machine", ""), machine)}"""


def _device(results: dict[str, Any]) -> str:
    return "CPUs" if results["device"] == "cpu" else results["machine"].get("GPUs", "GPUs").partition(",")[0]


@dataclass(frozen=True, slots=True)
class Mechanism:
    """What is compared. Attributes: before, after: words for either side, and its phases."""

    name: str
    changes: list[Change]
    before: tuple[str, dict[str, float]]
    after: tuple[str, dict[str, float]]

    @property
    def said(self) -> str:
        return f"**{self.name}.** {sentences(self.changes)} {bottleneck_moved(self.before, self.after)}"


def burst_mechanisms(results: dict[str, Any]) -> list[Mechanism]:
    """As far as they were measured."""
    burst, found = results["burst"], []
    for name, before, after in (
        ("Prefill and decode apart, whole prefill", "both/whole", "1p1d/whole"),
        ("Prefill and decode apart, chunked prefill", "both/chunked", "1p1d/chunked"),
        ("Chunks in workers of role `both`", "both/whole", "both/chunked"),
        ("Chunks with prefill and decode apart", "1p1d/whole", "1p1d/chunked"),
    ):
        if before in burst and after in burst:
            sides = [(f"with {one['result']['label']}", one["phases_ms"]) for one in (burst[before], burst[after])]
            found.append(Mechanism(name, burst_changes(burst[before], burst[after]), sides[0], sides[1]))
    return found


def concurrency_mechanisms(results: dict[str, Any]) -> list[Mechanism]:
    found = []
    for layout, measured in results["concurrency"].items():
        alone, *_, many = measured
        sides = [(f"{number} at a time", measured[number]["phases_ms"]) for number in (alone, many)]
        name = f"Eight at a time, {LAYOUT_WORDS[layout]}"
        found.append(Mechanism(name, concurrency_changes(measured), sides[0], sides[1]))
    return found


def cache_mechanisms(results: dict[str, Any]) -> list[Mechanism]:
    if not results["cache"]:
        return []
    steps = results["cache"]["steps"]
    return [
        Mechanism(
            name,
            cache_changes(steps, before, after, who),
            (f"for {words[0]}", steps[before]["phases_ms"]),
            (f"for {words[1]}", steps[after]["phases_ms"]),
        )
        for name, before, after, who, words in (
            ("Known prompts", "cold", "warm", "prompts that are known", ("cold ones", "warm ones")),
            ("One prefix at once", "own", "shared", "prompts that begin alike", ("eight of their own", "eight alike")),
        )
    ]


def _summary(results: dict[str, Any]) -> str:
    found = [*burst_mechanisms(results), *concurrency_mechanisms(results), *cache_mechanisms(results)]
    rows = [
        f"| {one.name} | {balance(one.changes)} | {of_bottleneck(one.before[1])} | {of_bottleneck(one.after[1])} |"
        for one in found
    ]
    head = ["| mechanism | who gains, who pays | bottleneck before | and with it |", "|---|---|---|---|"]
    return "## In short\n\n" + "\n".join([*head, *rows])


def _burst(results: dict[str, Any], pictures: set[str]) -> str:
    sizes, burst = results["sizes"], results["burst"]
    text = f"""## 1. A burst

{sizes["num_burst"]} prompts of {sizes["burst_input"]:,} tokens, {sizes["burst_output"]} output tokens each, come at
once, {sizes["lead_s"]:g} s after {sizes["num_streams"]} streams have begun. Two workers each time, on as many devices.
A forward has at most {sizes["whole"]:,} tokens of prompts with whole prefill, which is more than a prompt has, and
{sizes["chunk"]:,} with chunked prefill, which is less."""
    if not burst:
        return f"{text}\n\n{NOT_MEASURED}"
    rows = []
    for one in burst.values():
        result, quiet = one["result"], one["quiet_itl"]
        itl, ttft = result["streams"]["itl"], result["requests"]["ttft"]
        rows.append(
            (
                result["label"],
                *(ms(ttft[name]) for name in ("p50", "p90", "p99")),
                ms(quiet["p50"]) if quiet else "",
                *(ms(itl[name]) for name in ("p50", "p99", "max")),
                f"{result['requests']['duration_s']:.1f} s",
            )
        )
    columns = ("workers", "TTFT p50", "p90", "p99", "streams' ITL before, p50", "in the burst, p50", "p99", "longest")
    said = [text, table((*columns, "until all were answered"), rows), _picture("burst-ttft", pictures)]
    said.append(_picture("burst-itl", pictures))
    said += [mechanism.said for mechanism in burst_mechanisms(results)]
    said += [_phase_table([(one["result"]["label"], one["phases_ms"]) for one in burst.values()])]
    return "\n\n".join(filter(None, [*said, _picture("burst-phases", pictures)]))


def _concurrency(results: dict[str, Any], pictures: set[str]) -> str:
    sizes = results["sizes"]
    text = f"""## 2. One request, and eight

Prompts of {sizes["request_input"]:,} tokens, {sizes["request_output"]} output tokens each: {sizes["num_alone"]} one
after the other, then {sizes["num_beside"]} of which eight are in hand at any time."""
    if not results["concurrency"]:
        return f"{text}\n\n{NOT_MEASURED}"
    rows, phases = [], []
    for measured in results["concurrency"].values():
        for one in measured.values():
            requests = one["result"]["requests"]
            latencies = [requests[name][p] for name in ("ttft", "itl") for p in ("p50", "p99")]
            rows.append((one["result"]["label"], *map(ms, latencies), f"{requests['output_tokens_per_s']:,.1f}"))
            phases.append((one["result"]["label"], one["phases_ms"]))
    said = [mechanism.said for mechanism in concurrency_mechanisms(results)]
    columns = ("workers and requests", "TTFT p50", "p99", "ITL p50", "p99", "output tokens/s")
    parts = [text, table(columns, rows), _phase_table(phases), _picture("concurrency-phases", pictures), *said]
    return "\n\n".join(filter(None, parts))


def _cache(results: dict[str, Any], pictures: set[str]) -> str:
    sizes, cache = results["sizes"], results["cache"]
    text = f"""## 3. The radix caches

A prefill and a decode worker, pools of {sizes["cache_pages"]:,} pages, prompts of {sizes["cached_input"]:,} tokens,
{sizes["cached_output"]} output tokens each."""
    if not cache:
        return f"{text}\n\n{NOT_MEASURED}"
    steps, accounts = cache["steps"], cache["accounts"]
    rows, before = [], accounts["begin"]
    for name, step in steps.items():
        requests, after = step["result"]["requests"], accounts[name]
        shipped = sum(after[worker]["pages_shipped"] - before[worker]["pages_shipped"] for worker in after)
        rows.append(
            (
                f"{name}: {CACHE_WORDS[name]}",
                str(requests["num_requests"]),
                ms(requests["ttft"]["p50"]),
                ms(requests["ttft"]["max"]),
                f"{step['cached_share']:.0%}",
                f"{shipped:,}",
                f"{_equal(steps, name)}",
            )
        )
        before = after
    columns = (
        "step",
        "requests",
        "TTFT p50",
        "longest",
        "found in prefill's cache",
        "pages shipped",
        "answers as cold",
    )
    said = [
        *(mechanism.said for mechanism in cache_mechanisms(results)),
        f"**After eviction.** {eviction_sentence(cache | {'page_size': results['page_size']})} "
        + sentences(cache_changes(steps, "cold", "again", "the first prompts, asked once more"))
        + f" {answers_sentence(steps, ('cold', 'warm', 'again'))} {integrity_sentence(accounts)}",
    ]
    return "\n\n".join(filter(None, [text, table(columns, rows), _picture("cache-ttft", pictures), *said]))


def _equal(steps: dict[str, Any], name: str) -> str:
    if name not in ("warm", "again"):
        return ""
    num_equal, num = equal_answers(steps, "cold", name)
    return f"{num_equal} of {num}"


def _starts(results: dict[str, Any], pictures: set[str]) -> str:
    starts = {name: start for name, start in results["starts"].items() if start["stages"]}
    text = """## 4. Start and memory

From the command to the line that says where the cluster is, as the worker had it that was loaded last; workers load
side by side. Stages are told apart to a few tenths of a second."""
    if not starts:
        return f"{text}\n\n{NOT_MEASURED}"
    stages = list(dict.fromkeys(stage for start in starts.values() for stage in start["stages"]))
    rows = [
        (name, *(f"{start['stages'].get(stage, 0.0):.1f}" for stage in stages), f"{start['ready_s']:.1f}")
        for name, start in starts.items()
    ]
    said = [text, table(("seconds", *stages, "in all"), rows), _picture("starts", pictures)]
    shown = "1p1d/whole" if "1p1d/whole" in starts else next(iter(starts))
    said.append(f"**{shown}.** {largest_stage(starts[shown]['stages'])}")
    gpu = [(name, worker, of) for name, start in starts.items() for worker, of in start["gpu_gib"].items()]
    if gpu:
        columns = (
            "GiB of a GPU",
            "in all",
            "weights and workspaces",
            "pages",
            "CUDA graphs",
            "largest forward",
            "free",
        )
        names = ("total", "weights", "pool", "graphs", "forward", "free")
        said.append(table(columns, [(f"{n}, {w}", *(f"{of[part]:.2f}" for part in names)) for n, w, of in gpu]))
        said.append(
            largest_part(
                {"weights": gpu[0][2]["weights"], "pages": gpu[0][2]["pool"], "CUDA graphs": gpu[0][2]["graphs"]}
            )
        )
    said.append(_resident_table(shown, starts[shown]))
    return "\n\n".join(filter(None, said))


def largest_part(gib: dict[str, float]) -> str:
    name = max(gib, key=lambda part: gib[part])
    whole = sum(gib.values())
    return f"Of what a worker takes of its GPU, the largest part is {name}: {gib[name]:.1f} of {whole:.1f} GiB."


def _resident_table(name: str, start: dict[str, Any]) -> str:
    after = start.get("rss_mib_after", {})
    rows = []
    for process, at_start in start["rss_mib"].items():
        end = after.get(process, {})
        parts = [f"{end[part]:,.0f}" if part in end else "" for part in ("rss", "anon", "file", "shmem")]
        rows.append((process, f"{at_start.get('rss', 0.0):,.0f}", *parts))
    columns = (f"MiB in memory, {name}", "at the start", "after the load", "own", "of files", "shared (KV pages)")
    return table(columns, rows)


def _phase_table(runs: Sequence[tuple[str, dict[str, float]]]) -> str:
    rows = []
    # Columns of nothing but zeros would only be in the way.
    names = [name for name in PHASE_WORDS if any(shares(phases)[name] >= 0.005 for _, phases in runs)]
    for label, phases in runs:
        found = shares(phases)
        rows.append((label, *(f"{found[name]:.0%}" for name in names), ms(phases["e2e"] / 1e3)))
    return table(("share of a request's time", *(PHASE_WORDS[name] for name in names), "in all"), rows)


def _picture(name: str, pictures: set[str]) -> str:
    return f"![{name}]({name}.png)" if name in pictures else ""
