import pytest

from tandem.kvtransfer.config import LinkConfig
from tandem.kvtransfer.transports.table import TRANSPORTS


def test_every_transport_may_be_named() -> None:
    assert LinkConfig(TRANSPORTS.names).transports == TRANSPORTS.names


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one transport"):
        LinkConfig(())
    with pytest.raises(ValueError, match="`transport` must be one of nvlink, nccl, shared_memory, tcp"):
        LinkConfig(("shared_memory", "carrier_pigeon"))


def test_custom_transport_is_named_by_import_path() -> None:
    LinkConfig(("tests.fakes.transport:ScriptedOpening",))
