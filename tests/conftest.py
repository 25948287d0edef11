"""Fixtures that are expensive or shared."""

import gc
import signal
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

# Example durations depend more on the machine's load than on the code.
hypothesis.settings.register_profile("tandem", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tandem")

# A background shell may have these signals ignored; the tests' processes must not inherit that.
for _signal in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, signal.default_int_handler if _signal == signal.SIGINT else signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the modules and tests, which live to the end, all collections of garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def no_collections() -> Iterator[None]:
    """For tests that measure CPU time: collecting the garbage of thousands of tests takes 0.2 s, wherever it falls."""
    gc.disable()
    yield
    gc.enable()


@dataclass(frozen=True)
class Certificates:
    """PEM files: an authority, a server and a client certificate signed by it, and another authority."""

    ca: str
    cert: str
    key: str
    client_cert: str
    client_key: str
    other_ca: str


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The demo model as a Hugging Face directory, converted once per machine."""
    from tandem.engine.weights.resolve import resolve_model

    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def router_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a router reads of a model, with a length of 64 tokens."""
    import tokenizers

    directory = tmp_path_factory.mktemp("router-model")
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text('{"vocab_size": 10, "max_position_embeddings": 64}')
    return directory


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    import trustme

    directory = tmp_path_factory.mktemp("certificates")
    authority, other = trustme.CA(), trustme.CA()
    server, client = authority.issue_cert("localhost", "127.0.0.1"), authority.issue_cert("client")
    blobs = {
        "ca": authority.cert_pem,
        "cert": server.cert_chain_pems[0],
        "key": server.private_key_pem,
        "client_cert": client.cert_chain_pems[0],
        "client_key": client.private_key_pem,
        "other_ca": other.cert_pem,
    }
    for name, blob in blobs.items():
        blob.write_to_path(directory / f"{name}.pem")
    return Certificates(**{name: str(directory / f"{name}.pem") for name in blobs})
