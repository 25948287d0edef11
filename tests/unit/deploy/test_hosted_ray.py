"""What a supervisor finds of an earlier life, with Ray's store of keys played by the test."""

import pytest

from deploy import hosted_ray
from deploy.hosted_ray import HostedRay


class FakeRay:
    """Attributes: actor_id: of the process."""

    def __init__(self) -> None:
        self.actor_id = "a"
        self._kept: dict[tuple[bytes, bytes], bytes] = {}

    def get_runtime_context(self) -> "FakeRay":
        return self

    def get_actor_id(self) -> str:
        return self.actor_id

    def _internal_kv_put(self, key: bytes, value: bytes, *, overwrite: bool, namespace: bytes) -> None:
        assert overwrite
        self._kept[namespace, key] = value

    def _internal_kv_get(self, key: bytes, *, namespace: bytes) -> bytes | None:
        return self._kept.get((namespace, key))


def test_only_what_the_same_supervisor_saved_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was ended for good may have left its state, and another may have begun under its name since."""
    fake = FakeRay()
    monkeypatch.setattr(hosted_ray, "ray", fake)
    monkeypatch.setattr(hosted_ray, "internal_kv", fake)
    hosted = HostedRay("127.0.0.1:1", "chat")
    assert hosted.saved() is None
    hosted.save({"workers": 2})
    assert hosted.saved() == {"workers": 2} and HostedRay("127.0.0.1:1", "other").saved() is None
    fake.actor_id = "b"
    assert hosted.saved() is None
