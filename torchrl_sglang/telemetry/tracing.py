"""OpenTelemetry spans, where a program has set up a tracer provider; nothing otherwise.

Spans nest by context variables, which tasks inherit: a group's conversations, their
turns and tools, and the requests to servers. Over HTTP, the headers of W3C Trace
Context carry the parent. Importing this module imports nothing of OpenTelemetry.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

NAME = "torchrl_sglang"
"""Name of the instrumentation, and prefix of attributes without a name of their own in
OpenTelemetry's semantic conventions."""

TRACEPARENT = "traceparent"
"""Header of W3C Trace Context that names the parent."""

T = TypeVar("T")

SpanKind = Literal["internal", "client", "server"]

_CONTEXTS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Objects, such as sessions of a gateway, and the spans that they belong to."""


class OpenSpan:
    """A span that is open, or stands for one where there is none."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def set(self, **attributes: Any) -> None:
        """Sets attributes, given as for :func:`span`; ``None`` is left out."""
        if self._span is not None:
            self._span.set_attributes(_named(attributes))

    def fail(self, description: str) -> None:
        """Marks what it stands for as failed, where no error was raised."""
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, description))


_NONE = OpenSpan()


def _tracer() -> Any:
    """Returns the tracer of the program's provider; ``None`` if it has set up none."""
    # A program that has set one up has imported it.
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        return None
    return provider.get_tracer(NAME)


@contextmanager
def span(
    name: str, *, kind: SpanKind = "internal", of: Any = None, **attributes: Any
) -> Iterator[OpenSpan]:
    """Opens a span around a block; an error that leaves the block is recorded.

    Args:
        name: of the span.
        kind: ``"client"`` for a request to somebody, ``"server"`` for one of somebody.
        of: an object that :func:`remember` was called with; its span is the parent
            unless another one is open.
        **attributes: ``gen_ai__...`` and others with two underscores are names of the
            semantic conventions, with dots for them; all others get this package's
            prefix.

    Yields:
        OpenSpan: for attributes that are known later.

    Examples:
        >>> with span("turn", number=1) as turn:  # Nothing, without a provider.
        ...     turn.set(tokens=8)
    """
    tracer = _tracer()
    if tracer is None:
        yield _NONE
        return
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
            cause = _cause(error)
            opened.record_exception(cause)
            traced.fail(f"{type(cause).__name__}: {cause}")
            raise


def _cause(error: Exception) -> Exception:
    """Returns the first error of a group of tasks, which says nothing itself."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key.replace("__", ".") if "__" in key else f"{NAME}.{key}": value
        for key, value in attributes.items()
        if value is not None
    }


def remember(owner: Any) -> None:
    """Keeps the span that is open as the one that an object belongs to."""
    if _tracer() is not None:
        from opentelemetry import context

        _CONTEXTS[owner] = context.get_current()


def traced_headers() -> dict[str, str]:
    """Returns the headers of W3C Trace Context for the span that is open, if one is."""
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
    """Returns a call whose spans belong to the one that a client's headers name."""
    if TRACEPARENT not in headers or _tracer() is None:
        return call
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import (
        TraceContextTextMapPropagator,
    )

    # Names of headers are in any case.
    lowered = {name.lower(): value for name, value in headers.items()}
    parent = TraceContextTextMapPropagator().extract(lowered)

    async def traced() -> T:
        token = context.attach(parent)
        try:
            return await call()
        finally:
            context.detach(token)

    return traced
