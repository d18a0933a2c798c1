"""Collectors whose ``update_policy_weights_()`` sends weights to SGLang.

TorchRL's LLM collectors take no ``weight_sync_schemes``. :func:`attach` gives a scheme
to any collector, on this machine or on a Ray cluster; :class:`SGLangLLMCollector` is
TorchRL's collector with that argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, TypeVar

from torchrl.collectors.llm import LLMCollector

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.types import SyncReport
from torchrl_sglang.weight_update.scheme import SGLangWeightSyncScheme

__all__ = ["SGLangLLMCollector", "attach"]

C = TypeVar("C")

MODEL_ID = "policy"
"""TorchRL's name for the model that collects."""


def attach(collector: C, scheme: SGLangWeightSyncScheme) -> C:
    """Has a collector's ``update_policy_weights_()`` send weights with a scheme.

    From then on ``collector.update_policy_weights_()`` sends the weights of the model
    that is registered with the scheme's sender, and ``update_policy_weights_(weights)``
    those that are given. It returns a :class:`.SyncReport`, which is kept as
    ``collector.last_sync_report``. Every collector that is attached to the scheme
    counts one policy version, whichever of them was called, and also where the sender
    was called directly.

    Args:
        collector: an ``LLMCollector``, or a ``RayLLMCollector``, whose weights are then
            sent by the process that holds it.
        scheme: brings weights to the servers that the collector's policy generates
            with.

    Returns:
        The same collector.

    Raises:
        ConfigurationError: if ``scheme`` is no scheme of this package.

    Examples:
        >>> from torchrl.collectors.llm import LLMCollector
        >>> from tensordict import TensorDict
        >>> from torchrl.envs.llm import ChatEnv
        >>> queries = [TensorDict(query=["Hi"], batch_size=1)]
        >>> env = ChatEnv.from_dataloader(queries, tokenizer=tokenizer, batch_size=(1,))
        >>> collector = LLMCollector(
        ...     env,
        ...     policy=SGLangWrapper(engine),
        ...     dialog_turns_per_batch=1,
        ...     track_policy_version=True,
        ... )
        >>> scheme = SGLangWeightSyncScheme(engine)
        >>> scheme.create_sender().register_model(model)
        >>> report = attach(collector, scheme).update_policy_weights_()
        >>> collector.policy_version, report is collector.last_sync_report
        (1, True)
        >>> scheme.shutdown()
    """
    if not isinstance(scheme, SGLangWeightSyncScheme):
        raise ConfigurationError(
            f"A collector is attached to a scheme, got {scheme!r}; give "
            f"SGLangWeightSyncScheme(engine)."
        )
    sender = scheme.create_sender()

    def update_policy_weights_(
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> SyncReport:
        """Sends weights to the servers; see :func:`torchrl_sglang.attach`."""
        found = _choose(policy_or_weights, weights, policy, model_id, weights_dict)
        if worker_ids is not None:
            raise ConfigurationError(
                f"worker_ids={worker_ids!r} chooses among workers that hold weights; "
                f"here every SGLang server gets them. Leave it out."
            )
        return sender.update_weights(found)

    # On the object: a Ray collector's class would ask its actor, which has no scheme.
    collector.update_policy_weights_ = update_policy_weights_  # type: ignore[attr-defined]
    collector.last_sync_report = sender.last_report  # type: ignore[attr-defined]
    sender.register_collector(collector)
    return collector


def _choose(
    policy_or_weights: Any,
    weights: Any,
    policy: Any,
    model_id: str | None,
    weights_dict: Mapping[str, Any] | None,
) -> Any:
    """Returns what is meant by the arguments that TorchRL's collectors take."""
    given = {
        "policy_or_weights": policy_or_weights,
        "weights": weights,
        "policy": policy,
        "weights_dict": weights_dict,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ConfigurationError(
            f"Give the weights once; {' and '.join(names)} were given."
        )
    models = [model_id or MODEL_ID] if weights_dict is None else list(weights_dict)
    if models != [MODEL_ID]:
        raise ConfigurationError(
            f"The collector's scheme sends the weights of {MODEL_ID!r}, and {models} "
            f"were asked for."
        )
    if weights_dict is not None:
        return weights_dict[MODEL_ID]
    return given[names[0]] if names else None


class SGLangLLMCollector(LLMCollector):
    """TorchRL's LLM collector, with schemes that send weights to SGLang.

    It takes all arguments of :class:`~torchrl.collectors.llm.LLMCollector`, and does
    what :func:`attach` says.

    Keyword Args:
        weight_sync_schemes (dict, optional): ``{"policy": scheme}``.

    Raises:
        ConfigurationError: if there is a scheme for something else, or of another
            kind.

    Examples:
        >>> scheme = SGLangWeightSyncScheme(engine)
        >>> scheme.create_sender().register_model(model)
        >>> from tensordict import TensorDict
        >>> from torchrl.envs.llm import ChatEnv
        >>> queries = [TensorDict(query=["Hi"], batch_size=1)]
        >>> env = ChatEnv.from_dataloader(queries, tokenizer=tokenizer, batch_size=(1,))
        >>> collector = SGLangLLMCollector(
        ...     env,
        ...     policy=SGLangWrapper(engine),
        ...     dialog_turns_per_batch=1,
        ...     track_policy_version=True,
        ...     weight_sync_schemes={"policy": scheme},
        ... )
        >>> report = collector.update_policy_weights_()
        >>> report.version == engine.weight_version
        True
        >>> scheme.shutdown()
    """

    last_sync_report: SyncReport | None = None
    """What the last weight update did; ``None`` before the first."""

    def __init__(
        self,
        *args: Any,
        weight_sync_schemes: Mapping[str, SGLangWeightSyncScheme] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(weight_sync_schemes, (Mapping, NoneType)):
            raise ConfigurationError(
                f"weight_sync_schemes takes {{'policy': SGLangWeightSyncScheme}}, got "
                f"{weight_sync_schemes!r}."
            )
        for name, scheme in (weight_sync_schemes or {}).items():
            if name != MODEL_ID or not isinstance(scheme, SGLangWeightSyncScheme):
                raise ConfigurationError(
                    f"weight_sync_schemes takes {{'policy': SGLangWeightSyncScheme}}, "
                    f"got {name!r}: {scheme!r}."
                )
        super().__init__(*args, **kwargs)
        for scheme in (weight_sync_schemes or {}).values():
            attach(self, scheme)
