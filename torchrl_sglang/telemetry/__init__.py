"""Metrics of a run for Prometheus and for loggers.

``rows.py`` is the table of metrics: exported name, kind and value, read from the
statistics of an engine, a collector, a gateway or a weight sender. ``parts.py`` reads
these statistics on request, each within a timeout; nothing runs on the path of a
request. ``prometheus.py`` converts them into Prometheus' families, ``server.py`` serves
these, and ``figures.py`` computes the figures of a step for a logger.
"""
