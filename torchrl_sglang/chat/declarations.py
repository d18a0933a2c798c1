"""One copy of the tools and template variables that many requests repeat.

Each request brings its tools, which are large. Equal ones become one object, so that
they are compared, written by a template and kept once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from torchrl_sglang.chat.messages import settings_key
from torchrl_sglang.chat.prompt_settings import PromptSettings


class Declaration(dict[str, Any]):
    """A tool, or a part of one, that nobody changes any more.

    It has no attribute that a template could take for one of its keys.
    """

    __slots__ = ("__texts",)

    def __init__(self, given: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        super().__init__(
            (key, Declaration(each) if type(each) is dict else each)
            for key, each in dict(given).items()
        )
        self.__texts: dict[Hashable, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


def write_once(filter_: Callable[..., str]) -> Callable[..., str]:
    """Returns a filter of templates that writes each declaration once."""

    def write(value: Any, *args: Any, **options: Any) -> str:
        if type(value) is not Declaration:
            return filter_(value, *args, **options)
        texts: dict[Hashable, str] = value._Declaration__texts  # type: ignore[attr-defined]
        key = (filter_, args, tuple(sorted(options.items())))
        try:
            known = texts.get(key)
        except TypeError:
            # An option that cannot be compared.
            return filter_(value, *args, **options)
        if known is None:
            known = texts[key] = filter_(value, *args, **options)
        return known

    return write


_known: WeakValueDictionary[bytes, PromptSettings] = WeakValueDictionary()
_lock = threading.Lock()


def known_settings(given: PromptSettings) -> PromptSettings:
    """Returns the one object for equal settings; it shares nothing with the given one.

    Settings that are no JSON are returned as they are.

    Examples:
        >>> from torchrl_sglang.chat.declarations import known_settings
        >>> from torchrl_sglang.chat.prompt_settings import PromptSettings
        >>> one, other = (PromptSettings(tools=[{"a": 1}]) for _ in range(2))
        >>> known_settings(one) is known_settings(other)
        True
    """
    if given.digest:
        return given
    parts = [list(given.tools), dict(given.template_kwargs)]
    try:
        encoded = msgspec.json.encode(parts)
        if (found := _known.get(encoded)) is not None:
            same = [list(found.tools), dict(found.template_kwargs)] == parts
            return found if same else given
        tools, variables = msgspec.json.decode(encoded)
        if [tools, variables] != parts:
            return given
    except (TypeError, ValueError, OverflowError, RecursionError):
        return given
    with _lock:
        if (found := _known.get(encoded)) is None:
            found = PromptSettings(
                tools=[Declaration(tool) for tool in tools], template_kwargs=variables
            )
            object.__setattr__(found, "digest", settings_key(found.key()))
            _known[encoded] = found
    return found
