"""Shared tools and template variables of repeated requests.

Each request brings its tools, which are large. Equal tools become a single object,
compared, rendered and stored once.
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
    """A tool, or a part of a tool, immutable by convention.

    It has no attribute confusable with a key in a template.
    """

    __slots__ = ("__texts",)

    def __init__(self, given: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        super().__init__(
            (key, Declaration(value) if type(value) is dict else value)
            for key, value in dict(given).items()
        )
        self.__texts: dict[Hashable, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


def write_once(filter_: Callable[..., str]) -> Callable[..., str]:
    """Returns a template filter to write each declaration once."""

    def write(value: Any, *args: Any, **options: Any) -> str:
        if type(value) is not Declaration:
            return filter_(value, *args, **options)
        texts: dict[Hashable, str] = value._Declaration__texts  # type: ignore[attr-defined]
        key = (filter_, args, tuple(sorted(options.items())))
        try:
            text = texts.get(key)
        except TypeError:
            # An unhashable option.
            return filter_(value, *args, **options)
        if text is None:
            text = texts[key] = filter_(value, *args, **options)
        return text

    return write


_known: WeakValueDictionary[bytes, PromptSettings] = WeakValueDictionary()
_lock = threading.Lock()


def known_settings(given: PromptSettings) -> PromptSettings:
    """Returns the shared object for equal settings, a copy of the first settings.

    Settings other than JSON are returned as they are.
    """
    if given.digest:
        return given
    parts = [list(given.tools), dict(given.template_kwargs)]
    try:
        encoded = msgspec.json.encode(parts)
        if (shared := _known.get(encoded)) is not None:
            is_equal = [list(shared.tools), dict(shared.template_kwargs)] == parts
            return shared if is_equal else given
        tools, variables = msgspec.json.decode(encoded)
        if [tools, variables] != parts:
            return given
    except (TypeError, ValueError, OverflowError, RecursionError):
        return given
    with _lock:
        if (shared := _known.get(encoded)) is None:
            shared = PromptSettings(
                tools=[Declaration(tool) for tool in tools], template_kwargs=variables
            )
            object.__setattr__(shared, "digest", settings_key(shared.key()))
            _known[encoded] = shared
    return shared
