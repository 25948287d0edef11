import pytest

from tandem.router.config import RouterConfig
from tandem.router.policies.table import ROUTING_POLICIES
from tests.fakes.router_harness import RouterHarness, run, settle
from tests.fakes.routing import RecordingPolicy, make_candidates, routing_request


@pytest.mark.parametrize("name", ROUTING_POLICIES.names)
def test_every_name_loads_a_policy(name: str) -> None:
    candidates = make_candidates(2, 2)
    assert ROUTING_POLICIES.load(name)().choose(candidates, routing_request()) in candidates
    assert RouterConfig("nowhere", "fake", 400, routing=name).routing == name


def test_custom_policy_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    choices: list[str] = []
    monkeypatch.setattr(
        RecordingPolicy, "choose", lambda self, pairs, request: choices.append(request.session_id) or pairs[-1]
    )

    @run
    async def scenario() -> None:
        h = RouterHarness(1, 2, routing="tests.fakes.routing:RecordingPolicy")
        client = h.request(session_id="s")
        await settle()
        assert client.tracker.decode_worker_id == "d1"
        await client.leave()

    scenario()
    assert choices == ["s"]


def test_unknown_name_lists_choices() -> None:
    with pytest.raises(ValueError, match=r"`routing` must be one of round_robin, .*did you mean 'least_loaded'"):
        RouterConfig("nowhere", "fake", 400, routing="least_load")
