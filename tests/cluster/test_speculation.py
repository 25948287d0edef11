"""Clusters that speculate give the tokens of the model, also when a worker dies or a stream moves."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.both_worker.local_worker import LocalWorker
from tandem.client import TandemClient, TandemError
from tandem.decode_worker.config import DecodeConfig
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.key_file import KeyFile
from tandem.messages import Finished, FirstToken, Tokens, WorkerMessage
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tandem.v1.worker_pb2 import IntegrityReport
from tests.cluster.conftest import Clusters, Oracle, ServedCluster, random_ids, wait_until
from tests.cluster.faults import LiveStream, QuickConfig, wait_whole
from tests.cluster.test_moves import busiest_worker, leaving, num_moved

LAYOUTS: dict[str, dict[str, Any]] = {
    "1p1d": {"num_prefill": 1, "num_decode": 1},
    "both": {"num_prefill": 0, "num_decode": 0, "num_both": 1},
}
RANKS = {"num_prefill": 1, "num_decode": 1, "decode_tp": 2}
VICTIMS = ("decode-0", "both-0", "decode-0")
MAX_TOKENS = 40
# Enough to be running when the worker leaves.
# Long enough that a busy host sees the worker leave before they end.
MOVED_TOKENS = 400
# Exact in the client's single and the sampler's double precision.
SAMPLING: Sequence[dict[str, Any]] = (
    {},
    {"temperature": 0.5, "top_p": 0.75},
    {"temperature": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 0.25},
    {"repetition_penalty": 1.25},
    # Two tokens repeat each other also where a model is random.
    {"temperature": 1.0, "allowed_token_ids": (250, 5)},
)
# Returns whether the model gives this output to a prompt and sampling parameters.
Confirm = Callable[[list[int], dict[str, Any], list[int]], bool]
TEXT_PROMPTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n# The same two again:\n\ndef",
    '[{"name": "Ada", "born": 1815}, {"name": "Alan", "born": 1912}]\n[{"name": "Ada", "born": 1815}, {"name":',
)


def layouts(base: ClusterConfig) -> Iterator[ClusterConfig]:
    for counts in (*LAYOUTS.values(), RANKS):
        yield QuickConfig(
            base.model, num_pages=base.num_pages, num_threads=1, grpc_port=0, http_port=0, speculation="ngram", **counts
        )


def drafted(reports: dict[str, IntegrityReport]) -> tuple[int, int]:
    """Returns the drafted and the accepted tokens."""
    of_all = [one for report in reports.values() for one in report.stats.drafted]
    return sum(one.num_tokens for one in of_all), sum(one.num_accepted for one in of_all)


def check(served: ServedCluster, victim: str, prompts: Sequence[list[int]], confirms: Confirm) -> None:
    requests = [(prompt, {"seed": 2**40 + i, **SAMPLING[i % len(SAMPLING)]}) for i, prompt in enumerate(prompts)]
    wait_whole(served)
    for kills in (False, True):
        streams = [
            LiveStream(served, prompt, max_tokens=MAX_TOKENS, ignore_eos=True, **sampling)
            for prompt, sampling in requests
        ]
        if kills:
            assert streams[0].wait_tokens(5)
            served.kill(victim)
        answers = [stream.finish() for stream in streams]
        if not kills:
            num_drafted, num_accepted = drafted(served.integrity())
            assert num_drafted > num_accepted > 0
        for (prompt, sampling), answer in zip(requests, answers, strict=True):
            assert len(answer.token_ids) == MAX_TOKENS and confirms(prompt, sampling, answer.token_ids), sampling
        assert not kills or max(answer.last.handover.attempts for answer in answers) > 1
    wait_whole(served)
    served.wait_clean()


# The first test: it shares test_moves.py's cluster.
def test_moved_streams_have_the_tokens_of_transformers(tiny_workers: ServedCluster, tiny_oracle: Oracle) -> None:
    served = tiny_workers
    rng = random.Random(2)
    requests = []
    for number in range(6):
        # Few allowed tokens, so that drafts are right at times.
        sampling: dict[str, Any] = {}
        if number % 2:
            sampling = {"temperature": 1.0, "allowed_token_ids": (250, 5, 9), "seed": number}
        requests.append(((random_ids(rng, 5) * 8)[:40], sampling))
    streams = [
        LiveStream(served, prompt, max_tokens=MOVED_TOKENS, ignore_eos=True, **sampling)
        for prompt, sampling in requests
    ]
    assert all(stream.wait_tokens(5) for stream in streams)
    with leaving(served, busiest_worker(served)):
        answers = [stream.finish() for stream in streams]
    assert num_moved(streams) > 0
    for (prompt, sampling), answer in zip(requests, answers, strict=True):
        assert len(answer.token_ids) == MOVED_TOKENS
        assert tiny_oracle.confirms_sampled(prompt, answer.token_ids, **sampling), sampling
    num_drafted, num_accepted = drafted(served.integrity())
    assert num_drafted > num_accepted > 0


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(0, id="1p1d"),
        pytest.param(1, id="both", marks=pytest.mark.slow),
        pytest.param(2, id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_transformers(
    layout: int, clusters: Clusters, tiny_config: ClusterConfig, tiny_oracle: Oracle
) -> None:
    rng = random.Random(1)
    prompts = [(random_ids(rng, rng.randint(3, 9)) * 8)[:40] for _ in range(6)]
    config = [*layouts(tiny_config)][layout]

    def confirms(prompt_ids: list[int], sampling: dict[str, Any], output_ids: list[int]) -> bool:
        return tiny_oracle.confirms_sampled(prompt_ids, output_ids, **sampling)

    check(clusters.get(config), VICTIMS[layout], prompts, confirms)


@pytest.mark.slow
def test_outputs_of_a_key_are_drafts_of_its_requests_until_it_goes(
    clusters: Clusters, tiny_config: ClusterConfig, tmp_path: Path
) -> None:
    path = tmp_path / "keys.txt"
    path.write_text("stays\ngoes\n")
    config = replace(
        tiny_config,
        speculation="ngram",
        speculation_shared=True,
        api_keys=("stays", "goes"),
        key_file=KeyFile(str(path)),
    )
    served = clusters.get(config)
    client_of = {key: TandemClient(served.cluster.addresses.grpc, key) for key in ("stays", "goes")}
    prompt_ids = random_ids(random.Random(3), 12)
    outputs: list[list[int]] = []

    def num_shared(key: str) -> int:
        """Returns the accepted drafts from other outputs, after one more request."""
        stream = LiveStream(
            served, prompt_ids, client=client_of[key], max_tokens=MAX_TOKENS, ignore_eos=True, temperature=1.0, seed=5
        )
        outputs.append(stream.finish().token_ids)
        of_all = [one for report in served.integrity().values() for one in report.stats.drafted]
        return sum(one.num_accepted for one in of_all if one.source == "shared")

    def is_admitted(key: str) -> bool:
        try:
            client_of[key].server_info()
        except TandemError:
            return False
        return True

    assert num_shared("goes") == num_shared("stays") == 0
    found = num_shared("goes")
    assert found > MAX_TOKENS // 2
    path.write_text("stays\n")
    wait_until(lambda: not is_admitted("goes"), 20.0, "a key is gone")
    found_by_both = num_shared("stays")
    assert found_by_both > found
    path.write_text("stays\ngoes\n")
    wait_until(lambda: is_admitted("goes"), 20.0, "the key is back")
    assert num_shared("goes") == found_by_both
    assert all(output == outputs[0] for output in outputs)
    for client in client_of.values():
        client.close()
    served.wait_clean()


class Alone:
    """Answers of a model without a cluster and without speculation."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[str, list[int]] = {}

    def confirm(self, prompt_ids: list[int], sampling: dict[str, Any], output_ids: list[int]) -> bool:
        key = f"{prompt_ids} {sampling}"
        if key not in self._known:
            self._known[key] = self._compute(prompt_ids, sampling)
        return self._known[key] == output_ids

    def _compute(self, prompt_ids: list[int], sampling: dict[str, Any]) -> list[int]:
        output: list[int] = []
        ended: list[Finished] = []

        def take(message: WorkerMessage) -> None:
            if isinstance(message, FirstToken):
                output.append(message.token_id)
            elif isinstance(message, Tokens):
                [event] = message.events
                output.extend(event.token_ids[len(output) - event.index :])
            elif isinstance(message, Finished):
                ended.append(message)

        worker = LocalWorker(self._engine, PrefillConfig(), DecodeConfig(), take)
        worker.submit("r", prompt_ids, SamplingParams(MAX_TOKENS, **sampling))
        worker.run_until(lambda: bool(ended), 120.0)
        return output


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", range(len(LAYOUTS)), ids=LAYOUTS)
def test_smollm2_tokens_are_those_without_speculation(
    layout: int, clusters: Clusters, tiny_config: ClusterConfig, smollm2_dir: Path
) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXT_PROMPTS for _ in SAMPLING]
    engine = build_engine(EngineConfig(str(smollm2_dir), num_pages=200, num_threads=1), "alone", lambda doing: None)
    alone, oracle = Alone(engine), Oracle(smollm2_dir)

    def confirms(prompt_ids: list[int], sampling: dict[str, Any], output_ids: list[int]) -> bool:
        # On some CPUs a random number lies within rounding of two tokens' border.
        params = SamplingParams(MAX_TOKENS, **sampling)
        return alone.confirm(prompt_ids, sampling, output_ids) or oracle.may_draw(prompt_ids, output_ids, params)

    config = [*layouts(replace(tiny_config, model=str(smollm2_dir)))][layout]
    check(clusters.get(config), VICTIMS[layout], prompts, confirms)
    engine.close()
