"""Names in braces, and braces that are none."""

from __future__ import annotations

import pytest

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.programs.templates import fill


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{a}-{b}", "1-x{a}"),
        ("{{a}}", "{a}"),
        ('{"a": {}, "b": [{"c": 1}]}', '{"a": {}, "b": [{"c": 1}]}'),
        ('{name="policy", base_url="{b}"}', '{name="policy", base_url="x{a}"}'),
        ("${a} {a:2} { a }", "$1 {a:2} { a }"),
        ("", ""),
    ],
)
def test_what_is_filled_in(text, expected):
    assert fill("It", text, {"a": 1, "b": "x{a}"}) == expected


def test_what_there_is_none_of():
    with pytest.raises(ConfigurationError, match="write|Write {{c}}"):
        fill("It", "{c}", {"a": 1})


def test_half_of_a_character_is_reported():
    with pytest.raises(ConfigurationError, match=r"It has '\\ud83d' in 'cut \\ud83d'"):
        fill("It", "{a}!", {"a": "cut \ud83d"})
