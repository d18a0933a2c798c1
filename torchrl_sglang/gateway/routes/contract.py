"""What the routes need of a gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torchrl_sglang.gateway.dialects.base import Dialect
from torchrl_sglang.gateway.progress import Progress
from torchrl_sglang.gateway.request import Request
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.turns import Turn


class Recorder(Protocol):
    """Members of a gateway that the routes need."""

    models: list[str]
    """Names of the models that clients are told."""
    api_key: str
    """Key that opens every session."""
    dialects: Sequence[Dialect]
    """Dialects that clients may speak."""
    open: bool
    """Whether a session's path is enough to use the session."""
    keep_alive_seconds: float
    """Interval between comments in a stream without content."""
    public_url: str | None
    """Address by which clients reach the gateway, if it is not the one they used."""

    def session(self, name: str | None = None, *, group: str | None = None) -> Session:
        """Returns a session, a new one where there is none of that name."""

    def find(self, *, name: str | None = None, key: str | None = None) -> Session:
        """Returns a session that there is."""

    def read(self, read: Callable[[Any], Request], body: Mapping[str, Any]) -> Request:
        """Returns what a body asks for, and what of it has no effect."""

    async def respond(
        self, session: Session, request: Request, progress: Progress | None = None
    ) -> list[Turn]:
        """Generates and keeps responses."""

    async def keep(self, session: Session, turns: Sequence[Turn]) -> None:
        """Keeps responses that were withdrawn."""

    def withdraw(self, session: Session, turns: Sequence[Turn]) -> None:
        """Forgets responses that no client has seen."""

    def received(self, session: Session, turns: Sequence[Turn]) -> None:
        """Knows that a client has responses."""

    async def written(self) -> None:
        """Returns when everything so far is kept."""

    async def unname(self, session: Session, turn: Turn) -> None:
        """Forgets the name of a turn's answer."""

    async def count(self, session: Session, request: Request) -> int:
        """Returns the number of tokens of a prompt."""

    def token_text(self, token: int) -> str:
        """Returns the text of a token."""

    def drop(self, session: Session) -> None:
        """Forgets a session."""

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
