"""Whether a server hangs, or is only paused: no token comes in either case.

A server is paused while weights are updated, by any engine object that uses it. So that
it gives no token counts only where it says, before and after, that it is not paused.
"""

from __future__ import annotations

from typing import Literal

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.errors import ServerTimeoutError, SGLangError
from torchrl_sglang.types import ServerCapabilities

__all__ = ["hangs"]

TOKEN_SECONDS = 15.0
"""Budget for a sign that a server generates. After 20 s without one, SGLang calls
itself unhealthy, and would not tell any more whether it is paused."""

DOOR_SECONDS = 5.0
"""Budget for a question that a server answers without its scheduler."""

_REFUSED = {
    "input_ids": [0],
    "sampling_params": {"temperature": -1.0, "max_new_tokens": 1},
}
"""A request that is refused when it is let in: while generation is paused, it waits."""

Told = Literal["open", "paused", "silent"]


async def hangs(
    http: HttpClient,
    capabilities: ServerCapabilities,
    url: str,
    *,
    timeout: float = TOKEN_SECONDS,
) -> bool:
    """Returns whether a server gives no token although nobody has paused it.

    A server that says nothing at all hangs, too.
    """
    ask = _ask_ready if capabilities.tells_paused else _ask_door
    soon = min(timeout, DOOR_SECONDS)
    if await ask(http, url, soon) == "paused":
        return False
    if await _is_answered(http, f"{url}/health_generate", timeout):
        return False
    told = await ask(http, url, soon)
    if told == "paused" and capabilities.tells_paused:
        # It says so, too, when it has found out that it does not generate.
        told = await _ask_door(http, url, soon)
    return told != "paused"


async def _ask_ready(http: HttpClient, url: str, timeout: float) -> Told:
    try:
        answer = await http.request("GET", f"{url}/ready", timeout=timeout)
    except SGLangError:
        return "silent"
    return "open" if answer.ok else "paused"


async def _ask_door(http: HttpClient, url: str, timeout: float) -> Told:
    try:
        await http.request("POST", f"{url}/generate", _REFUSED, timeout=timeout)
    except ServerTimeoutError:
        alive = await _is_answered(http, f"{url}/model_info", timeout)
        return "paused" if alive else "silent"
    except SGLangError:
        return "silent"
    return "open"


async def _is_answered(http: HttpClient, url: str, timeout: float) -> bool:
    try:
        answer = await http.request("GET", url, timeout=timeout)
    except SGLangError as error:
        torchrl_logger.debug(f"A probe failed: {error}")
        return False
    return answer.ok
