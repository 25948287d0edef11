"""Answers in a terminal."""

import io
import signal
import subprocess
import sys
from collections.abc import Generator

import pytest
from rich.console import Console

from tandem.client import TandemClient
from tandem.deploy.cli.terminal import print_timeline, stream_answer
from tandem.v1 import inference_pb2 as pb


class _Answers(TandemClient):
    """Answers every request with the same responses."""

    def __init__(self, *responses: pb.GenerateResponse) -> None:
        self._responses = responses

    def generate(self, request: pb.GenerateRequest, timeout_s: float | None = None) -> Generator[pb.GenerateResponse]:
        yield from self._responses


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("output", "shown"), [(_Terminal, "a\\x1b[2Jb\n"), (io.StringIO, "a\x1b[2Jb\n")])
def test_a_terminal_shows_control_sequences_and_a_pipe_gets_them(
    monkeypatch: pytest.MonkeyPatch, output: type[io.StringIO], shown: str
) -> None:
    written = output()
    monkeypatch.setattr(sys, "stdout", written)
    text, _ = stream_answer(_Answers(*(pb.GenerateResponse(text=t) for t in "a\x1b[2Jb")), pb.GenerateRequest())
    assert written.getvalue() == shown
    assert text == "a\x1b[2Jb"


@pytest.mark.parametrize(("max_tokens", "limit"), [(3, "max_tokens"), (None, "the server's limit")])
def test_a_cut_answer_names_its_limit(monkeypatch: pytest.MonkeyPatch, max_tokens: int | None, limit: str) -> None:
    last = pb.GenerateResponse(finish_reason=pb.FINISH_REASON_LENGTH, text="so", usage=pb.Usage(completion_tokens=3))
    request = pb.GenerateRequest(sampling=pb.SamplingParams(max_tokens=max_tokens))
    errors = _Terminal()
    monkeypatch.setattr(sys, "stderr", errors)
    stream_answer(_Answers(last), request)
    assert errors.getvalue() == f"(answer cut by {limit}, at 3 tokens)\n"


def test_a_reader_that_leaves_ends_a_command_without_a_traceback() -> None:
    # The command writes only after its reader has left.
    code = (
        "import sys, argparse; sys.stdin.read(); from tandem.deploy.cli import main as command\n"
        "def run(arguments):\n print('x' * 100_000, flush=True)\n return 0\n"
        "command._parser = lambda: type('P', (), {'parse_args': lambda self, a: argparse.Namespace(run=run)})()\n"
        "sys.exit(command.main([]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(b"", timeout=60)
    assert (process.returncode, errors) == (128 + signal.SIGPIPE, b"")


def test_a_timeline_tells_what_came_from_the_page_store() -> None:
    usage = pb.Usage(prompt_tokens=96, cached_tokens=80, host_tokens=32, peer_tokens=16, completion_tokens=5)
    for given, words in (
        (usage, "; loaded from the page store: 32 from memory, 16 from other nodes"),
        (pb.Usage(), ""),
    ):
        shown = io.StringIO()
        print_timeline(Console(file=shown, width=200), pb.GenerateResponse(usage=given))
        assert f"{given.completion_tokens} output tokens{words}\n" in shown.getvalue()


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_timeline_says_that_its_pages_are_those_of_the_last_attempt(attempts: int) -> None:
    last = pb.GenerateResponse(
        usage=pb.Usage(prompt_tokens=40), handover=pb.HandoverSummary(attempts=attempts, page_size=16)
    )
    written = io.StringIO()
    print_timeline(Console(file=written, width=200), last)
    assert ("2 attempts: the drafts above" in written.getvalue()) == (attempts > 1)
