"""Contract tests for weight transports."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator

import torch

from torchrl_sglang.backends import session
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import WeightTransferError
from torchrl_sglang.types import SyncReport
from torchrl_sglang.weight_update.transports.base import WeightTransport
from torchrl_sglang.weight_update.weights import Weights


class TransportContract(abc.ABC):
    """Contract tests for transports; subclass as ``TestMyTransport``.

    Examples:
        >>> class TestMine(TransportContract):
        ...     def make(self):
        ...         return MyTransport(engine)
        ...
        ...     def weights(self, seed):
        ...         return open_weights(model(seed), engine.get_model_metadata())
        ...
        ...     def error(self, seed):
        ...         return distance(engine, model(seed))
    """

    tolerance = 1e-4
    """Greatest error of servers with the sent weights, for float32."""

    @abc.abstractmethod
    def make(self) -> WeightTransport:
        """Returns an unconnected transport to an engine's servers."""

    @abc.abstractmethod
    def weights(self, seed: int) -> Weights:
        """Returns different weights for each seed."""

    @abc.abstractmethod
    def error(self, seed: int) -> float:
        """Returns the distance between the servers' outputs and these weights' own.

        For instance the greatest difference of log-probs from Hugging Face's model.
        """

    def test_weights_arrive_and_the_next_ones_replace_them(self) -> None:
        """A report describes the sent weights."""
        transport = self.make()
        try:
            for seed in (1, 2):
                weights = self.weights(seed)
                report = update(transport, weights)
                assert transport.connected
                assert self.error(seed) < self.tolerance
                assert report.transport == transport.name
                assert report.num_tensors == len(weights.specs)
                assert report.num_bytes == weights.num_bytes
                assert report.num_buckets >= 1
                assert report.version in versions(transport._engine)
        finally:
            transport.close()

    def test_a_source_that_fails_raises_and_the_next_update_heals(self) -> None:
        """The error is raised, and no server generates with half of the weights."""
        transport = self.make()
        weights = self.weights(3)

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(weights.read())[:3]
            raise OSError("the source is gone")

        try:
            broken = dataclasses.replace(weights, read=read)
            assert "the source is gone" in failure(transport, broken)
            update(transport, weights)
            assert self.error(3) < self.tolerance
        finally:
            transport.close()

    def test_closing_twice_and_connecting_again(self) -> None:
        """Both can be called at any time."""
        transport = self.make()
        transport.connect()
        assert transport.connected
        transport.close()
        transport.close()
        update(transport, self.weights(4))
        assert self.error(4) < self.tolerance
        transport.close()


def update(transport: WeightTransport, weights: Weights) -> SyncReport:
    """Sends weights in the order of every update."""
    engine = transport._engine
    newest = max(int(v) if v.isdigit() else 0 for v in versions(engine))
    return session.update_weights(
        engine, transport, weights, version=str(1 + newest), pause_mode="retract"
    )


def failure(transport: WeightTransport, weights: Weights) -> str:
    """Returns the text of an update's error."""
    try:
        update(transport, weights)
    except (WeightTransferError, OSError) as error:
        return str(error)
    raise AssertionError("The update must raise the error of its source.")


def versions(engine: RLSGLangEngine) -> tuple[str, str]:
    """Returns the weight version of requests, and the newest of whole weights."""
    return engine.weight_version, engine.newest_version
