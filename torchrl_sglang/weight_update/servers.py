"""The engine of a scheme, given as an object or as an address to connect to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchrl_sglang.backends.base import RLSGLangEngine, connect
from torchrl_sglang.backends.support.urls import (
    hide_passwords,
    normalize_url,
    split_credentials,
)
from torchrl_sglang.errors import ConfigurationError, WeightSyncStateError
from torchrl_sglang.weight_update.transports import nccl

__all__ = ["SchemeServers"]


class SchemeServers:
    """The part of a scheme that holds the engine."""

    context: Any
    """The collector that TorchRL has initialised the scheme with, if any."""

    def __init__(
        self,
        engine: RLSGLangEngine | str | None,
        server_url: str | None,
        expected: Mapping[str, int | None],
    ) -> None:
        if engine is not None and server_url is not None:
            raise ConfigurationError(
                f"Give the engine once: engine={engine!r}, "
                f"server_url={hide_passwords(server_url)!r}."
            )
        self._engine: RLSGLangEngine | None = None
        self._expected = expected
        # Connected to when it is needed: a recipe that gives an address brings the
        # engine itself later.
        if isinstance(engine, str):
            engine, server_url = None, engine
        self._url = None if server_url is None else normalize_url(server_url)
        if engine is not None:
            self.use_engine(engine)

    @property
    def server_url(self) -> str | None:
        """Address that the scheme was made for, or of its engine; makes no request."""
        if self._engine is not None:
            return self._engine.server_url
        return None if self._url is None else split_credentials(self._url)[0]

    @property
    def num_gpus(self) -> int | None:
        """Number of GPUs of all servers together; ``None`` if it is not known yet."""
        if self._engine is None:
            return self._expected["num_gpus"]
        return self._engine.get_tp_size() * self._engine.get_dp_size()

    @property
    def world_size(self) -> int | None:
        """Number of ranks of a broadcast, the sender's included."""
        if self._engine is not None:
            return 1 + self._engine.get_world_size()
        return None if self.num_gpus is None else 1 + self.num_gpus

    @property
    def engine(self) -> RLSGLangEngine:
        """The engine that weights are sent to, connected to now if a URL was given.

        Raises:
            WeightSyncStateError: if none was given yet.
        """
        if self._engine is None and self._url is not None:
            self.use_engine(connect(self._url))
        if self._engine is None:
            raise WeightSyncStateError(
                "The scheme has no engine: give one to SGLangWeightSyncScheme(engine), "
                "or to sender.init_all_workers_group(metadata, vllm_engine=engine)."
            )
        return self._engine

    @property
    def owns_servers(self) -> bool:
        """Whether this process started the servers; makes no request."""
        return bool(getattr(self._engine, "servers", ()))

    def use_engine(self, engine: RLSGLangEngine) -> None:
        """Takes the engine that weights are sent to, if there is none yet.

        Raises:
            ConfigurationError: if it is not the one that the scheme was made for.
        """
        known = self.server_url
        if not isinstance(engine, RLSGLangEngine):
            raise ConfigurationError(
                f"{engine!r} is no engine that weights are sent to; give the same "
                f"engine as the policy's, or the address of a server."
            )
        if known not in (None, engine.server_url):
            raise ConfigurationError(
                f"The scheme was made for {self._engine or known}, and the engine is "
                f"{engine!r}; give the same engine, or leave it out."
            )
        actual = {
            # As TorchRL's recipes count them.
            "num_gpus": engine.get_tp_size() * engine.get_dp_size(),
            "gpus_per_replica": engine.get_tp_size() * engine.capabilities.pp_size,
            "num_replicas": engine.num_replicas,
        }
        for name, value in self._expected.items():
            if value not in (None, actual[name]):
                raise ConfigurationError(
                    f"{name}={value!r} was given, and {engine!r} has {actual[name]}; "
                    f"leave it out, the engine knows."
                )
        if self._engine is None:
            self._engine = engine
            server_args = engine.capabilities.server_args
            if server_args.get("device") != "cpu" and torch.cuda.is_available():
                # NCCL reads it with the first communicator of this process.
                nccl.share_settings(server_args, refuse=False)
