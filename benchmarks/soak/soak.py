"""Runs clients and faults against a cluster, and judges it."""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.children import Child
from benchmarks.cpu import MODEL, TEXT
from benchmarks.soak import traffic
from benchmarks.soak.cluster import SoakedCluster
from benchmarks.soak.differences import confirm_firsts, judging, settle
from benchmarks.soak.faults import DECODE, PREFILL, USUAL, Faults
from benchmarks.soak.report import Outcome, first_and_last
from benchmarks.soak.samples import INTERVAL_S, Sampler
from benchmarks.soak.traffic import Difference, Tally
from benchmarks.soak.verdict import growths
from tandem.engine.weights.resolve import resolve_model

# Small, so that prompts evict each other and every page has been touched after a minute.
_NUM_PAGES = 128
_START_S = 180.0
_FIRSTS_S = 240.0
_REST_S = 60.0
# Longer than any request is sent again.
_LAST_REST_S = 270.0
_PROMPT_LENS = (12, 40, 150)
# Distance in tokens between the prompts' places in the text.
_STRIDE = 331
_MIN_FAULT_INTERVAL_S = 6.0
_MAX_FAULT_INTERVAL_S = 30.0
_FAULTS_IN_A_SHORT_RUN = 8


@dataclass(frozen=True)
class Settings:
    minutes: float = 60.0
    num_routers: int = 2
    num_threads: int = 6
    seed: int = 0
    is_elastic: bool = False
    out: Path | None = None


def run(settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Raises StartError, SoakError, RuntimeError: the cluster does not get as far as the soak."""
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as directory:
        out = settings.out or Path(directory)
        out.mkdir(parents=True, exist_ok=True)
        with SoakedCluster(_flags(settings), out / "logs", _START_S) as cluster:
            say(f"{cluster.name} serves at {cluster.http_address}")
            outcome = _soak(cluster, settings, say)
        left = [str(process.pid) for process in cluster.tree if process.is_alive()]
        if left:
            outcome = outcome.with_trouble(f"the stopped cluster left processes behind: {', '.join(left)}")
        if settings.out:
            (out / "serve.txt").write_text("\n".join(cluster.output) + "\n")
            (out / "soak.json").write_text(json.dumps(outcome.as_json(), indent=1) + "\n")
    return outcome


def _flags(settings: Settings) -> list[str]:
    return [
        *("--model", MODEL, "--device", "cpu", "--threads", "1"),
        *("--prefill", str(PREFILL), "--decode", str(DECODE), "--routers", str(settings.num_routers)),
        *("--num-pages", str(_NUM_PAGES), "--drain-timeout", "5"),
    ]


def _soak(cluster: SoakedCluster, settings: Settings, say: Callable[[str], None]) -> Outcome:
    model_dir = resolve_model(MODEL)
    prompts, texts = _prompts(model_dir)
    addresses = cluster.grpc_address, cluster.http_address
    with Child(traffic.run, *addresses, MODEL, prompts, texts, settings.num_threads, settings.seed) as clients:
        if failure := clients.ask(("firsts",), _FIRSTS_S):
            raise RuntimeError(f"an undisturbed request failed: {failure}")
        say("first answers are here")
        with judging(model_dir) as judge:
            troubles = confirm_firsts(clients.ask(("cases",)), judge)
        say("transformers has been asked")
        sampler = Sampler(cluster, USUAL)
        faults = Faults(
            cluster,
            settings.num_routers,
            lambda: _rest(cluster, clients),
            say,
            is_elastic=settings.is_elastic,
        )
        began = time.monotonic()
        sampler.start()
        try:
            clients.ask(("resume",))
            faults.run(settings.minutes * 60, _fault_interval_s(settings.minutes * 60))
        finally:
            sampler.close()
        clients.ask(("pause",))
        held = _wait_rest(cluster, clients, _LAST_REST_S)
        sampler.sample()
        duration_s = time.monotonic() - began
        tally: Tally = clients.ask(("tally",))
        remarks: list[str] = []
        differences: list[Difference] = clients.ask(("differences",))
        if differences:
            say(f"transformers judges {len(differences)} answers unlike the first ones")
            with judging(model_dir) as judge:
                remarks += settle(differences, tally, judge)
        troubles += faults.troubles + ([f"at the end: {held}"] if held else [])
        if settings.out:
            _write_samples(settings.out / "samples.json", sampler)
        if sampler.num_missed:
            remarks.append(f"{sampler.num_missed} samples found no router that answered")
        return Outcome(
            minutes=round(duration_s / 60, 1),
            tally=tally,
            growths=growths(sampler.lives.values(), duration_s),
            faults=dict(faults.counts),
            troubles=troubles,
            remarks=remarks,
            host=first_and_last(sampler.host),
        )


def _fault_interval_s(duration_s: float) -> float:
    return min(_MAX_FAULT_INTERVAL_S, max(_MIN_FAULT_INTERVAL_S, duration_s / _FAULTS_IN_A_SHORT_RUN))


def _rest(cluster: SoakedCluster, clients: Child) -> str:
    clients.ask(("pause",))
    try:
        return _wait_rest(cluster, clients, _REST_S)
    finally:
        clients.ask(("resume",))


def _wait_rest(cluster: SoakedCluster, clients: Child, timeout_s: float) -> str:
    """Return "" or what is not at rest after that time."""
    deadline = time.monotonic() + timeout_s
    while num_running := clients.ask(("tally",)).num_running:
        if time.monotonic() > deadline:
            return f"{num_running} requests hang"
        time.sleep(0.5)
    return cluster.wait_idle(max(INTERVAL_S, deadline - time.monotonic()))


def _prompts(model_dir: Path) -> tuple[list[list[int]], list[str]]:
    """Cut prompts of several lengths from a text."""
    from tandem.router.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(model_dir)
    tokens = tokenizer.encode(TEXT.read_text())
    prompts = [tokens[_STRIDE * n :][:length] for n, length in enumerate(_PROMPT_LENS)]
    return prompts, [tokenizer.decode(prompt) for prompt in prompts]


def _write_samples(path: Path, sampler: Sampler) -> None:
    lives = [
        {
            "kind": life.kind,
            "pid": life.process.pid,
            "times_s": life.times_s,
            "are_usual": life.are_usual,
            "values": life.values,
        }
        for life in (*sampler.lives.values(), sampler.host)
    ]
    path.write_text(json.dumps(lives) + "\n")
