"""What a transport of weights is: the seam between the session and the bytes."""

from __future__ import annotations

from typing import Protocol

from torchrl_sglang.weight_update.buckets import Bucket
from torchrl_sglang.weight_update.source import NamedTensors

__all__ = ["WeightTransport"]


class WeightTransport(Protocol):
    """Carries buckets to every server of an engine."""

    @property
    def connected(self) -> bool:
        """Whether :meth:`send` can be called; False again after a failure."""

    def connect(self) -> None:
        """Meets the servers. Touches no weights.

        Raises:
            WeightTransferError: if a server refuses or does not come in time.
        """

    def send(
        self, bucket: Bucket, tensors: NamedTensors, *, weight_version: str | None
    ) -> None:
        """Has every server load one bucket, and waits until all have.

        Args:
            bucket: layout of the tensors.
            tensors: holds at least those of the bucket.
            weight_version: version to report from now on; given with the last bucket.

        Raises:
            WeightTransferError: if that failed. Its attribute ``untouched`` is True
                where the servers refused before they received anything.
        """

    def close(self) -> None:
        """Leaves the servers. Safe to call twice; never waits long."""
