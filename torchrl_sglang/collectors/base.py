"""GroupCollector: base class of collectors of groups, here or in an actor."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import Any, Self

from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.types import SyncReport


class GroupCollector(BaseCollector):
    """Methods that do not depend on where the groups are collected."""

    last_sync_report: SyncReport | None = None
    """Report of the last weight update; ``None`` before the first."""

    init_random_frames = 0
    """Frames of random actions, for TorchRL's trainers: none."""

    replay_buffer: Any

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        # TorchRL's would shut the collector down after a timeout.
        batches: Iterator[TensorDictBase | None] = self.iterator()
        return batches

    @abc.abstractmethod
    def check(self) -> None:
        """Raises the error that ended the collector, if one did."""

    def async_shutdown(
        self, timeout: float | None = None, close_env: bool = True
    ) -> None:
        """The same as :meth:`shutdown`."""
        self.shutdown(timeout=timeout, close_env=close_env)

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> SyncReport:
        """Sends weights to the servers; see :func:`.attach_weight_sync`.

        Raises:
            ConfigurationError: if no scheme is attached.
        """
        raise ConfigurationError(
            "No scheme is attached that could send weights; give weight_sync_schemes="
            "{'policy': scheme}, or call attach_weight_sync(collector, scheme)."
        )

    def _refresh_weights(self) -> SyncReport | None:
        """Sends weights that all servers have lost; ``None``: no scheme is attached.

        :meth:`iterator` calls it while it waits; see
        :meth:`.SGLangWeightSender.refresh`.
        """
        return None

    @abc.abstractmethod
    def get_policy_version(self) -> int:
        """Returns the number of weight updates so far."""

    @property
    def policy_version(self) -> int:
        """Number of weight updates so far."""
        return self.get_policy_version()

    def getattr_rb(self, name: str) -> Any:
        """Returns an attribute of the replay buffer, while the collector can go on.

        Raises:
            CollectionError: if an error ended the collector, so that trainers that wait
                for the buffer do not wait for ever.
        """
        self.check()
        return getattr(self.replay_buffer, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


class Pause:
    """Resumes a paused collector at the end of a ``with`` block."""

    def __init__(self, resume: Callable[[], None] | None) -> None:
        self._resume = resume

    def __enter__(self) -> None:
        """Does nothing: the collector is paused already."""

    def __exit__(self, *exception: object) -> None:
        if self._resume is not None:
            self._resume()
