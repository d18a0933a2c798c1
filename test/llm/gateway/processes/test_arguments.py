"""Arguments of a gateway with several processes that are refused, before any starts."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from torchrl_sglang import Gateway
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.dialects.openai import Completions
from torchrl_sglang.gateway.dialects.registry import DIALECTS
from torchrl_sglang.gateway.processes.addresses import ProcessAddresses


class Locked(Completions):
    """A dialect that other processes cannot have."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_processes": 0}, "num_processes must be an integer of at least 1, got 0"),
        ({"num_processes": True}, "num_processes.*got True"),
        ({"num_processes": "2"}, "num_processes.*got '2'"),
        ({"num_processes": 2.0}, "num_processes.*got 2.0"),
        ({"num_processes": 65}, "num_processes=65 must be at most 64"),
        ({"num_processes": 3, "port": 65_533}, "port=65533: 3 processes"),
        ({"dialects": [Locked()]}, "dialects cannot be given to other processes"),
        (
            {"public_url": "https://gateway.example.org", "api_key": "k"},
            "does not say which of num_processes=2.*put {process} where its number",
        ),
        (
            {"public_url": "https://0.0.0.0/{process}", "api_key": "k"},
            "public_url=.*must be the address",
        ),
        ({"public_url": 5, "api_key": "k"}, "public_url"),
    ],
)
def test_what_is_refused(
    fake_engine: Any, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Gateway(fake_engine, **{"num_processes": 2, **arguments})


def test_a_tokenizer_that_cannot_be_pickled(fake_engine: Any) -> None:
    tokenizer = fake_engine.get_tokenizer()
    tokenizer.lock = threading.Lock()
    with pytest.raises(
        ConfigurationError, match="tokenizer cannot be.*leave num_processes"
    ):
        Gateway(fake_engine, tokenizer=tokenizer, num_processes=2)
    # One process needs no copy of it.
    Gateway(fake_engine, tokenizer=tokenizer)


def test_addresses_of_processes() -> None:
    public = ProcessAddresses(
        host="::1", port=80, public_url="https://a.org/{process}/x/", num_workers=2
    )
    assert [public.port_of(process) for process in range(3)] == [80, 81, 82]
    assert public.base(2, 82) == "https://a.org/2/x"
    assert public.reachable(82) == "http://[::1]:82"
    own = ProcessAddresses(host="0.0.0.0", port=0, public_url=None, num_workers=2)
    assert own.port_of(2) == 0
    assert own.base(2, 82) == "http://0.0.0.0:82"
    assert own.reachable(82) == "http://127.0.0.1:82"


def test_a_placeholder_of_one_process_is_the_gateway_itself(fake_engine: Any) -> None:
    gateway = Gateway(
        fake_engine,
        public_url="https://a.org/{process}",
        api_key="k",
        dialects=DIALECTS,
    )
    assert gateway.public_url == "https://a.org/0"
