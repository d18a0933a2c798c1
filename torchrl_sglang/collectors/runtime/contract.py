"""What a collection needs of groups, whatever their conversations are held by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

from tensordict import TensorDictBase

from torchrl_sglang.collectors.runtime.stats import Meter
from torchrl_sglang.observer import ResponseRecord

TokenSpan: TypeAlias = tuple[int, int]
"""Policy version and number of tokens."""


class Groups(Protocol):
    """Makes the groups of a collection."""

    size: int
    """Conversations of a group."""
    generating: Meter
    """Conversations that wait for the engine."""

    async def run(
        self,
        position: int,
        task: Mapping[str, Any],
        policy_version: Callable[[], int],
        turn: Callable[[], Any],
    ) -> Any:
        """Returns a complete group; each conversation runs inside ``turn()``."""

    def oldest(self, group: Any) -> int:
        """Returns the policy version of a group's oldest token."""

    def spans(self, group: Any) -> Iterator[TokenSpan]:
        """Yields policy version and number of tokens of parts of the responses."""

    def foreign(self, group: Any) -> str | None:
        """Returns a weight version of the responses that another sender has sent."""

    def write(self, group: Any) -> list[TensorDictBase]:
        """Returns a TensorDict for each turn."""

    def record(self, group: Any) -> list[ResponseRecord]:
        """Returns the responses of a group for :class:`.GroupEnded`, in any thread."""

    def check_columns(self, names: Iterable[str]) -> None:
        """Checks the names of a dataset's columns.

        Raises:
            ConfigurationError: if one is the name of a column of a batch.
        """

    def close(self) -> None:
        """Frees the resources with which groups are made."""
