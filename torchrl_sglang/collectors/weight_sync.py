"""Attaches a weight-sync scheme to a collector, on this machine or on Ray."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import NoneType
from typing import Any, NoReturn, TypeVar

from torchrl_sglang.errors import CollectionError, ConfigurationError
from torchrl_sglang.types import SyncReport
from torchrl_sglang.weight_update.scheme import SGLangWeightSyncScheme

C = TypeVar("C")

MODEL_ID = "policy"
"""TorchRL's name for the model that collects."""

SENDERS = "_weight_senders"
"""Attribute of a collector: the senders that it is registered with."""


def attach_weight_sync(collector: C, scheme: SGLangWeightSyncScheme) -> C:
    """Makes a collector's ``update_policy_weights_()`` send weights with a scheme.

    ``collector.update_policy_weights_()`` then sends the model that is registered with
    the scheme's sender, and ``update_policy_weights_(weights)`` sends ``weights``. Both
    return a :class:`.SyncReport`, also kept as ``collector.last_sync_report``. Each
    update increments the policy version of every collector attached to the scheme,
    including updates sent through another collector or the sender itself, until the
    collector is shut down or dropped.

    Args:
        collector (LLMCollector | RayLLMCollector): a ``RayLLMCollector``'s weights are
            sent by the process that holds it.
        scheme: sends weights to the servers that the collector's policy generates with.

    Returns:
        LLMCollector | RayLLMCollector: the same collector.

    Raises:
        ConfigurationError: if ``scheme`` is not an ``SGLangWeightSyncScheme``.

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
        >>> scheme = SGLangWeightSyncScheme(engine, model)
        >>> report = attach_weight_sync(collector, scheme).update_policy_weights_()
        >>> collector.policy_version, report is collector.last_sync_report
        (1, True)
        >>> scheme.shutdown()
    """
    if not isinstance(scheme, SGLangWeightSyncScheme):
        raise ConfigurationError(
            f"attach_weight_sync takes an SGLangWeightSyncScheme, got {scheme!r}; give "
            f"SGLangWeightSyncScheme(engine)."
        )
    sender = scheme.create_sender()
    find = weakref.ref(collector)

    def update_policy_weights_(
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> SyncReport:
        """Sends weights; see :func:`torchrl_sglang.attach_weight_sync`."""
        chosen = _choose_weights(
            policy_or_weights, weights, policy, model_id, weights_dict
        )
        if worker_ids is not None:
            raise ConfigurationError(
                f"worker_ids={worker_ids!r} selects collector workers, but the weights "
                f"go to every SGLang server; leave it out."
            )
        # The sender only forgets a collector that has ended; here it raises its error.
        check = getattr(find(), "check", None)
        if check is not None:
            check()
        return sender.update_weights(chosen)

    # Set on the instance: a Ray collector's own method would run in its actor, which
    # does not have the scheme.
    collector.update_policy_weights_ = update_policy_weights_  # type: ignore[attr-defined]
    collector._refresh_weights = sender.refresh  # type: ignore[attr-defined]
    collector.last_sync_report = sender.last_report  # type: ignore[attr-defined]
    sender.register_collector(collector)
    collector.__dict__.setdefault(SENDERS, []).append(sender)
    return collector


def detach_weight_sync(collector: Any) -> None:
    """Has the senders of a collector forget it, which is shut down."""
    senders = collector.__dict__.pop(SENDERS, ())
    for sender in senders:
        sender.unregister_collector(collector)
    if senders:
        collector.update_policy_weights_ = _refuse_update


def _refuse_update(*args: Any, **kwargs: Any) -> NoReturn:
    raise CollectionError(
        "The collector was shut down, and sends no weights any more; make another one, "
        "or send them with sender.update_weights()."
    )


def check_schemes(given: Any) -> Mapping[str, SGLangWeightSyncScheme]:
    """Returns the ``weight_sync_schemes`` of a collector."""
    if not isinstance(given, (Mapping, NoneType)):
        raise ConfigurationError(
            f"weight_sync_schemes takes {{'policy': SGLangWeightSyncScheme}}, got "
            f"{given!r}."
        )
    schemes = dict(given or {})
    for name, scheme in schemes.items():
        if name != MODEL_ID or not isinstance(scheme, SGLangWeightSyncScheme):
            raise ConfigurationError(
                f"weight_sync_schemes takes {{'policy': SGLangWeightSyncScheme}}, "
                f"got {name!r}: {scheme!r}."
            )
    return schemes


def _choose_weights(
    policy_or_weights: Any,
    weights: Any,
    policy: Any,
    model_id: str | None,
    weights_dict: Mapping[str, Any] | None,
) -> Any:
    """Returns the weights that TorchRL's arguments name, or None for the registered."""
    choices = {
        "policy_or_weights": policy_or_weights,
        "weights": weights,
        "policy": policy,
        "weights_dict": weights_dict,
    }
    names = [name for name, value in choices.items() if value is not None]
    if len(names) > 1:
        raise ConfigurationError(
            f"Give the weights once; {' and '.join(names)} were given."
        )
    models = [model_id or MODEL_ID] if weights_dict is None else list(weights_dict)
    if models != [MODEL_ID]:
        raise ConfigurationError(
            f"The collector's scheme sends the weights of {MODEL_ID!r}, not of "
            f"{models}; leave model_id out."
        )
    if weights_dict is not None:
        return weights_dict[MODEL_ID]
    return choices[names[0]] if names else None
