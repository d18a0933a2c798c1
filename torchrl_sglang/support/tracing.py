"""Opens OpenTelemetry spans; a no-op without the program's tracer provider.

The tracer provider is the subscriber: every layer publishes spans here. They nest by
context variables, which tasks inherit: groups, conversations, turns and tools, requests
to servers. Over HTTP, headers of W3C Trace Context carry the parent. This module does
not import OpenTelemetry.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from torchrl_sglang.support.user_code import first_error

NAME = "torchrl_sglang"
"""Name of the instrumentation, and prefix of attributes without a name in
OpenTelemetry's semantic conventions."""

TRACEPARENT = "traceparent"
"""Header of W3C Trace Context with the parent."""

T = TypeVar("T")

SpanKind = Literal["internal", "client", "server"]

_CONTEXTS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Object, such as a session of a gateway -> context of the span it belongs to."""


class OpenSpan:
    """An open span, or a no-op without a tracer provider."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def set(self, **attributes: Any) -> None:
        """Sets attributes, named as in :func:`span`; ``None`` is left out."""
        if self._span is not None:
            self._span.set_attributes(_named(attributes))

    def fail(self, description: str) -> None:
        """Marks the span as failed, without an exception."""
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, description))


_NO_SPAN = nullcontext(OpenSpan())


def _tracer() -> Any:
    """Returns the tracer of the program's provider; ``None`` without a provider."""
    # A program with a provider has imported this module.
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        return None
    return provider.get_tracer(NAME)


def span(
    name: str, *, kind: SpanKind = "internal", of: Any = None, **attributes: Any
) -> AbstractContextManager[OpenSpan]:
    """Opens a span around a block; an error leaving the block is recorded.

    Args:
        name: of the span.
        kind: ``"client"`` for outgoing requests, ``"server"`` for incoming requests.
        of: an object passed to :func:`remember`; its span is the parent unless another
            span is open.
        **attributes: names with two underscores, such as ``gen_ai__...``, belong to
            the semantic conventions and get dots; all others get this package's
            prefix.

    Returns:
        A context manager of the ``OpenSpan``, which takes later attributes.

    Examples:
        >>> with span("turn", number=1) as turn:  # Nothing, without a provider.
        ...     turn.set(tokens=8)
    """
    tracer = _tracer()
    if tracer is None:
        return _NO_SPAN
    return _opened(tracer, name, kind, of, attributes)


@contextmanager
def _opened(
    tracer: Any, name: str, kind: SpanKind, of: Any, attributes: Mapping[str, Any]
) -> Iterator[OpenSpan]:
    from opentelemetry import trace

    context = None
    if of is not None and not trace.get_current_span().get_span_context().is_valid:
        context = _CONTEXTS.get(of)
    with tracer.start_as_current_span(
        name,
        context=context,
        kind=trace.SpanKind[kind.upper()],
        attributes=_named(attributes),
        record_exception=False,
        set_status_on_exception=False,
    ) as opened:
        traced = OpenSpan(opened)
        try:
            yield traced
        except Exception as error:
            cause = first_error(error)
            opened.record_exception(cause)
            traced.fail(f"{type(cause).__name__}: {cause}")
            raise


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key.replace("__", ".") if "__" in key else f"{NAME}.{key}": value
        for key, value in attributes.items()
        if value is not None
    }


def remember(owner: Any) -> None:
    """Makes the open span the default parent of an object's spans."""
    if _tracer() is not None:
        from opentelemetry import context

        _CONTEXTS[owner] = context.get_current()


def traced_headers() -> dict[str, str]:
    """Returns headers of W3C Trace Context for the open span; empty without a span."""
    if _tracer() is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import (
        TraceContextTextMapPropagator,
    )

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers


def continuing(
    headers: Mapping[str, str], call: Callable[[], Awaitable[T]]
) -> Callable[[], Awaitable[T]]:
    """Returns a call whose spans have the parent named in a client's headers."""
    if TRACEPARENT not in headers or _tracer() is None:
        return call
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import (
        TraceContextTextMapPropagator,
    )

    # Header names are case-insensitive.
    lowered = {name.lower(): value for name, value in headers.items()}
    parent = TraceContextTextMapPropagator().extract(lowered)

    async def traced() -> T:
        token = context.attach(parent)
        try:
            return await call()
        finally:
            context.detach(token)

    return traced
