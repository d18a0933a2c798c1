"""Detects servers that hang; neither those nor paused ones give a token.

A server is paused during a weight update of any engine object that uses it. So a
missing token counts only if the server reports, before and after, that it generates.
"""

from __future__ import annotations

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.errors import ServerTimeoutError, SGLangError
from torchrl_sglang.types import ServerCapabilities

__all__ = ["hangs"]

TOKEN_SECONDS = 15.0
"""Timeout for a token. After 20 s without one, SGLang reports that it is unhealthy, and
no longer whether it is paused."""

ANSWER_SECONDS = 5.0
"""Timeout for an answer that a server gives without its scheduler."""

_REFUSED = {
    "input_ids": [0],
    "sampling_params": {"temperature": -1.0, "max_new_tokens": 1},
}
"""An invalid request: a server refuses it, or lets it wait while it is paused."""


async def hangs(
    http: HttpClient,
    capabilities: ServerCapabilities,
    url: str,
    *,
    timeout: float = TOKEN_SECONDS,
) -> bool:
    """Returns whether a server gives no token although nobody has paused it."""
    soon = min(timeout, ANSWER_SECONDS)

    async def is_paused() -> bool:
        if capabilities.tells_paused:
            return await _succeeds(http, f"{url}/ready", soon) is False
        return await _holds_requests(http, url, soon)

    if await is_paused() or await _succeeds(http, f"{url}/health_generate", timeout):
        return False
    paused = await is_paused()
    if paused and capabilities.tells_paused:
        # A server that has noticed that it hangs reports the same.
        paused = await _holds_requests(http, url, soon)
    return not paused


async def _succeeds(http: HttpClient, url: str, timeout: float) -> bool | None:
    """Returns whether a GET succeeds; ``None`` where there is no answer."""
    try:
        return (await http.request("GET", url, timeout=timeout)).ok
    except SGLangError as error:
        torchrl_logger.debug(f"A probe failed: {error}")
        return None


async def _holds_requests(http: HttpClient, url: str, timeout: float) -> bool:
    """Returns whether requests wait in a server that is alive."""
    try:
        await http.request("POST", f"{url}/generate", _REFUSED, timeout=timeout)
    except ServerTimeoutError:
        return bool(await _succeeds(http, f"{url}/model_info", timeout))
    except SGLangError as error:
        torchrl_logger.debug(f"A probe failed: {error}")
    return False
