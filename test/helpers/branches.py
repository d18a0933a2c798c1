"""A conversation of a gateway's session with two branches."""

from __future__ import annotations

import requests

from torchrl_sglang.gateway.session import Session


def ask_twice(session: Session, *, max_tokens: int) -> None:
    """Greets the model, and goes on from its reply with two other messages."""

    def ask(*messages: dict[str, str]) -> dict[str, str]:
        answer = requests.post(
            f"{session.base_url}/chat/completions",
            json={"model": "m", "messages": messages, "max_tokens": max_tokens},
            headers={"Authorization": f"Bearer {session.key}"},
            timeout=60,
        )
        answer.raise_for_status()
        return answer.json()["choices"][0]["message"]

    greeting = {"role": "user", "content": "Hi"}
    reply = ask(greeting)
    for question in ("more", "less"):
        ask(greeting, reply, {"role": "user", "content": question})
