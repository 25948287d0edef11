"""Proxies in front of a cluster, as processes of this test on loopback ports."""

import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
# LiteLLM imports for a minute on a busy machine.
START_S = 400.0
# LiteLLM starts with none but a strong one.
KEY = f"sk-{secrets.token_hex(24)}"
STOP_S = 20.0

# What a package of nginx does without a word about a server that streams: HTTP/1.0 to it, buffers, and gzip for every
# type that compresses well.
STOCK = """
    gzip on;
    gzip_types text/plain application/json text/event-stream;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://{upstream};
        }}
    }}
"""


def documented() -> str:
    """Return the configuration of docs/deploy.md, as a template."""
    [block] = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs/deploy.md").read_text(), re.DOTALL)
    escaped = block.replace("{", "{{").replace("}", "}}")
    replaced, count = re.subn(r"listen 80;", "listen 127.0.0.1:{port};", escaped)
    replaced, more = re.subn(r"127\.0\.0\.1:8000", "{upstream}", replaced)
    assert count and more
    return replaced


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def nginx_version(command: str) -> str:
    printed = subprocess.run([command, "-v"], capture_output=True, text=True, check=True).stderr
    return printed.strip().rpartition("/")[2]


@contextmanager
def nginx(command: str, servers: str, upstream: str, directory: Path) -> Iterator[str]:
    """Yield the address of an nginx. Args: servers: template of the http block's content; upstream: "host:port"."""
    port = free_port()
    temporary = "".join(
        f"    {kind}_temp_path {directory}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (directory / "nginx.conf").write_text(
        f"daemon off;\nmaster_process off;\npid {directory}/pid;\nerror_log {directory}/error.log;\n"
        f"events {{}}\nhttp {{\n    access_log off;\n{temporary}{servers.format(port=port, upstream=upstream)}}}\n"
    )
    with _running([command, "-p", str(directory), "-c", str(directory / "nginx.conf")], port, directory):
        yield f"127.0.0.1:{port}"


@contextmanager
def litellm(python: Path, model: str, upstream: str, directory: Path) -> Iterator[str]:
    """Yield the address of a LiteLLM proxy. Args: python: of an environment with litellm[proxy]."""
    port = free_port()
    entry = (
        f"  - model_name: {{name}}\n    litellm_params:\n      model: {{provider}}/{model}\n"
        f"      api_base: http://{upstream}/v1\n      api_key: none\n"
    )
    models = "".join(
        entry.format(name=name, provider=provider) for name, provider in ((model, "openai"), ("vllm", "hosted_vllm"))
    )
    # Without cancel_on_disconnect only streams end with their clients.
    settings = "litellm_settings:\n  num_retries: 0\ngeneral_settings:\n  cancel_on_disconnect: true\n"
    (directory / "config.yaml").write_text(f"model_list:\n{models}{settings}")
    command = [str(python.with_name("litellm")), "--config", str(directory / "config.yaml")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    # Otherwise it contacts its makers' server first.
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_DOCS": "True", "LITELLM_MASTER_KEY": KEY}
    with _running(command, port, directory, environment):
        yield f"127.0.0.1:{port}"


@contextmanager
def _running(
    command: list[str], port: int, directory: Path, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OPENAI"))}
    with (directory / "output").open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**inherited, **(environment or {})}
        )
    try:
        deadline = time.monotonic() + START_S
        while not _listens(port):
            assert process.poll() is None and time.monotonic() < deadline, (directory / "output").read_text()[-2000:]
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
