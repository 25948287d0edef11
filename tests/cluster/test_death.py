"""Worker deaths at any moment: every client gets exactly its tokens.

In each repetition a fault hits one or two of four workers while streams run. All streams get the tokens of
transformers, and untouched ones do not notice. Afterwards no page is held, and every worker is back and serving.
"""

import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tandem.client import TandemError
from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import Clusters, Oracle, ServedCluster, random_ids, wait_until
from tests.cluster.faults import Footprints, LiveStream, QuickConfig, cut_control, cut_links, frozen, wait_whole

FAULTS = ("kill", "stop", "cut control", "cut links")
VICTIMS = {"P": ("prefill",), "D": ("decode",), "P and D": ("prefill", "decode")}
MOMENTS = ("before", "prefill", "transfer", "decode")
NUM_STREAMS = 6
# For untouched streams, while a restarting worker takes a core.
MAX_GAP_S = 2.0
# The silence timeout is one second.
MAX_NOTICE_S = 5.0
NUM_REPETITIONS = 20
STOP_S = 30.0


def config_for(cls: type[ClusterConfig], base: ClusterConfig) -> ClusterConfig:
    # Small chunks make prefills long.
    return cls(
        model=base.model,
        num_prefill=2,
        num_decode=2,
        num_pages=160,
        chunk_size=16,
        num_threads=1,
        grpc_port=0,
        http_port=0,
    )


@dataclass
class Figures:
    """Results of one fault on one victim."""

    name: str
    num_repetitions: int = 0
    num_streams: int = 0
    num_restarted: int = 0
    longest_gap_s: float = 0.0
    longest_touched_gap_s: float = 0.0
    growth: tuple[int, int] = (0, 0)

    def add(self, streams: Sequence[LiveStream]) -> None:
        self.num_streams += len(streams)
        for stream in streams:
            touched = stream.answer.last.handover.attempts > 1
            self.num_restarted += touched
            if touched:
                self.longest_touched_gap_s = max(self.longest_touched_gap_s, stream.longest_gap())
            else:
                self.longest_gap_s = max(self.longest_gap_s, stream.longest_gap())

    def __str__(self) -> str:
        return (
            f"{self.name:<22} {self.num_repetitions:>3} repetitions {self.num_streams:>4} streams "
            f"{self.num_restarted:>4} restarted; longest gap {self.longest_gap_s:5.2f} s, of a restarted one "
            f"{self.longest_touched_gap_s:5.2f} s; growth {self.growth[0] / 2**20:5.1f} MiB, {self.growth[1]} files"
        )


class Drill:
    def __init__(self, served: ServedCluster, oracle: Oracle, fault: str, victim: str) -> None:
        self._served = served
        self._oracle = oracle
        self._fault = fault
        self._roles = VICTIMS[victim]
        self._footprints = Footprints(served)
        self._stems: list[list[int]] = []
        self.figures = Figures(f"{fault}, {victim}")

    def repeat(self, number: int, moment: str, *, stop_s: float) -> None:
        rng = random.Random(f"{self.figures.name} {number}")
        self._stems = [random_ids(rng, 320) for _ in range(3)]
        wait_whole(self._served)
        victims = [f"{role}-{rng.randrange(2)}" for role in self._roles]
        old_pids = [worker.pid for v in victims if (worker := self._served.worker(v)) is not None]
        with ExitStack() as until_thawed:
            streams = self._strike(rng, moment, victims, until_thawed)
            struck = time.monotonic()
            for stream in streams:
                stream.finish()
            # The victims are gone, or just lost their streams.
            streams += self._send(rng, 4)
            for stream in streams:
                stream.finish()
            if self._fault == "stop":
                wait_until(lambda: time.monotonic() - struck > stop_s, stop_s + 1.0, "it has stood still long enough")
                streams += self._send(rng, 4)
        wait_whole(self._served)
        for victim, old_pid in zip(victims, old_pids, strict=True):
            worker = self._served.worker(victim)
            assert worker is not None and (worker.pid == old_pid) == (self._fault != "kill")
        streams += self._serve_with(rng, victims)
        for stream in streams:
            self._check(stream)
        self._served.wait_clean()
        self._footprints.measure()
        self.figures.num_repetitions += 1
        self.figures.add(streams)
        self.figures.growth = self._footprints.growth()
        assert self.figures.longest_gap_s < MAX_GAP_S

    def assert_flat(self) -> None:
        self._footprints.assert_flat()

    def _strike(
        self, rng: random.Random, moment: str, victims: Sequence[str], until_thawed: ExitStack
    ) -> list[LiveStream]:
        """Send requests, and strike at a random time within this stage of one."""
        streams = [] if moment == "before" else self._send(rng, NUM_STREAMS)
        if streams:
            target = rng.choice(streams)
            if moment == "prefill":
                target.wait_tokens(1, rng.uniform(0.0, 0.2))
            else:
                target.wait_tokens(1 if moment == "transfer" else rng.randint(2, target.sampling["max_tokens"] // 2))
        match self._fault:
            case "kill":
                for victim in victims:
                    self._served.kill(victim)
            case "stop":
                until_thawed.enter_context(frozen(self._served, victims))
            case "cut control":
                for victim in victims:
                    cut_control(self._served, victim)
            case "cut links":
                for victim in victims:
                    cut_links(self._served, victim)
        return streams or self._send(rng, NUM_STREAMS)

    def _send(self, rng: random.Random, num_streams: int) -> list[LiveStream]:
        """Send prompts of several chunks, some with shared prefixes."""
        streams = []
        for _ in range(num_streams):
            prompt_ids = rng.choice(self._stems)[: rng.randint(0, 320)] + random_ids(rng, rng.randint(1, 60))
            # Up to max_model_len.
            num_tokens = min(rng.randint(60, 120), 511 - len(prompt_ids))
            streams.append(LiveStream(self._served, prompt_ids, max_tokens=num_tokens, ignore_eos=True))
        return streams

    def _serve_with(self, rng: random.Random, victims: Sequence[str]) -> list[LiveStream]:
        """Send requests until each of these workers has taken part in one."""
        streams: list[LiveStream] = []

        def have_served() -> bool:
            streams.extend(sent := self._send(rng, 2))
            handovers = [stream.finish().last.handover for stream in sent]
            served_by.update(w for h in handovers for w in (h.prefill_worker, h.decode_worker))
            return served_by >= set(victims)

        served_by: set[str] = set()
        wait_until(have_served, 10.0, f"{victims} serve again")
        return streams

    def _check(self, stream: LiveStream) -> None:
        answer = stream.finish()
        assert len(answer.token_ids) == answer.last.usage.completion_tokens == stream.sampling["max_tokens"]
        assert self._oracle.confirms(stream.prompt_ids, answer.token_ids)
        assert answer.text == self._oracle.decode(answer.token_ids)


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[Figures]]:
    lines: list[Figures] = []
    yield lines
    plugins = request.config.pluginmanager
    reporter: Any = plugins.get_plugin("terminalreporter")
    capture: Any = plugins.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled():
        for line in ["", *lines]:
            reporter.write_line(str(line))


@pytest.mark.parametrize(
    ("fault", "victim", "moment"),
    [
        ("kill", "P", "transfer"),
        ("kill", "D", "decode"),
        ("stop", "P and D", "decode"),
        ("cut control", "D", "decode"),
        ("cut links", "P", "transfer"),
        # The slow test below repeats every fault; these are its quick samples.
        pytest.param("stop", "P", "prefill", marks=pytest.mark.slow),
        pytest.param("cut control", "P", "prefill", marks=pytest.mark.slow),
        pytest.param("cut control", "P and D", "transfer", marks=pytest.mark.slow),
        pytest.param("cut links", "D", "prefill", marks=pytest.mark.slow),
        pytest.param("cut links", "P and D", "before", marks=pytest.mark.slow),
    ],
)
def test_streams_outlive_a_fault(
    clusters: Clusters, tiny_config: ClusterConfig, tiny_oracle: Oracle, fault: str, victim: str, moment: str
) -> None:
    served = clusters.get(config_for(QuickConfig, tiny_config))
    Drill(served, tiny_oracle, fault, victim).repeat(0, moment, stop_s=1.5)


def sent_under_load(served: ServedCluster, rng: random.Random) -> list[LiveStream]:
    """Return streams in decode and streams that wait for prefill."""
    streams = [LiveStream(served, random_ids(rng, 60), max_tokens=300, ignore_eos=True) for _ in range(NUM_STREAMS)]
    streams[0].wait_tokens(20)
    return streams + [LiveStream(served, random_ids(rng, 380), max_tokens=60, ignore_eos=True) for _ in range(4)]


def check_exact(streams: Sequence[LiveStream], oracle: Oracle) -> None:
    for stream in streams:
        answer = stream.finish()
        assert len(answer.token_ids) == stream.sampling["max_tokens"]
        assert oracle.confirms(stream.prompt_ids, answer.token_ids)


def probe(served: ServedCluster) -> int:
    try:
        with urllib.request.urlopen(f"http://{served.cluster.addresses.http}/ready", timeout=5.0) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("role", ["prefill", pytest.param("decode", marks=pytest.mark.slow)])
def test_streams_wait_for_frozen_workers(
    clusters: Clusters, tiny_config: ClusterConfig, tiny_oracle: Oracle, role: str
) -> None:
    served = clusters.get(config_for(QuickConfig, tiny_config))
    wait_whole(served)
    rng = random.Random(role)
    streams = sent_under_load(served, rng)
    with frozen(served, [f"{role}-0", f"{role}-1"]):
        streams.append(LiveStream(served, random_ids(rng, 100), max_tokens=20, ignore_eos=True))
        reason = f"no {role} worker is connected"
        wait_until(lambda: served.client.server_info().not_ready_reason == reason, MAX_NOTICE_S, "the router knows")
        streams.append(LiveStream(served, [1, 2, 3], max_tokens=20, ignore_eos=True))
    check_exact(streams, tiny_oracle)
    wait_whole(served)
    served.wait_clean()


# test_cluster.py kills the only worker of each role under one stream.
@pytest.mark.slow
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_streams_wait_for_the_only_worker_of_a_role(
    clusters: Clusters, tiny_config: ClusterConfig, tiny_oracle: Oracle, role: str
) -> None:
    served = clusters.get(replace(config_for(QuickConfig, tiny_config), num_prefill=1, num_decode=1))
    wait_whole(served)
    rng = random.Random(role)
    streams = sent_under_load(served, rng)
    served.kill(f"{role}-0")
    reason = f"no {role} worker is connected"
    wait_until(lambda: served.client.server_info().not_ready_reason == reason, 5.0, "the router knows")
    assert probe(served) == 503
    streams += [LiveStream(served, random_ids(rng, 100), max_tokens=40, ignore_eos=True) for _ in range(4)]
    check_exact(streams, tiny_oracle)
    restarted = [stream for stream in streams if stream.answer.last.handover.attempts > 1]
    assert len(restarted) >= 4
    assert probe(served) == 200
    served.wait_clean()


@pytest.mark.slow
def test_worker_wait_timeout_names_the_missing_role(clusters: Clusters, tiny_config: ClusterConfig) -> None:
    config = replace(config_for(QuickConfig, tiny_config), worker_wait_timeout_s=1.0)
    served = clusters.get(config)
    wait_whole(served)
    with frozen(served, ["decode-0", "decode-1"]):
        stream = LiveStream(served, [1, 2, 3], max_tokens=100, ignore_eos=True)
        with pytest.raises(TandemError, match="no decode worker is connected; nobody came within 1 s") as told:
            stream.finish()
    assert told.value.code == "UNAVAILABLE" and stream.ended - stream.sent < MAX_NOTICE_S + 3.0
    wait_whole(served)
    served.complete([1, 2, 3])
    served.wait_clean()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_streams_outlive_a_fault_at_any_moment(
    clusters: Clusters, tiny_config: ClusterConfig, tiny_oracle: Oracle, table: list[Figures], fault: str, victim: str
) -> None:
    served = clusters.get(config_for(ClusterConfig, tiny_config))
    drill = Drill(served, tiny_oracle, fault, victim)
    table.append(drill.figures)
    for number in range(NUM_REPETITIONS):
        drill.repeat(number, MOMENTS[number % len(MOMENTS)], stop_s=STOP_S)
    drill.assert_flat()
