"""Which LoRA adapters are wanted, from what servers hold, without servers."""

from __future__ import annotations

import pytest

from torchrl_sglang.backends.fleet.adapters import (
    DesiredAdapter,
    catch_up,
    find_wanted,
    newest_loads,
    served_names,
)
from torchrl_sglang.backends.lora.names import (
    check_name,
    is_published,
    load_number,
    make_served_name,
    parse_served_name,
)
from torchrl_sglang.backends.lora.payload import AdapterPayload
from torchrl_sglang.errors import ConfigurationError


def own(served_as: str, base: str = "5") -> dict[str, DesiredAdapter]:
    """What an engine object wants that has loaded an adapter itself."""
    adapter = parse_served_name(served_as)
    return {
        adapter.name: DesiredAdapter(
            adapter=adapter, content=AdapterPayload(), base=base
        )
    }


def found(before, *held, ignored=(), latest=None, default=None) -> set[str]:
    wanted = find_wanted(
        before, held, ignored=ignored, latest=latest or {}, default=default, base="5"
    )
    return set(served_names(wanted))


def test_a_served_name_says_what_it_is():
    served_as = make_served_name("org/policy", "7", published=True)
    adapter = parse_served_name(served_as)
    assert (adapter.name, adapter.version) == ("org/policy", "7")
    assert is_published(served_as)
    assert not is_published(make_served_name("style", None, published=False))
    assert load_number(served_as) < load_number(make_served_name("a", "1", published=1))
    # Other programs choose names of their own.
    assert (load_number("theirs"), load_number("#")) == (0, 0)
    with pytest.raises(ConfigurationError, match="'a@b'"):
        check_name("a@b")


def test_an_adapter_is_wanted_when_every_server_holds_it():
    assert found({}, {"a~#1", "b~#2"}, {"a~#1"}) == {"a~#1"}
    assert found({}, {"a~#1"}, {"a~#1"}, ignored=["a~#1"]) == set()


def test_the_newest_load_of_a_name_is_wanted():
    assert found({}, {"a@1#1", "a@2#f", "theirs"}) == {"a@2#f", "theirs"}
    # A replaced load may outlive its replacement.
    assert found({}, {"a@1#1"}, latest={"a": 2}) == set()


def test_an_own_load_gives_way_to_a_newer_one_only():
    before = own("a@2#2")
    assert found(before, {"a@1#1"}) == {"a@2#2"}
    assert found(before, {"a@3#3"}) == {"a@3#3"}
    assert found(before, {"b~#1"}) == {"b~#1"}


def test_the_default_stays_while_one_server_holds_it():
    before = newest_loads(["a@2#2"], "5")
    assert found(before, {"a@2#2"}, set(), default="a") == {"a@2#2"}
    assert found(before, {"a@2#2"}, set(), default=None) == set()
    assert found(before, set(), set(), default="a") == set()


def test_whole_weights_replace_what_is_published():
    published, selected = own("a@6#1")["a"], own("a~#1")["a"]
    assert [published.is_replaced(version) for version in "567"] == [False, False, True]
    assert not selected.is_replaced("7")


def test_the_first_server_that_runs_again_says_what_was_replaced():
    before = own("a@6#1") | own("b~#2")
    assert set(served_names(catch_up(before, [], "5"))) == {"a@6#1", "b~#2"}
    assert set(served_names(catch_up(before, [], "7"))) == {"b~#2"}
    assert set(served_names(catch_up(before, ["a@8#9"], "7"))) == {"a@8#9", "b~#2"}
