"""Parses requests of all dialects, and reports fields without effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from torchrl_sglang.chat.call_grammars import FREE
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.request import Request
from torchrl_sglang.gateway.tool_grammar import GRAMMARS, check_grammar
from torchrl_sglang.support.checks import check_choice
from torchrl_sglang.support.log import torchrl_logger

ToolChoiceMode: TypeAlias = Literal["grammar", "auto"]
"""``"grammar"``: a choice of tools is enforced; ``"auto"``: the model decides."""

_NAME = re.compile(r"[!-~]+")

MOST_STOPS, MOST_STOP_CHARACTERS = 32, 1_024
"""Most stop strings of a request, and characters of each: a server's scheduler searches
for all of them after each token, while all other requests wait."""

_NEEDED = frozenset(
    {
        *("input", "instructions", "messages", "model", "prompt", "stream", "system"),
        *("previous_response_id", "tools"),
    }
)
"""Fields essential for the meaning of a request."""


class RequestReader:
    """Reads requests of any dialect."""

    def __init__(
        self,
        *,
        ignored_params: Sequence[str],
        tool_choice: ToolChoiceMode,
        variables: frozenset[str],
        forces_grammar: bool,
    ) -> None:
        self._ignored = _check_ignored(ignored_params)
        check_choice("tool_choice", tool_choice, ("grammar", "auto"))
        self._chooses = tool_choice == "grammar" and not forces_grammar
        self._variables = variables
        self._named: set[str] = set()

    def __call__(
        self, read: Callable[[Any], Request], body: Mapping[str, Any]
    ) -> Request:
        """Returns the request in a body; fields without effect are logged once."""
        dropped = [name for name in body if name in self._ignored]
        request = read({name: body[name] for name in body if name not in dropped})
        _check_work(request.sampling.params)
        ignored = [*dropped, *request.ignored]
        if not self._chooses and not request.choice.is_free:
            ignored += request.choice.fields
            request = replace(request, choice=FREE)
        variables: dict[str, Any] = {}
        for hint in request.hints:
            supported = [v for v in hint.variables if v in self._variables]
            if supported:
                variables[supported[0]] = hint.value
            else:
                ignored.append(hint.name)
        # The client's own template variables take precedence.
        variables |= request.setting.template_kwargs
        self._log(ignored)
        if variables:
            setting = replace(request.setting, template_kwargs=variables)
            request = replace(request, setting=setting)
        if ignored:
            request = replace(request, ignored=tuple(dict.fromkeys(ignored)))
        return request

    def _log(self, names: Sequence[str]) -> None:
        new = [name for name in names if name not in self._named]
        self._named.update(new)
        if new:
            torchrl_logger.warning(
                f"A client of the gateway sends {', '.join(new)}, which has no effect."
            )


def _check_work(params: Mapping[str, Any]) -> None:
    """Raises :class:`ConfigurationError` for parameters that block a server for long.

    A client has a session's key, and other users' requests are on the same servers.
    """
    if params.get("stop_regex"):
        raise ConfigurationError(
            "stop_regex is not taken from clients: servers search for it after each "
            "token, which can take longer than all other requests together. Use stop, "
            "or have the gateway's owner give it in default_sampling_params."
        )
    stops = params.get("stop") or ()
    stops = [stops] if isinstance(stops, str) else stops
    if isinstance(stops, Sequence) and len(stops) > MOST_STOPS:
        raise ConfigurationError(
            f"stop has {len(stops)} texts; give up to {MOST_STOPS}."
        )
    for text in stops if isinstance(stops, Sequence) else ():
        if isinstance(text, str) and len(text) > MOST_STOP_CHARACTERS:
            raise ConfigurationError(
                f"stop has a text of {len(text)} characters; give up to "
                f"{MOST_STOP_CHARACTERS}."
            )
    for name in GRAMMARS:
        if isinstance(text := params.get(name), str):
            check_grammar(name, text)


def _check_ignored(names: Sequence[str]) -> frozenset[str]:
    # They are in headers.
    wrong = [n for n in names if not isinstance(n, str) or not _NAME.fullmatch(n)]
    if isinstance(names, str) or wrong:
        raise ConfigurationError(
            f"ignored_params={names!r} must be names of fields, such as ['seed']."
        )
    if needed := sorted(_NEEDED & set(names)):
        raise ConfigurationError(
            f"ignored_params has {', '.join(needed)}, without which a request is "
            f"another one."
        )
    return frozenset(names)
