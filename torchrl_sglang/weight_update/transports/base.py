"""What a transport of weights is: the seam between the session and the bytes."""

from __future__ import annotations

from typing import ClassVar, Protocol

from torchrl_sglang.weight_update.sources.weights import Weights

__all__ = ["BUCKET_BYTES", "SEND_TIMEOUT_SECONDS", "WeightTransport"]

BUCKET_BYTES = 2 << 30
"""Default size of a transfer. A server needs some milliseconds for every request, and a
link of 370 GB/s six for a bucket."""

SEND_TIMEOUT_SECONDS = 300.0
"""Default budget for one transfer."""


class WeightTransport(Protocol):
    """Carries weights to every server of an engine.

    It carries, and no more: pausing, flushing, sessions and resuming are the business
    of ``session.py``.
    """

    name: ClassVar[str]
    """What a scheme's ``transport`` argument calls it."""
    in_session: ClassVar[bool]
    """Whether servers take the tensors between begin and end calls only, where they
    have such calls."""

    @property
    def connected(self) -> bool:
        """Whether :meth:`send` can be called; False again after a failure."""

    def connect(self) -> None:
        """Meets the servers. Touches no weights.

        Raises:
            WeightTransferError: if a server refuses or does not come in time.
            UnsupportedByServerError: if these servers cannot be reached in this way.
        """

    def send(self, weights: Weights, *, version: str) -> int:
        """Has every server load all weights, and waits until all have.

        Args:
            weights: the tensors; read once, never more than a bucket ahead.
            version: what the servers report from then on.

        Returns:
            How many transfers it took.

        Raises:
            WeightTransferError: if that failed. Its attribute ``untouched`` is True
                where no server has received anything.
        """

    def close(self) -> None:
        """Leaves the servers. Safe to call twice; never waits long."""
