"""Clients that offer HTTP/2 by default are served over HTTP/1.1."""

import json
import re
import shutil
import subprocess

import pytest

from tests.clients.conftest import Served
from tests.clients.page import Row
from tests.clients.table import PROGRAMS, SCRIPTS

pytestmark = pytest.mark.clients

TIMEOUT_S = 120.0
CHECKS = ("models", "chat completions", "chat completions, streamed")
ASKED = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4, "min_tokens": 4}


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def is_whole(listed: str, answered: str, streamed: str) -> bool:
    return (
        json.loads(listed)["object"] == "list"
        and json.loads(answered)["usage"]["completion_tokens"] == ASKED["max_tokens"]
        and streamed.rstrip().endswith("data: [DONE]")
    )


@pytest.mark.skipif(shutil.which("curl") is None, reason="NOT TESTED: curl is missing")
def test_curl(served: Served, passed: dict[str, Row]) -> None:
    curl = ("curl", "--silent", "--show-error", "--fail-with-body", "--http2")
    chat = f"{served.url}/v1/chat/completions"
    answers = [output(*curl, f"{served.url}/v1/models")]
    answers += [output(*curl, "--json", json.dumps({**ASKED, "stream": stream}), chat) for stream in (False, True)]
    assert is_whole(*answers), answers
    version = output("curl", "--version").split()[1]
    passed["curl"] = Row("curl", version, PROGRAMS["curl"], CHECKS)


@pytest.mark.skipif(shutil.which("javac") is None, reason="NOT TESTED: a JDK is missing")
def test_java(served: Served, passed: dict[str, Row]) -> None:
    printed = output("java", str(SCRIPTS / "Ask.java"), served.url, json.dumps(ASKED))
    assert is_whole(*printed.split("\n--\n")), printed
    [version] = re.findall(r"javac (\S+)", output("javac", "-version"))
    passed["java.net.http"] = Row("java.net.http", version, PROGRAMS["java.net.http"], CHECKS)
