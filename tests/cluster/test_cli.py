"""The `tandem` command with the demo model."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.client import TandemClient
from tandem.deploy.host.process_tree import descendants, end_processes
from tandem.processes import ProcessId
from tandem.v1 import inference_pb2 as pb
from tests.cluster.command import GONE_S, TANDEM, Server, own_name, start, tandem
from tests.cluster.conftest import Answer, Clusters, Oracle, wait_until
from tests.cluster.test_drain import LongRequest
from tests.conftest import Certificates

# Unused address.
NO_SERVER = "127.0.0.1:1"
ENGLISH = "The old lighthouse stood at the edge of the"
# Far shorter than a request of test_drain.
DRAIN_TIMEOUT_S = 1.0
UNICODE = "Grüße aus München! 日本語の文章 🙂 и ещё"


@pytest.fixture(scope="module")
def server(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[Server]:
    clusters.close()
    server = start(
        *("--model", "smollm2-135m-instruct", "--num-pages", "256", "--chunk-size", "128"),
        *("--drain-timeout", f"{DRAIN_TIMEOUT_S:g}"),
        runtime_dir=tmp_path_factory.mktemp("run"),
    )
    yield server
    end_processes([p for p in server.tree if p.is_alive()], 5.0)


@pytest.fixture(scope="module")
def oracle(smollm2_dir: Path) -> Oracle:
    return Oracle(smollm2_dir)


class Chat:
    """A conversation, formatted by transformers."""

    def __init__(self, oracle: Oracle, model_dir: Path) -> None:
        from transformers import AutoTokenizer

        self._oracle = oracle
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        self.messages: list[dict[str, str]] = []

    def answer(self, question: str, max_tokens: int) -> tuple[list[int], str]:
        self.messages.append({"role": "user", "content": question})
        prompt_ids = self._tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        output_ids = self._oracle.generate(prompt_ids, max_tokens)
        text = self._oracle.decode(output_ids)
        self.messages.append({"role": "assistant", "content": text})
        return output_ids, text


@pytest.fixture
def chat(oracle: Oracle, smollm2_dir: Path) -> Chat:
    return Chat(oracle, smollm2_dir)


def complete(server: Server, request: pb.GenerateRequest, max_tokens: int) -> Answer:
    request.sampling.max_tokens = max_tokens
    answer = Answer()
    with TandemClient(server.address) as client:
        for response in client.generate(request, timeout_s=30.0):
            answer.add(response)
    return answer


def server_info(server: Server) -> pb.ServerInfo:
    with TandemClient(server.address) as client:
        return client.server_info()


@pytest.mark.parametrize(
    ("text", "max_tokens"), [(ENGLISH, 20), (UNICODE, 20), (f"{ENGLISH} sea. " * 16, 8)], ids=["en", "unicode", "long"]
)
def test_text_matches_transformers(server: Server, oracle: Oracle, text: str, max_tokens: int) -> None:
    prompt_ids = oracle.tokenizer.encode(text).ids
    answer = complete(server, pb.GenerateRequest(text=text), max_tokens)
    assert len(answer.token_ids) == max_tokens and oracle.confirms(prompt_ids, answer.token_ids)
    assert answer.text == oracle.decode(answer.token_ids)
    assert answer.last.usage.prompt_tokens == len(prompt_ids)


def test_chat_matches_transformers(server: Server, chat: Chat) -> None:
    expected, text = chat.answer("What is the capital of France?", 20)
    request = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(**chat.messages[0])]))
    answer = complete(server, request, 20)
    assert (answer.token_ids, answer.text) == (expected, text)


def test_generate(server: Server, oracle: Oracle, chat: Chat) -> None:
    raw = tandem("generate", "--raw", "--max-tokens", "8", "--address", server.address, ENGLISH)
    expected = oracle.decode(oracle.generate(oracle.tokenizer.encode(ENGLISH).ids, 8))
    assert (raw.returncode, raw.stdout, raw.stderr) == (0, f"{expected}\n", "")

    _, expected = chat.answer("Name a colour.", 8)
    asked = tandem(
        "generate", "--max-tokens", "8", "--timings", "--address", server.address, "-", stdin="Name a colour."
    )
    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout.startswith(f"{expected}\n")
    for shown in ("first_to_second", "handover", "pages shipped to it"):
        assert shown in asked.stdout


def test_chat_of_two_turns(server: Server, chat: Chat) -> None:
    questions = ("What is the capital of France?", "And of Italy?")
    answers = [chat.answer(question, 12)[1] for question in questions]
    done = tandem("chat", "--max-tokens", "12", "--address", server.address, stdin="\n".join(questions) + "\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert [part.strip() for part in done.stdout.split("\n> ")[1:]] == [*(a.strip() for a in answers), ""]


def test_status(server: Server) -> None:
    status = tandem("status", "--address", server.address)
    assert (status.returncode, status.stderr) == (0, "")
    assert status.stdout.startswith("smollm2-135m-instruct (length 4096), ready")
    # Not truncated at 80 columns.
    for worker in server_info(server).workers:
        assert status.stdout.count(worker.worker_id) >= 2 and str(worker.pid) in status.stdout
    [router] = server_info(server).routers
    assert router.pid in {process.pid for process in server.tree}
    assert str(router.pid) in status.stdout and router.grpc_address == server.address

    info = json.loads(tandem("status", "--json", "--address", server.address).stdout)
    assert info["ready"] is True
    assert {w["worker_id"]: w["stats"]["num_total_pages"] for w in info["workers"]} == {
        "prefill-0": 256,
        "decode-0": 256,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--raw", ""), "tandem generate: the prompt is empty"),
        (("--max-tokens", "9999", "hi"), "tandem generate: max_tokens must be between 1 and"),
        (("--raw", "--max-tokens", "1", "word " * 5000), "tandem generate: the prompt is too long"),
    ],
)
def test_refused_request_shows_reason(server: Server, arguments: tuple[str, ...], message: str) -> None:
    done = tandem("generate", "--address", server.address, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_ctrl_c_cuts_requests_after_the_drain_timeout(server: Server) -> None:
    assert len(server.tree) > 6
    request = LongRequest(server)
    began = time.monotonic()
    # A terminal signals the whole foreground group.
    os.killpg(server.process.pid, signal.SIGINT)
    request.finish()
    assert request.error is not None
    assert (request.error.code, str(request.error)) == ("UNAVAILABLE", "the server is shutting down")
    assert server.finish() == 0
    stopping, cut = (server.said_at(beginning) - began for beginning in ("Stopping", "Requests cut short: 1"))
    ended = request.ended_at - began
    print(f"stopping after {stopping:.2f} s, cut after {cut:.2f} s, which the client knew after {ended:.2f} s")
    assert ended > DRAIN_TIMEOUT_S - 0.1
    assert ended - stopping < DRAIN_TIMEOUT_S + 3.0
    assert time.monotonic() - began < DRAIN_TIMEOUT_S + 15.0
    assert tandem("status", "--address", server.address).returncode == 1


def test_config_file_with_tls_and_keys(
    clusters: Clusters, tiny_model_dir: Path, certificates: Certificates, tmp_path: Path
) -> None:
    clusters.close()
    for name in ("cert", "key"):
        shutil.copy(getattr(certificates, name), tmp_path / f"{name}.pem")
    (tmp_path / "keys.txt").write_text("# ours\nopen-sesame\n")
    (tmp_path / "cluster.yaml").write_text(
        f"model: {tiny_model_dir}\nboth: 1\nnum-pages: 64\n"
        "api-key-file: keys.txt\ntls-cert: cert.pem\ntls-key: key.pem\n"
    )
    # Relative paths hold in all processes.
    server = start("--config", "cluster.yaml", "--num-pages", "32", runtime_dir=tmp_path, cwd=tmp_path)
    try:
        tls = ("--address", server.address, "--tls-ca", certificates.ca)
        generated = tandem("generate", "--raw", "--max-tokens", "4", *tls, "--api-key", "open-sesame", "hello")
        assert (generated.returncode, generated.stderr) == (0, "")
        info = json.loads(tandem("status", "--json", *tls, "--api-key", "open-sesame").stdout)
        assert [w["stats"]["num_total_pages"] for w in info["workers"]] == [32]
        refused = tandem("status", *tls)
        assert refused.returncode == 1 and "an API key is needed" in refused.stderr
        plain = tandem("status", "--address", server.address, "--api-key", "open-sesame")
        assert plain.returncode == 1 and plain.stderr.startswith("tandem status: ")
        # A killed server leaves no process.
        began = time.monotonic()
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until(lambda: not any(p.is_alive() for p in server.tree), GONE_S, "nothing is left")
        print("gone after", time.monotonic() - began)
        assert server.process.wait(1.0) == -signal.SIGKILL
    finally:
        end_processes([p for p in server.tree if p.is_alive()], 5.0)
    assert "open-sesame" not in "".join(server.output)


@pytest.mark.slow
def test_custom_policies(
    clusters: Clusters, tiny_model_dir: Path, tiny_oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters.close()
    # As in the example's first lines.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "examples"))
    policies = ("--routing", "own_policies:StickySessions", "--schedule", "own_policies:ShortestPromptFirst")
    server = start(
        *("--model", str(tiny_model_dir), "--decode", "2", "--num-pages", "64", "--threads", "1"),
        *(*policies, "--eviction", "own_policies:SegmentedLru"),
        runtime_dir=tmp_path,
    )
    try:
        homes: dict[str, set[str]] = {}
        for turn in range(4):
            for session in ("one", "two", "three"):
                prompt = list(f"{session} {turn}".encode())
                request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), session_id=session)
                answer = complete(server, request, 8)
                assert answer.token_ids == tiny_oracle.generate(prompt, 8)
                homes.setdefault(session, set()).add(answer.last.handover.decode_worker)
        assert [len(workers) for workers in homes.values()] == [1, 1, 1]
    finally:
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.finish() == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_during_start(tiny_model_dir: Path) -> None:
    flags = ("--both", "1", "--threads", "1", "--num-pages", "64", "--grpc-port", "0", "--http-port", "0")
    for number in range(20):
        process = subprocess.Popen(
            [TANDEM, "serve", *own_name(), "--model", str(tiny_model_dir), *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        seen = {ProcessId.of(process.pid)}
        stop_at = time.monotonic() + 0.3 + number * 0.25
        while time.monotonic() < stop_at:
            seen |= set(descendants(process.pid))
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=2 * GONE_S)
        # Before `serve` starts anything, a signal's status is the shell's.
        assert process.returncode in ({0, 130, 143} if "ray: starting" not in output else {0}), output
        assert "Traceback" not in output and "SIGTERM received" not in output
        if "ray: starting" in output:
            assert "Stopped before it was ready" in output or "Ready after" in output
        assert [p for p in seen if p.is_alive()] == []


@pytest.mark.parametrize("command", [("generate", "hi"), ("chat",), ("status",)])
def test_no_server(command: tuple[str, ...]) -> None:
    done = tandem(*command, "--address", NO_SERVER, stdin="hi\n")
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"tandem {command[0]}: no cluster answers at {NO_SERVER}; start one with `tandem serve`"
    )


def test_wrong_flags_and_unservable_models(tmp_path: Path) -> None:
    """tests/unit/deploy has more of them, in its own process."""
    done = tandem("serve", "--model", "m", "--num-page", "3")
    assert done.returncode == 2
    assert "unrecognized arguments: --num-page 3 (did you mean --num-pages?)" in done.stderr
    done = tandem("serve", "--grpc-port", "0", "--http-port", "0", "--model", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"tandem: {tmp_path} is not a model directory") and done.stderr.count("\n") == 1


def test_errors_found_by_workers(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Ray is up and the weights are loaded by then."""
    from safetensors.numpy import load_file, save_file

    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_model_dir / name).read_bytes())
    weights = load_file(tiny_model_dir / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors")
    done = tandem("serve", "--grpc-port", "0", "--http-port", "0", "--both", "1", "--model", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("tandem: both-0: ") and "model.norm.weight" in done.stderr
    assert done.stderr.count("\n") == 1
