"""What a run's figures say, in sentences that would be others if the figures were others."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.lifecycle import CRITICAL_PATH

# One run on a machine that does other things too: what is closer than this is called the same.
SAME = 0.1
# Of all cores: so much of other work is seen in times.
BUSY_SHARE = 0.25
# Of the phases that a request's time consists of.
PHASE_WORDS = {
    "tokenize": "tokenizing",
    "assign": "choosing workers",
    "earlier_attempts": "earlier attempts",
    "prefill_queue": "waiting for a prefill",
    "prefill": "prefill",
    "handover": "the handover",
    "decode": "decoding",
    "finish": "the way to the client",
}


def ms(seconds: float) -> str:
    return milliseconds(seconds * 1e3)


def milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def per_second(value: float) -> str:
    return f"{value:,.0f}/s" if value >= 100 else f"{value:.1f}/s"


@dataclass(frozen=True, slots=True)
class Change:
    """One figure, before and after.

    Attributes:
        who: gains or pays by it.
        what: the figure is.
        show: how it is written.
        noise: a difference that is too small to be seen, in its unit.
        less_is_better: as of times; not of throughputs.
    """

    who: str
    what: str
    before: float
    after: float
    show: Callable[[float], str] = ms
    noise: float = 0.0005
    less_is_better: bool = True

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def is_same(self) -> bool:
        return abs(self.after - self.before) <= max(SAME * self.before, self.noise)

    @property
    def is_gain(self) -> bool:
        return not self.is_same and (self.ratio < 1) == self.less_is_better

    @property
    def amount(self) -> str:
        return f"{self.ratio:.1f} times" if self.ratio >= 2 else f"{100 * (self.ratio - 1):+.0f} %".replace("-", "−")

    def __str__(self) -> str:
        before, after = self.show(self.before), self.show(self.after)
        if self.is_same:
            return f"{self.what} stays about the same ({before}, then {after})"
        return f"{self.what} {'rises' if self.ratio > 1 else 'falls'} from {before} to {after} ({self.amount})"


def sentences(changes: Sequence[Change]) -> str:
    """Each change, those of one party in one sentence."""
    parties: dict[str, list[str]] = {}
    for change in changes:
        parties.setdefault(change.who, []).append(str(change))
    return " ".join(f"For {who}, {_listed(said)}." for who, said in parties.items())


def balance(changes: Sequence[Change]) -> str:
    """Who gains and who pays, of those of whom there are figures."""
    gains = _by_party(change for change in changes if change.is_gain)
    pays = _by_party(change for change in changes if not change.is_same and not change.is_gain)
    if not gains and not pays:
        return f"Nobody gains and nobody pays by more than {SAME:.0%}."
    gained = f"Gain: {'; '.join(gains)}." if gains else f"Nobody gains by more than {SAME:.0%}."
    if not pays and len({change.who for change in changes}) == 1:
        return f"{gained} There are no figures of others."
    paid = f"Pay: {'; '.join(pays)}." if pays else f"Nobody pays by more than {SAME:.0%}."
    return f"{gained} {paid}"


def _by_party(changes: Iterable[Change]) -> list[str]:
    parties: dict[str, list[str]] = {}
    for change in changes:
        parties.setdefault(change.who, []).append(f"{change.what} {change.amount}")
    return [f"{who} ({', '.join(said)})" for who, said in parties.items()]


def shares(phases_ms: Mapping[str, float]) -> dict[str, float]:
    """Of a request's whole time, what each of the phases that follow one another takes; together they are 1."""
    return {spec.name: phases_ms.get(spec.name, 0.0) / phases_ms["e2e"] for spec in CRITICAL_PATH}


def bottleneck(phases_ms: Mapping[str, float]) -> str:
    """The phase in which a request spends most of its time."""
    found = shares(phases_ms)
    return max(found, key=lambda name: found[name])


def bottleneck_moved(before: tuple[str, Mapping[str, float]], after: tuple[str, Mapping[str, float]]) -> str:
    """Args: before, after: words for what was measured, and its phases."""
    said = [f"{words} it is {of_bottleneck(phases)}" for words, phases in (before, after)]
    one, other = bottleneck(before[1]), bottleneck(after[1])
    if one == other:
        verdict = "The bottleneck stays where it is"
    elif any(_stands_out(phases, one, other) for _, phases in (before, after)):
        verdict = "The bottleneck moves"
    else:
        verdict = "Two phases take about the same on both sides, so the bottleneck can hardly be said to move"
    return f"{verdict}: {said[0]}, {said[1]}."


def _stands_out(phases_ms: Mapping[str, float], one: str, other: str) -> bool:
    """Whether the larger of two phases is so by more than what counts as the same."""
    small, large = sorted((phases_ms.get(one, 0.0), phases_ms.get(other, 0.0)))
    return large - small > SAME * large


def of_bottleneck(phases_ms: Mapping[str, float]) -> str:
    name = bottleneck(phases_ms)
    return f"{PHASE_WORDS[name]} ({shares(phases_ms)[name]:.0%} of a request's {milliseconds(phases_ms['e2e'])})"


# --- of each experiment


def burst_changes(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """Of two runs of the burst."""
    one, other = before["result"], after["result"]

    def of(who: str, what: str, group: str, name: str, figure: str) -> Change:
        return Change(who, what, one[group][name][figure], other[group][name][figure])

    return [
        of("the running streams", "ITL p50", "streams", "itl", "p50"),
        of("the running streams", "ITL p99", "streams", "itl", "p99"),
        of("the running streams", "the longest ITL", "streams", "itl", "max"),
        of("the burst's prompts", "TTFT p50", "requests", "ttft", "p50"),
        of("the burst's prompts", "TTFT p99", "requests", "ttft", "p99"),
        Change(
            "the burst's prompts",
            "the time until all are answered",
            one["requests"]["duration_s"],
            other["requests"]["duration_s"],
        ),
    ]


def concurrency_changes(measured: dict[str, Any]) -> list[Change]:
    """From one request at a time to many."""
    alone, *_, many = measured
    one, other = measured[alone]["result"]["requests"], measured[many]["result"]["requests"]
    return [
        Change("each request", "TTFT p50", one["ttft"]["p50"], other["ttft"]["p50"]),
        Change("each request", "ITL p50", one["itl"]["p50"], other["itl"]["p50"]),
        Change(
            "the server",
            "the rate of output tokens",
            one["output_tokens_per_s"],
            other["output_tokens_per_s"],
            per_second,
            noise=0.0,
            less_is_better=False,
        ),
    ]


def cache_changes(steps: dict[str, Any], before: str, after: str, who: str) -> list[Change]:
    """Between two steps of the experiment of the cache."""
    one, other = (steps[name]["result"]["requests"]["ttft"] for name in (before, after))
    return [Change(who, "TTFT p50", one["p50"], other["p50"])]


def equal_answers(steps: dict[str, Any], before: str, after: str) -> tuple[int, int]:
    """How many answers are equal, of how many."""
    pairs = list(zip(steps[before]["answers"], steps[after]["answers"], strict=True))
    return sum(one == other for one, other in pairs), len(pairs)


def answers_sentence(steps: dict[str, Any], names: Sequence[str]) -> str:
    """Args: names: of steps that asked the same, the first of which computed all by itself."""
    first, *others = names
    said = []
    for name in others:
        num_equal, num = equal_answers(steps, first, name)
        said.append(f"{num_equal} of {num} {name}")
    are_equal = all(equal_answers(steps, first, name)[0] == len(steps[name]["answers"]) for name in others)
    return f"Answers equal to the cold ones, token for token: {_listed(said)}" + (
        "." if are_equal else ", so the cache has changed answers, by rounding or by a mistake."
    )


def eviction_sentence(cache: dict[str, Any]) -> str:
    """Whether the other prompts have pushed the first ones out."""
    steps, num_pages = cache["steps"], cache["num_pages"]
    warm, again = steps["warm"]["cached_share"], steps["again"]["cached_share"]
    others = steps["others"]["prompt_tokens"]
    said = f"After {others:,} tokens of other prompts, for pools of {num_pages * cache['page_size']:,}, "
    if again < warm / 2:
        return f"{said}the first prompts have been pushed out: {again:.0%} of them was found, {warm:.0%} before."
    return f"{said}the first prompts are still there: {again:.0%} of them was found, {warm:.0%} before."


def integrity_sentence(accounts: dict[str, dict[str, dict[str, Any]]]) -> str:
    """What the workers said of their page accounts after each step."""
    wrong = [
        f"{worker} after {step}: {account['violation']}"
        for step, workers in accounts.items()
        for worker, account in workers.items()
        if account["violation"]
    ]
    num_checks = sum(len(workers) for workers in accounts.values())
    if wrong:
        return f"{len(wrong)} of {num_checks} checks of page accounts found something wrong: {'; '.join(wrong)}."
    return f"All {num_checks} checks of page accounts (each worker, after each step) found every page accounted for."


def busy_sentence(machine: Mapping[str, str]) -> str:
    """A warning, where the machine had other work before the run; else empty."""
    load, cores = float(machine["load before the start"]), int(machine["cores"])
    if load <= BUSY_SHARE * cores:
        return ""
    return (
        f"**The machine was busy with other work**: its load was {load:.1f} before the start, with {cores} cores. "
        "Times are longer than they are on an idle one, and what was measured at different moments is hard to compare."
    )


def largest_stage(stages: Mapping[str, float]) -> str:
    name = max(stages, key=lambda stage: stages[stage])
    whole = sum(stages.values())
    return (
        f"The longest stage of the start is {name}: {stages[name]:.1f} of {whole:.1f} s ({stages[name] / whole:.0%})."
    )


def _listed(said: Sequence[str]) -> str:
    return said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
