"""Messages that requests repeat are read once.

Each request of a conversation brings all of its earlier messages once more. Those that
are the same become one object, and what was made of it is kept beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from itertools import zip_longest
from typing import Any, TypeVar

_T = TypeVar("_T")


class Repeated(dict[str, Any]):
    """An object of JSON that several requests have; nobody changes it."""

    __slots__ = ("__made",)

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.__made: dict[Any, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


def read_once(read: Callable[[str, Any], _T]) -> Callable[[str, Any], _T]:
    """Returns a function of a name and JSON that reads each :class:`Repeated` once.

    The name is for errors only, and what is returned is changed by nobody.
    """

    @wraps(read)
    def read_known(name: str, given: Any) -> _T:
        if type(given) is not Repeated:
            return read(name, given)
        made: dict[Any, _T] = given._Repeated__made  # type: ignore[attr-defined]
        if (found := made.get(read)) is None:
            found = made[read] = read(name, given)
        return found

    return read_known


class LatestMessages:
    """Messages of the latest request of a session, as its client sent them.

    For one thread.

    Examples:
        >>> from torchrl_sglang.chat.repeated import LatestMessages
        >>> latest = LatestMessages()
        >>> one, two = ({"messages": [{"content": "Hi"}]} for _ in range(2))
        >>> latest.share(one)["messages"][0] is latest.share(two)["messages"][0]
        True
    """

    def __init__(self) -> None:
        self._known: list[Any] = []

    def share(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns a request whose messages are the latest one's where they are equal.

        Those of texts only: equal numbers can be written in several ways. Fields have
        to be in the same order, as templates write arguments in theirs.
        """
        given = body.get("messages")
        if type(given) is not list:
            return body
        try:
            messages = [
                own
                if type(own) is Repeated and _is_same(own, each)
                else _repeated(each)
                for own, each in zip_longest(self._known[: len(given)], given)
            ]
        except RecursionError:
            # The reader of messages says what is wrong.
            return body
        self._known = list(messages)
        return {**body, "messages": messages}


def _repeated(given: Any) -> Any:
    return Repeated(given) if type(given) is dict and has_texts_only(given) else given


def _is_same(own: Repeated, given: Any) -> bool:
    return own == given and _has_order_of(own, given)


def _has_order_of(own: Any, given: Any) -> bool:
    """Returns whether the fields of equal values are in the same order."""
    if isinstance(own, dict):
        return [*own] == [*given] and all(
            _has_order_of(value, given[name])
            for name, value in own.items()
            if type(value) is not str
        )
    return type(own) is str or all(map(_has_order_of, own, given))


def has_texts_only(value: Any) -> bool:
    """Returns whether equal values are the same; numbers can be equal to booleans."""
    if isinstance(value, str):
        return True
    if isinstance(value, Mapping):
        return all(map(has_texts_only, value.values()))
    return isinstance(value, list) and all(map(has_texts_only, value))
