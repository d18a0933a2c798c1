from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

from torchrl_sglang import errors
from torchrl_sglang.errors import SGLangError

ALL = [value for value in vars(errors).values() if inspect.isclass(value)]
CARRIED = {
    "SGLangError": {"partly": True, "completions": {0: "a response"}},
    "RequestRefusedError": {"status": 400, "index": 3},
    "ServerUnavailableError": {"transient": True, "status": 500},
    "WeightTransferError": {"untouched": True},
    "GenerationAbortedError": {"index": 3, "requested": True},
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
    assert sorted(real) == errors.__all__


@pytest.mark.parametrize("error", ALL)
@pytest.mark.parametrize("clone", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_errors_pickle(error, clone):
    original = error("What failed, and what to do next.")
    for name, value in CARRIED.get(error.__name__, {}).items():
        assert hasattr(error, name), "The default"
        setattr(original, name, value)
    original.add_note("It is item 3 of 5.")
    found = clone(original)
    assert type(found) is error
    assert str(found) == "What failed, and what to do next."
    assert vars(found) == vars(original)


def test_everything_that_errors_carry_is_listed():
    carried = {error.__name__: list(error.__annotations__) for error in ALL}
    found = {name: names for name, names in carried.items() if names}
    assert found == {name: list(values) for name, values in CARRIED.items()}


@pytest.mark.parametrize("error", ALL)
def test_errors_are_documented(error):
    assert error.__doc__
    assert error.__module__ == "torchrl_sglang.errors"
