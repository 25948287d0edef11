import pytest

from tandem.deploy.config import otlp_endpoint as module
from tandem.deploy.config.otlp_endpoint import otlp_endpoint

BASE, OWN = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@pytest.mark.parametrize(
    ("configured", "environment", "endpoint"),
    [
        ("", {}, ""),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/", {BASE: "http://other"}, "http://c:4318/v1/traces"),
        ("c:4318", {}, "c:4318"),
        ("https://c/own/path", {OWN: "http://other"}, "https://c/own/path"),
        ("", {BASE: "http://c:4318"}, "http://c:4318/v1/traces"),
        ("", {BASE: "http://c:4318/prefix/"}, "http://c:4318/prefix/v1/traces"),
        ("", {BASE: "http://c:4318", OWN: "http://c:9999/as-it-is"}, "http://c:9999/as-it-is"),
        ("", {BASE: "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http://c:4318/v1/traces"),
        ("", {BASE: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, ""),
        ("http://c:4318", {"OTEL_SDK_DISABLED": "true"}, ""),
    ],
)
def test_the_option_goes_before_the_variables(configured: str, environment: dict[str, str], endpoint: str) -> None:
    assert otlp_endpoint(configured, environment) == endpoint


def test_variables_of_the_host_keep_nothing_from_starting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {BASE: "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert otlp_endpoint("", environment) == ""
    assert "asks for grpc, and spans are sent by http/protobuf alone" in capsys.readouterr().err
    for url in ("c:4317", "localhost", "unix:///run/collector", "https://c/v1/traces?key=secret"):
        assert otlp_endpoint("", {OWN: url}) == otlp_endpoint("", {BASE: url}) == ""
        told = capsys.readouterr().err
        assert "says no URL like http://localhost:4318" in told and "secret" not in told
    monkeypatch.setattr(module, "has_otlp", lambda: False)
    assert otlp_endpoint("", {BASE: "http://c:4318"}) == ""
    assert "pip install 'tandem-llm[otlp]'" in capsys.readouterr().err
