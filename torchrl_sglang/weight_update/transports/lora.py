"""Publishes a LoRA adapter as a weight version, beside weights that stay as they are.

Nothing is paused and nothing can be half done: servers load the new adapter beside the
old one, and requests select the new one when every server holds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_sglang.backends.lora.names import check_name
from torchrl_sglang.errors import (
    ConfigurationError,
    SGLangError,
    WeightMismatchError,
    WeightTransferError,
)
from torchrl_sglang.support.checks import check_flag
from torchrl_sglang.weight_update.transports.base import (
    TransportOptions,
    WeightTransport,
)
from torchrl_sglang.weight_update.weights import Weights


@dataclass(frozen=True, kw_only=True)
class LoraOptions(TransportOptions):
    """Options of ``transport="lora"``; ``send_timeout`` is for loading the adapter."""

    adapter: str = "policy"
    """Name of the published adapter. Requests that select no adapter carry it."""
    pin_adapter: bool = False
    """Servers always keep it among the adapters that batches are computed with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name(self.adapter)
        self._set("pin_adapter", check_flag("pin_adapter", self.pin_adapter))


class LoraTransport(WeightTransport):
    """Loads an adapter on every server, and makes requests carry it.

    Requests in flight end with the adapter that they began with. Each completion names
    its version in ``versions``.
    """

    name = "lora"
    adapter_only = True
    options_type = LoraOptions
    _options: LoraOptions

    @property
    def connected(self) -> bool:
        """Whether the servers take adapters."""
        return self._engine.capabilities.has_lora

    def connect(self) -> None:
        """Raises :class:`ConfigurationError` if the servers take no adapters."""
        if not self.connected:
            raise ConfigurationError(
                f"The servers at {self._engine.server_url} take no LoRA adapters; "
                f"start them with enable_lora=True, max_lora_rank=... and "
                f"lora_target_modules=['all'], or send whole weights."
            )

    def send(self, weights: Weights, *, version: str) -> int:
        """Publishes the adapter; see :class:`.WeightTransport`."""
        tensors = dict(weights.read())
        try:
            self._engine.load_adapter(
                self._options.adapter,
                tensors=tensors,
                config=weights.adapter,
                pinned=self._options.pin_adapter,
                version=version,
                default=True,
                timeout=self._options.send_timeout,
            )
        except WeightMismatchError:
            raise
        except SGLangError as error:
            raise WeightTransferError(
                f"The LoRA adapter was not published as version {version!r}: {error} "
                f"The servers still use the weights from before.",
                untouched=True,
            ) from error
        return 1
