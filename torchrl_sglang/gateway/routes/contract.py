"""Interface of a gateway for its routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torchrl_sglang.gateway.dialects.base import Dialect
from torchrl_sglang.gateway.progress import Progress
from torchrl_sglang.gateway.request import Request
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.turns import Turn


class Recorder(Protocol):
    """Members of a gateway for the routes."""

    models: list[str]
    """Names of the model for clients."""
    api_key: str
    """Key to every session."""
    dialects: Sequence[Dialect]
    """Accepted dialects."""
    open: bool
    """Whether a session's path is sufficient for access."""
    keep_alive_seconds: float
    """Interval between comments in a stream without content."""
    public_url: str | None
    """Address of the gateway for clients, if it differs from the request's."""

    def session(self, name: str | None = None, *, group: str | None = None) -> Session:
        """Returns the session of this name, or a new session."""

    def find(self, *, name: str | None = None, key: str | None = None) -> Session:
        """Returns an existing session; raises if there is none."""

    def read(self, read: Callable[[Any], Request], body: Mapping[str, Any]) -> Request:
        """Returns the request in a body, and its fields without effect."""

    async def respond(
        self, session: Session, request: Request, progress: Progress | None = None
    ) -> list[Turn]:
        """Generates and keeps responses."""

    async def keep(self, session: Session, turns: Sequence[Turn]) -> None:
        """Keeps withdrawn responses again."""

    def withdraw(self, session: Session, turns: Sequence[Turn]) -> None:
        """Removes responses unseen by any client."""

    def received(self, session: Session, turns: Sequence[Turn]) -> None:
        """Records responses as received by a client."""

    async def written(self) -> None:
        """Waits until all changes are kept."""

    async def unname(self, session: Session, turn: Turn) -> None:
        """Removes the name of a turn's answer."""

    async def count(self, session: Session, request: Request) -> int:
        """Returns the number of tokens of a prompt."""

    def token_text(self, token: int) -> str:
        """Returns the text of a token."""

    def drop(self, session: Session) -> None:
        """Drops a session."""

    def set_reward(
        self,
        session: Session,
        reward: float,
        *,
        turn: int | str | None = None,
        agent: str | None = None,
        branch: int | str | None = None,
    ) -> None:
        """Sets a reward."""

    async def metrics(self, accept: str) -> tuple[str, bytes]:
        """Returns the content type and the text of the metrics."""
