"""Contract tests for dialects of the gateway."""

from __future__ import annotations

import abc
import json
import urllib.error
import urllib.request
from typing import Any

from torchrl_sglang.gateway.gateway import Gateway

SECONDS = 120.0


class DialectContract(abc.ABC):
    """Contract tests for dialects; subclass as ``TestMyDialect``.

    Examples:
        >>> class TestMine(DialectContract):
        ...     path = "/v1/mine"
        ...
        ...     def gateway(self):
        ...         return Gateway(engine, dialects=[*DIALECTS, Mine()])
        ...
        ...     def body(self, text, *, stream):
        ...         return {"say": text, "live": stream}
        ...
        ...     def headers(self, key):
        ...         return {"x-mine-key": key}
        ...
        ...     def said(self, answer):
        ...         return answer["said"]
        ...
        ...     def joined(self, events):
        ...         return json.loads(events.removeprefix("data: "))["said"]
    """

    path: str
    """Address of the dialect's POST requests."""

    @abc.abstractmethod
    def gateway(self) -> Gateway:
        """Returns a gateway with the dialect, not running."""

    @abc.abstractmethod
    def body(self, text: str, *, stream: bool) -> dict[str, Any]:
        """Returns a request with a message of the user, for a few tokens."""

    @abc.abstractmethod
    def headers(self, key: str) -> dict[str, str]:
        """Returns the headers with an API key."""

    @abc.abstractmethod
    def said(self, answer: Any) -> str:
        """Returns the text of an answer."""

    @abc.abstractmethod
    def joined(self, events: str) -> str:
        """Returns the text of an answer's server-sent events."""

    def test_what_is_said_is_recorded(self) -> None:
        """Answers and streams equal the session's record."""
        with self.gateway() as gateway:
            session = gateway.session()
            for stream in (False, True):
                status, text = self._ask(gateway, session.key, stream=stream)
                assert status == 200, text
                (*_, turn) = session.turns
                answer = self.joined(text) if stream else self.said(json.loads(text))
                assert answer == turn.reply["content"]
                assert turn.completion.log_probs
            assert gateway.to_tensordict([session]).shape[0] == len(session.turns) == 2

    def test_errors_are_in_its_own_form(self) -> None:
        """Wrong keys, invalid bodies, and requests without any field."""
        with self.gateway() as gateway:
            session = gateway.session()
            status, text = self._ask(gateway, "wrong", stream=False)
            assert status == 401
            assert isinstance(json.loads(text), dict)
            for body in (b"{", b"{}", b"[]"):
                status, text = self._post(gateway, session.key, body)
                assert status == 400
                assert isinstance(json.loads(text), dict)
            assert not session.turns

    def test_sessions_do_not_mix(self) -> None:
        """A key opens its own session."""
        with self.gateway() as gateway:
            first, second = gateway.session(), gateway.session()
            for session in (first, second, first):
                status, text = self._ask(gateway, session.key, stream=False)
                assert status == 200, text
            assert [len(session.turns) for session in (first, second)] == [2, 1]

    def _ask(self, gateway: Gateway, key: str, *, stream: bool) -> tuple[int, str]:
        body = json.dumps(self.body("Hi", stream=stream)).encode()
        return self._post(gateway, key, body)

    def _post(self, gateway: Gateway, key: str, body: bytes) -> tuple[int, str]:
        """Returns status and content of an answer."""
        request = urllib.request.Request(
            f"{gateway.url}{self.path}",
            data=body,
            headers={**self.headers(key), "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
