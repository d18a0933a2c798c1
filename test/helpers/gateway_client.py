"""Requests to a gateway, as agents send them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import openai
import requests

from torchrl_sglang.gateway.session import Session

HELLO = [{"role": "user", "content": "hello"}]
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def post(
    session: Session | str,
    path: str = CHAT,
    *,
    key: str = "",
    headers: Mapping[str, str] | Iterable[tuple[str, str]] = (),
    **body: Any,
) -> requests.Response:
    """Sends a request to a session, or to an address; by default it has a message."""
    url = session if isinstance(session, str) else session.url
    given: dict[str, Any] = {"model": "m", "max_tokens": 4}
    if not body.keys() & {"messages", "input", "prompt"}:
        given["messages"] = HELLO
    opened_by = {"Authorization": f"Bearer {key}"} if key else {}
    return requests.post(
        url + path,
        json={**given, **body},
        headers={**opened_by, **dict(headers)},
        timeout=60,
    )


def message(answer: requests.Response) -> dict[str, Any]:
    """Returns the first message of an answer to a chat."""
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()["choices"][0]["message"]
    return reply


def openai_client(session: Session, **arguments: Any) -> openai.OpenAI:
    """Returns OpenAI's client of a session."""
    return openai.OpenAI(base_url=session.base_url, api_key=session.key, **arguments)


def anthropic_client(session: Session) -> Any:
    """Returns Anthropic's client of a session."""
    import anthropic

    return anthropic.Anthropic(base_url=session.url, api_key=session.key)
