"""Every configuration that travels survives the round trip; any other message is refused."""

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

from tandem.adapters import AdapterEntry
from tandem.config import ClusterTls, ClusterTlsFiles, LogConfig, TlsConfig
from tandem.deploy.config.bounds import Bounds
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.host.ports import ClientAddresses, ClusterPorts
from tandem.deploy.joined.supervisor_actor import SupervisorOrder
from tandem.deploy.launcher import ClusterState
from tandem.deploy.nodes.node_facts import NodeFacts
from tandem.deploy.nodes.node_placement import SavedPlacement
from tandem.deploy.nodes.port_holder import WantedPort
from tandem.deploy.nodes.region_keeper import KeptRegion, RegionOrder
from tandem.deploy.on_ray.codec import decode, encode
from tandem.deploy.supervise.node_stores import SavedStore
from tandem.pagestore.config import StoreDisk
from tandem.router.config import RouterAddresses
from tandem.worker.config import StoreAccess
from tests.fakes.scripted_adapters import make_ref

CONFIG = ClusterConfig("m", api_keys=("a-secret", "another 3"), served_model_name=("a", "b"), chat_template="t.jinja")
TLS = ClusterTls(b"-----BEGIN", b"\xff\x00", b"key")
ADDRESSES = RouterAddresses("10.0.0.1:1", "10.0.0.1:2", "10.0.0.1:3")
ROUTER = replace(
    CONFIG.router("/m", "m", 4096, "token"),
    tls=TlsConfig("cert", "key"),
    cluster_tls=ClusterTlsFiles("ca", "cert", "key"),
    routers={"router-0": ADDRESSES},
    workers={"both-0": "both"},
    adapters=(AdapterEntry("sql", 0, "", make_ref("a")),),
    log=LogConfig("debug", "/logs"),
)
PLAN = CONFIG.worker("both-0", "both", CONFIG.engine("/m", 3), 4096, "token")
PLAN = replace(
    PLAN,
    worker=replace(PLAN.worker, cluster_tls=TLS),
    itl_objective_s=float("inf"),
    stores={"10.0.0.2": StoreAccess("10.0.0.2:7", "/socket", 2)},
)
PLACEMENT = SavedPlacement(
    ("both-0",),
    ("router-0",),
    {"both-0": ({"CPU": 1.0}, "ab" * 18)},
    {"10.0.0.1": NodeFacts("1", "s", "m", "", [("lo", "127.0.0.1"), ("eth0", "10.0.0.1")], 4, 5)},
    {"router-0": "10.0.0.1"},
    {"both-0": "10.0.0.2"},
    {"10.0.0.1": (1, [WantedPort("10.0.0.1", 1, "grpc_port")])},
    {"store-0": "10.0.0.2"},
)
REGION = RegionOrder(2**20, "10.0.0.2:0", "", "token", StoreDisk("/d", 2**30), "a-secret")
STORE = CONFIG.store("store-0", "10.0.0.2:7", ("10.0.0.1:3",), "/socket", "token", "rack")
STATE = ClusterState(
    "token",
    TLS,
    Path("/m"),
    ClusterPorts(ClientAddresses("10.0.0.1:1", "10.0.0.1:2"), {"router-0": ADDRESSES}),
    {"router-0": ROUTER},
    {"both-0": PLAN},
    {"both-0": 2},
    PLACEMENT,
    {"store-0": SavedStore("10.0.0.2", KeptRegion("10.0.0.2:7", "/socket", "rack", "folder"), 1)},
    True,
    1.5,
    ["router-0"],
    {"any": Bounds(1, 8)},
    {"any": 12.5},
)
ORDER = SupervisorOrder(CONFIG, {"HF_TOKEN": "a-secret"})
MESSAGES = (ORDER, STATE, replace(STATE, nodes=None, cluster_tls=None, drains_until=None), ROUTER, PLAN, REGION, STORE)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_round_trip(message: Any) -> None:
    decoded = decode(type(message), encode(message))
    assert decoded == message and encode(decoded) == encode(message)


def changed(config: Any) -> Iterator[Any]:
    """Yields the configuration with one field changed at a time."""
    for field in fields(config):
        match getattr(config, field.name):
            case bool(value):
                others: list[Any] = [not value]
            case int(value) | float(value):
                others = [value + 1, value + 0.5] if isinstance(value, float) else [value + 1]
            case str(value):
                others = ["none", "off", "/some/file", "package.module:Class"]
            case (*_,) as value:
                others = [(*value, value[0] if value and not isinstance(value[0], str) else "package.module:Class")]
            case _:
                continue
        for other in others:
            try:
                yield replace(config, **{field.name: other})
            except ValueError:
                continue


@pytest.mark.parametrize(
    "config",
    [CONFIG, ROUTER, PLAN.worker, PLAN.worker.engine, PLAN.prefill, PLAN.decode, PLAN.links, PLAN],
    ids=lambda config: type(config).__name__,
)
def test_no_field_is_lost(config: Any) -> None:
    seen = list(changed(config))
    assert seen
    for other in seen:
        assert decode(type(config), encode(other)) == other


@pytest.mark.parametrize(
    "message",
    [b"", b"\xff", b"null", b"[" * 100_000, b'{"body": null}', encode(PLAN), encode(STATE), pickle.dumps(ORDER)],
    ids=["empty", "no text", "null", "deep", "no body", "plan", "state", "pickle"],
)
def test_other_messages_are_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="the message is not a SupervisorOrder of this version of tandem"):
        decode(SupervisorOrder, message)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"no_such_field": "a-secret"}, "config: no_such_field: Unexpected"),
        ({"num_pages": "a-secret"}, "config: num_pages: Input should be a valid integer"),
        ({"num_pages": 1.5}, "config: num_pages: Input should be a valid integer"),
        ({"num_pages": True}, "config: num_pages: Input should be a valid integer"),
        ({"num_pages": -1}, "num_pages must not be negative"),
        ({"api_keys": [1]}, "config: api_keys: 0: Input should be a valid string"),
        ({"model": None}, "config: model: Input should be a valid string"),
    ],
)
def test_wrong_fields_are_named_and_their_values_are_not(change: dict[str, Any], refusal: str) -> None:
    message = json.loads(encode(ORDER))
    message["body"]["config"] |= change
    with pytest.raises(ValueError, match=refusal) as raised:
        decode(SupervisorOrder, json.dumps(message).encode())
    assert "a-secret" not in str(raised.value)


@pytest.mark.parametrize("name", ["model", "api_keys", "num_pages"])
def test_missing_fields_are_refused_even_with_a_default(name: str) -> None:
    message = json.loads(encode(ORDER))
    del message["body"]["config"][name]
    with pytest.raises(ValueError, match=r"Field required|it lacks fields"):
        decode(SupervisorOrder, json.dumps(message).encode())


@dataclass(frozen=True)
class Wrong:
    keys: str


def test_a_value_of_the_wrong_type_warns_of_no_secret(recwarn: pytest.WarningsRecorder) -> None:
    message = encode(Wrong(("a-secret",)))  # type: ignore[arg-type]
    # Collected garbage of other tests may warn meanwhile.
    assert not any("a-secret" in str(warning.message) for warning in recwarn.list)
    with pytest.raises(ValueError, match="keys: Input should be a valid string"):
        decode(Wrong, message)


def test_strings_that_are_not_unicode_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be sent to other processes"):
        encode(ClusterConfig("/data/caf\udce9"))
