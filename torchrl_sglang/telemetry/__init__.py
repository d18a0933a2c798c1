"""Metrics of a run for Prometheus and for loggers.

``rows.py`` is the table of metrics: exported name, kind and value, read from the
statistics of an engine, a collector, a gateway or a weight sender. ``parts.py`` reads
these statistics on request, each within a timeout; nothing runs on the path of a
request. ``prometheus.py`` converts them into Prometheus' families, ``server.py`` serves
these, and ``figures.py`` computes the figures of a step for a logger.

A metric is a row of ``rows.py::ROWS``, a line of ``docs/source/guides/metrics.rst``,
and a panel of ``docs/source/_static/grafana_dashboard.json``; a figure of each step is
in ``figures.py``.
"""
