"""``serve_metrics``: an endpoint for Prometheus, in this process."""

from __future__ import annotations

import hmac
import json
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from typing import Any, Self
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_port
from torchrl_sglang.support.urls import LOOPBACK, is_loopback, url_of
from torchrl_sglang.telemetry.prometheus import StatsFamilies, make_registry


def serve_metrics(
    *,
    engine: Any = None,
    collector: Any = None,
    gateway: Any = None,
    scheme: Any = None,
    port: int = 0,
    host: str = LOOPBACK,
    api_key: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> MetricsEndpoint:
    """Serves the metrics of the parts of a run for Prometheus, until it is closed.

    ``/metrics`` is Prometheus' text format, and ``/targets`` the addresses of the
    servers' own metrics, in the format of Prometheus' HTTP service discovery.
    Statistics are read at each scrape, and cost nothing otherwise. The endpoint keeps
    no part alive, and ends with the process.

    Keyword Args:
        engine (AsyncSGLang, optional): generates.
        collector (AsyncLLMCollector, optional): also one in a Ray actor.
        gateway (Gateway, optional): it has its own route ``/metrics``, too.
        scheme (SGLangWeightSyncScheme, optional): sends weights.
        port (int): port to listen on. Defaults to 0, a free port.
        host (str): address to listen on. Defaults to ``"127.0.0.1"``; any other needs
            an ``api_key``.
        api_key (str, optional): bearer token required for scrapes; in Prometheus
            ``authorization: {credentials: KEY}``. Defaults to none.
        labels (dict of str, optional): labels of all metrics, to distinguish runs.

    Returns:
        MetricsEndpoint: has ``url`` and ``close()``, and is a context manager.

    Raises:
        ConfigurationError: if there is no part, a part has no statistics, the address
            cannot be used, or the package ``prometheus_client`` is missing.

    Examples:
        >>> import urllib.request
        >>> with serve_metrics(engine=engine) as metrics:
        ...     text = urllib.request.urlopen(metrics.url).read().decode()
        >>> "torchrl_sglang_engine_responses_total" in text
        True
    """
    port = check_port("port", port) if port else 0
    if not isinstance(host, str) or not host:
        raise ConfigurationError(f"host={host!r} must be an address to listen on.")
    if api_key is None and not is_loopback(host):
        raise ConfigurationError(
            f"host={host!r} can be reached from other machines; give an api_key."
        )
    families = StatsFamilies(
        engine=engine,
        collector=collector,
        gateway=gateway,
        scheme=scheme,
        labels=labels,
    )
    find_engine = (lambda: None) if engine is None else weakref.ref(engine)
    return MetricsEndpoint(families, find_engine, host, port, api_key)


class MetricsEndpoint:
    """Serves metrics in daemon threads, made by :func:`serve_metrics`.

    Attributes:
        url (str): address of the metrics.
        targets_url (str): address of the servers' addresses, for service discovery.
    """

    def __init__(
        self,
        families: StatsFamilies,
        find_engine: Callable[[], Any],
        host: str,
        port: int,
        api_key: str | None,
    ) -> None:
        app = _make_app(families, find_engine, api_key)
        try:
            self._server = make_server(
                host, port, app, _ThreadedServer, handler_class=_QuietHandler
            )
        except OSError as error:
            raise ConfigurationError(
                f"The metrics cannot be served on {host}:{port}: {error}. Give another "
                f"port, or 0 for a free one."
            ) from error
        base = url_of(host, self._server.server_port)
        self.url, self.targets_url = f"{base}/metrics", f"{base}/targets"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            name="torchrl_sglang-metrics",
            daemon=True,
        )
        self._thread.start()
        self._is_open = True

    def close(self) -> None:
        """Serves no more. Safe to call twice."""
        if not self._is_open:
            return
        self._is_open = False
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MetricsEndpoint({self.url}{'' if self._is_open else ', closed'})"


class _ThreadedServer(ThreadingMixIn, WSGIServer):
    """Answers scrapes concurrently: a hanging scrape blocks no other."""

    daemon_threads = True
    # Statistics have a timeout, and the process does not wait for a scrape.
    block_on_close = False

    def server_bind(self) -> None:
        # Without looking up the host's name, which can take seconds.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])
        self.setup_environ()


class _QuietHandler(WSGIRequestHandler):
    """Writes no line for each scrape."""

    # Timeout of a client without a request.
    timeout = 30.0

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - Its name.
        """Logs nothing."""


def targets_of(engine: Any) -> list[dict[str, Any]]:
    """Returns an engine's servers in the format of Prometheus' service discovery."""
    by_scheme: dict[str, list[str]] = {}
    for url in getattr(engine, "metrics_urls", ()):
        parsed = urlsplit(url)
        by_scheme.setdefault(parsed.scheme, []).append(parsed.netloc)
    return [
        {"targets": targets, "labels": {"__scheme__": scheme}}
        for scheme, targets in by_scheme.items()
    ]


def _make_app(
    families: StatsFamilies, find_engine: Callable[[], Any], api_key: str | None
) -> Callable[..., Iterable[bytes]]:
    from prometheus_client import make_wsgi_app

    metrics = make_wsgi_app(make_registry(families))

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        header = environ.get("HTTP_AUTHORIZATION", "")
        if api_key is not None and not _is_key(header, api_key):
            headers = [("Content-Type", "text/plain"), ("WWW-Authenticate", "Bearer")]
            start("401 Unauthorized", headers)
            return [b"Send the key as a bearer token.\n"]
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            content: Iterable[bytes] = metrics(environ, start)
            return content
        if path == "/targets":
            start("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(targets_of(find_engine())).encode()]
        start("404 Not Found", [("Content-Type", "text/plain")])
        return [b"There are /metrics and /targets.\n"]

    return app


def _is_key(given: str, api_key: str) -> bool:
    return hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode())
