"""Figures of a run for Prometheus and for loggers, and traces for OpenTelemetry.

``rows.py`` is the table of metrics: what of the statistics of an engine, a collector,
a gateway and a weight sender is exported under which name. ``parts.py`` reads these
statistics, each within a time, when somebody asks; nothing runs on the path of a
request. ``prometheus.py`` turns them into Prometheus' families, ``server.py`` serves
these, and ``figures.py`` makes the numbers that a logger gets with each step.
``tracing.py`` opens spans around groups, turns, tools and requests.
"""
