"""Cache of parsed messages for repeated requests.

Each request of a conversation repeats all earlier messages. Equal messages become a
single object, with their parsed form beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from itertools import zip_longest
from typing import Any, TypeVar

_T = TypeVar("_T")


class Repeated(dict[str, Any]):
    """A JSON object shared by several requests; immutable by convention."""

    __slots__ = ("__made",)

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.__made: dict[Any, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


def read_once(read: Callable[[str, Any], _T]) -> Callable[[str, Any], _T]:
    """Decorates a reader to read each :class:`Repeated` once.

    The name is only for errors, and callers must not change the result.
    """

    @wraps(read)
    def read_known(name: str, given: Any) -> _T:
        if type(given) is not Repeated:
            return read(name, given)
        made: dict[Any, _T] = given._Repeated__made  # type: ignore[attr-defined]
        if (result := made.get(read)) is None:
            result = made[read] = read(name, given)
        return result

    return read_known


class LatestMessages:
    """Messages of a session's latest request, as its client received them.

    For use in a single thread.
    """

    def __init__(self) -> None:
        self._known: list[Any] = []

    def share(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns a request with equal messages shared with the latest request.

        Only messages with texts: equal numbers have several formats. Fields must have
        the same order, as templates write arguments in theirs.
        """
        received = body.get("messages")
        if type(received) is not list:
            return body
        try:
            messages = [
                stored
                if type(stored) is Repeated and _is_same(stored, message)
                else _repeated(message)
                for stored, message in zip_longest(
                    self._known[: len(received)], received
                )
            ]
        except RecursionError:
            # The reader of messages reports the error.
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
