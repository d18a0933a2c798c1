"""Sends the weights of the last update to servers that have joined since.

The serving servers are not stopped. A new server reports the current version only when
its values equal a serving server's, bit for bit, where servers report values, and
when it scores the same prompts alike.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from torchrl_sglang.backends import session
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import (
    RequestRefusedError,
    SGLangError,
    WeightMismatchError,
    WeightTransferError,
)
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.types import SyncReport
from torchrl_sglang.weight_update.plan import UpdatePlan
from torchrl_sglang.weight_update.transports.base import UNPROVEN
from torchrl_sglang.weight_update.verify import (
    ROWS,
    allowed_difference,
    choose_names,
    choose_prompts,
    comparable,
    to_floats,
)
from torchrl_sglang.weight_update.weights import Weights


def fill(
    new: RLSGLangEngine, serving: RLSGLangEngine, plan: UpdatePlan, version: str
) -> SyncReport:
    """Sends the serving servers' weights to new ones, and gives them their version.

    Raises:
        WeightMismatchError: if a new server then holds or computes something else than
            the others.
        WeightTransferError: if sending failed. In all cases the new servers get no
            request, and wait for the next update.
    """
    options, weights, transport = plan.options, plan.weights, plan.transport_to(new)
    try:
        report = session.update_weights(
            new,
            transport,
            weights,
            version=UNPROVEN,
            pause_mode=options.pause_mode,
            flush=options.flush_cache,
            control_timeout=options.control_timeout,
        )
    except BaseException:
        # They get no request; an update that does not pause would not resume them.
        with suppress(SGLangError):
            run_sync(new.control.resume(timeout=options.control_timeout))
        raise
    finally:
        transport.close()
    _compare(new, serving, weights, version)
    run_sync(new.control.set_weight_version(version, timeout=options.control_timeout))
    return replace(report, version=version)


def _compare(
    new: RLSGLangEngine, serving: RLSGLangEngine, weights: Weights, version: str
) -> None:
    """Compares new servers with one that serves; see :func:`fill`."""
    new_urls = new.control.urls
    url = next((u for u in serving.control.urls if u not in new_urls), None)
    if url is None:
        raise WeightTransferError(
            f"No server is left that {', '.join(new_urls)} could be compared with. "
            f"{_WAITS}"
        )
    _compare_values(new, serving, url, comparable(weights.specs))
    prompts = choose_prompts(new.capabilities, version)
    (scores,) = run_sync(
        serving.control.prompt_log_probs(prompts, cache_key=version, urls=[url])
    )
    expected = to_floats(scores)
    dtypes = {spec.dtype for spec in weights.specs}
    allowed = max(allowed_difference(dtype, expected) for dtype in dtypes)
    log_probs = run_sync(new.control.prompt_log_probs(prompts, cache_key=UNPROVEN))
    for new_url, scores in zip(new_urls, log_probs, strict=True):
        difference = (to_floats(scores) - expected).abs().mean()
        # A NaN is a difference.
        if not bool(difference <= allowed):
            raise WeightMismatchError(
                f"{new_url} was sent the model's weights and does not generate as "
                f"{url} does: log-probs differ by {difference:.3g} on average; "
                f"rounding explains {allowed:.3g}. {_WAITS}"
            )


def _compare_values(
    new: RLSGLangEngine, serving: RLSGLangEngine, url: str, names: list[str]
) -> None:
    """Compares values bit by bit, where servers report them."""
    for name in choose_names(names):
        with suppress(RequestRefusedError):
            values = serving.control.get_weights_by_name(name, ROWS, urls=[url])
            (expected,) = run_sync(values)
            rows = run_sync(new.control.get_weights_by_name(name, ROWS))
            for new_url, value in zip(new.control.urls, rows, strict=True):
                if value != expected:
                    raise WeightMismatchError(
                        f"The model has other weights than {url} serves: {name} on "
                        f"{new_url}, which was sent them now, differs. Was it trained "
                        f"since the last update? {_WAITS}"
                    )


_WAITS = "The new servers get no request before the next update."
