"""Sends the weights of the last update to servers that have joined since.

The servers that serve are not stopped. A new server reports the current version only
when values that it holds equal those of one of them, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch

from torchrl_sglang.backends import session
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import (
    RequestRefusedError,
    SGLangError,
    UnsupportedByServerError,
    WeightMismatchError,
)
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.types import SyncReport
from torchrl_sglang.weight_update.options import SchemeOptions
from torchrl_sglang.weight_update.verify import ROWS, choose_names, comparable
from torchrl_sglang.weight_update.weights import Weights

UNPROVEN = "unproven"
"""Weight version of a new server until its values were compared."""

State = tuple[tuple[str, int, int], ...]
"""Name, address and number of in-place changes of each parameter."""


def state_of(tensors: Mapping[str, torch.Tensor]) -> State:
    """Returns what differs after an optimizer's step, without reading a value."""
    return tuple(
        (name, id(tensor), tensor._version) for name, tensor in tensors.items()
    )


def fill(
    new: RLSGLangEngine,
    serving: RLSGLangEngine,
    weights: Weights,
    options: SchemeOptions,
    *,
    version: str,
    quantized: str | None,
) -> SyncReport:
    """Sends weights to new servers, and gives them the version of those that serve.

    Args:
        new: the new servers alone.
        serving: servers that have the weights.
        weights: as they were sent to those.
        options: of the scheme.
        version: of these weights.
        quantized: the servers that the weights were encoded for.

    Raises:
        WeightMismatchError: if a new server then holds other values than the others.
        UnsupportedByServerError: if the servers do not tell any.
        WeightTransferError: if sending failed. In all cases the new servers get no
            request, and wait for the next update.
    """
    transport = options.make_transport(new, weights.device)
    try:
        report = session.update_weights(
            new,
            transport,
            weights,
            version=UNPROVEN,
            pause_mode=options.pause_mode,
            flush=options.flush_cache,
            control_timeout=options.control_timeout,
            quantized=quantized,
            draft=options.draft,
        )
    except BaseException:
        # They get no request; an update that does not pause would not resume them.
        with suppress(SGLangError):
            run_sync(new.control.resume(timeout=options.control_timeout))
        raise
    finally:
        transport.close()
    _compare(new, serving, weights)
    run_sync(new.control.set_weight_version(version, timeout=options.control_timeout))
    return report


def _compare(new: RLSGLangEngine, serving: RLSGLangEngine, weights: Weights) -> None:
    waits = set(new.control.urls)
    url = next(each for each in serving.control.urls if each not in waits)
    compared = 0
    for name in choose_names(comparable(weights.specs)):
        with suppress(RequestRefusedError):
            values = serving.control.get_weights_by_name(name, ROWS, urls=[url])
            (expected,) = run_sync(values)
            found = run_sync(new.control.get_weights_by_name(name, ROWS))
            if not isinstance(expected, list) or not expected:
                continue
            compared += 1
            for place, each in zip(new.control.urls, found, strict=True):
                if each != expected:
                    raise WeightMismatchError(
                        f"The model has other weights than {url} serves: {name} on "
                        f"{place}, which was sent them now, differs. Was it trained "
                        f"since the last update? {place} gets no request before the "
                        f"next one."
                    )
    if not compared:
        raise UnsupportedByServerError(
            f"The servers of {new.capabilities.model_path!r} do not tell the values of "
            f"their weights, so whether new ones hold the same is unknown; they get no "
            f"request before the next weight update."
        )
