"""Inputs of a prompt beside its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class PromptSettings:
    """Tools and template variables of a prompt."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Declarations of the tools, in OpenAI's form."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template, such as ``enable_thinking``."""
    digest: bytes = field(default=b"", init=False, compare=False, repr=False)
    """Hash for comparisons, set by :func:`.known_settings`; empty otherwise."""

    def key(self) -> list[Any]:
        """Returns the values for comparisons."""
        return [list(self.tools), dict(self.template_kwargs)]


NO_PROMPT_SETTINGS = PromptSettings()
