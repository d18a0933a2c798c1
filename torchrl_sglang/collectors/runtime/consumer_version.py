"""Tells a replay buffer's sampler which policy version is trained."""

from __future__ import annotations

from typing import Any

from torchrl.data.replay_buffers.samplers import StalenessAwareSampler

CALL_TIMEOUT_SECONDS = 60.0
"""Timeout of a call to a replay buffer on Ray."""


class ConsumerVersion:
    """Sets the ``consumer_version`` of a buffer's ``StalenessAwareSampler``.

    Emptying a buffer sets it back to zero, so it is set again before each write.
    """

    def __init__(self, buffer: Any) -> None:
        self._sampler = getattr(buffer, "_sampler", None)
        # The actor of a RayReplayBuffer, or of its client.
        self._actor: Any = getattr(buffer, "_rb", getattr(buffer, "_actor", None))

    def set(self, version: int) -> None:
        """Sets the version; does nothing for other samplers."""
        if isinstance(self._sampler, StalenessAwareSampler):
            self._sampler.consumer_version = version
        if self._actor is not None:
            self._set_remotely(version)

    def _set_remotely(self, version: int) -> None:
        import ray

        sampler = ray.get(
            self._actor._getattr.remote("_sampler"), timeout=CALL_TIMEOUT_SECONDS
        )
        if not isinstance(sampler, StalenessAwareSampler):
            self._actor = None
            return
        if sampler.consumer_version != version:
            # The version is the only state of the sampler.
            sampler.consumer_version = version
            ray.get(
                self._actor.set_sampler.remote(sampler), timeout=CALL_TIMEOUT_SECONDS
            )
