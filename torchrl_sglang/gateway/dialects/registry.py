"""Registry of the dialects of every gateway."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_sglang.gateway.dialects.anthropic import Messages
from torchrl_sglang.gateway.dialects.base import Dialect
from torchrl_sglang.gateway.dialects.openai import Completions
from torchrl_sglang.gateway.dialects.responses.dialect import Responses

DIALECTS: tuple[Dialect, ...] = (Completions(), Responses(), Messages())
"""The first dialect answers requests outside of all dialects."""


def find_dialect(dialects: Sequence[Dialect], path: str) -> Dialect:
    """Returns the dialect of a request's path, even without a route.

    Examples:
        >>> type(find_dialect(DIALECTS, "/sessions/a/v1/messages")).__name__
        'Messages'
        >>> type(find_dialect(DIALECTS, "/health")).__name__
        'Completions'
    """
    for dialect in dialects:
        paths = [endpoint.path for endpoint in dialect.endpoints]
        paths += [control.path for control in dialect.controls]
        if any(route in path for route in paths):
            return dialect
    return dialects[0]
