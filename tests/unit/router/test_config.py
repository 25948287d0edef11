from typing import Any

import pytest

from tandem.router import config
from tandem.router.config import RouterConfig


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("grpc_port", 65536, "grpc_port must be between 0 and 65535, not 65536"),
        ("http_port", -1, "http_port must be between 0 and 65535, not -1"),
        (
            "routing",
            "best",
            "`routing` must be one of round_robin, least_loaded, power_of_two, cache_aware, least_cost, or the",
        ),
        ("routing", "package.module:", "`routing` must be one of"),
        ("api_keys", ("a key",), "an API key must be printable ASCII without spaces"),
        ("api_keys", ("key 1.5",), "the highest priority "),
        ("api_keys", (f"key {2**31}",), "the highest priority "),
        ("api_keys", ("key 1", "key 2"), "api_keys has one key twice"),
        ("max_requests_per_key", -1, "max_requests_per_key must not be negative, but is -1"),
        ("max_attempts", 0, "max_attempts must be above 0, not 0"),
        ("request_timeout_s", 0.0, "request_timeout_s must be above 0"),
        ("generation_config", "vllm", "generation_config must be one of auto, none, not 'vllm'"),
        ("allowed_origins", ("https://one.example/",), "without a path, not 'https://one.example/'"),
        ("allowed_origins", ("one.example",), "allowed_origins must be"),
        ("root_path", "tandem", "root_path must begin with a slash and not end with one"),
        ("root_path", "/tandem/", "root_path must begin with a slash and not end with one"),
        ("otlp_endpoint", "collector:4318", "otlp_endpoint must be a URL like http://localhost:4318/v1/traces, not"),
        ("max_body_bytes", -5, "max_body_bytes must be above 0, not -5"),
    ],
)
def test_a_value_that_means_nothing_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterConfig("nowhere", "fake", 400, **{field: value})


@pytest.mark.parametrize(
    "origin", ["*", "https://one.example", "http://localhost:3000", "http://[::1]:80", "chrome-extension://abc"]
)
def test_origins_are_as_browsers_send_them(origin: str) -> None:
    assert RouterConfig("nowhere", "fake", 400, allowed_origins=(origin,), root_path="/a/b-c").allowed_origins


def test_a_class_is_looked_for_only_when_it_is_needed() -> None:
    # The class may be missing where the configuration is read.
    assert RouterConfig("nowhere", "fake", 400, routing="not_installed.policies:Mine").routing


def test_secrets_are_not_printed() -> None:
    config = RouterConfig(
        "nowhere", "fake", 400, api_keys=("secret-key",), cluster_token="secret-token", namespace_secret="secret-names"
    )
    assert "secret" not in repr(config)


def test_spans_without_their_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "has_otlp", lambda: False)
    with pytest.raises(ValueError, match=r"otlp_endpoint needs packages .* pip install 'tandem-llm\[otlp\]'"):
        RouterConfig("nowhere", "fake", 400, otlp_endpoint="http://localhost:4318/v1/traces")
    assert RouterConfig("nowhere", "fake", 400).otlp_endpoint == ""
