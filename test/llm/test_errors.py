from __future__ import annotations

import copy
import pickle
import re

import pytest

from torchrl_sglang import errors
from torchrl_sglang.errors import SGLangError

ALL = [value for name, value in vars(errors).items() if name.endswith("Error")]
CARRIED = {
    "SGLangError": {"partly": True, "completions": {0: "a response"}},
    "RequestRefusedError": {"status": 400, "index": 3},
    "ServerUnavailableError": {"transient": True, "status": 500},
    "WeightTransferError": {"server_lost": True, "untouched": True},
    "GatewayError": {"status": 429, "code": "a word", "param": "input"},
    "GenerationAbortedError": {"index": 3, "requested": True, "partial": "tokens"},
}
"""Attributes that an error has beside its message."""

LINE = re.compile(r"^    (?P<branches>[│├└─ ]*)(?P<name>\w+)(\((?P<builtin>\w+)\))?")


def drawn_tree() -> dict[str, tuple[str | None, str | None]]:
    """Name -> (parent, built-in base), as the docstring of the module draws them."""
    path: list[str] = []
    tree = {}
    drawing = errors.__doc__.partition("::")[2].partition("\n\nA message")[0]
    for line in drawing.splitlines():
        if not line.strip():
            continue
        found = LINE.match(line)
        depth = len(found["branches"]) // 4
        path[depth:] = [found["name"]]
        tree[found["name"]] = (path[depth - 1] if depth else None, found["builtin"])
    return tree


def test_the_tree_is_the_one_that_is_drawn():
    real = {}
    for error in ALL:
        own = [base for base in error.__bases__ if issubclass(base, SGLangError)]
        others = [base for base in error.__bases__ if not issubclass(base, SGLangError)]
        names = [base.__name__ for base in others if base is not Exception]
        assert len(own) <= 1
        assert len(names) <= 1
        real[error.__name__] = (
            own[0].__name__ if own else None,
            names[0] if names else None,
        )
    assert real == drawn_tree()
    assert len(real) > 20


def carried(error: type[SGLangError]) -> dict[str, object]:
    return {
        name: value
        for base in reversed(error.__mro__)
        for name, value in CARRIED.get(base.__name__, {}).items()
    }


@pytest.mark.parametrize("error", ALL)
@pytest.mark.parametrize(
    "clone",
    [copy.copy, lambda e: pickle.loads(pickle.dumps(e)), lambda e: e.replace()],
    ids=["copy", "pickle", "replace"],
)
def test_errors_pickle(error, clone):
    original = error("The prompt is too long.", **carried(error))
    original.add_note("It is item 3 of 5.")
    found = clone(original)
    assert type(found) is error
    assert str(found) == "The prompt is too long."
    assert vars(found) == vars(original) == {**vars(found), **carried(error)}


@pytest.mark.parametrize("error", ALL)
def test_a_replaced_error_leaves_the_original_as_it_is(error):
    default = error("The prompt is too long.")
    assert all(
        getattr(default, name) != carried(error)[name] for name in carried(error)
    )
    names = {
        name for base in error.__mro__ for name in vars(base).get("__annotations__", ())
    }
    assert names == carried(error).keys(), "Everything is listed above"
    default.__cause__ = ValueError()
    changed = default.replace(note="It is item 3 of 5.", **carried(error))
    assert vars(changed) == {**carried(error), "__notes__": ["It is item 3 of 5."]}
    assert changed.__cause__ is default.__cause__
    assert changed.replace(note="Again.").__notes__ == ["It is item 3 of 5.", "Again."]
    assert changed.__notes__ == ["It is item 3 of 5."]
    assert changed.replace(cause=default).__cause__ is default
    assert not vars(default).keys() & {"__notes__"}
    with pytest.raises(TypeError, match="statsu"):
        default.replace(statsu=400)


def test_errors_are_documented():
    offenders = [
        error
        for error in ALL
        if not error.__doc__ or error.__module__ != "torchrl_sglang.errors"
    ]
    assert offenders == []
