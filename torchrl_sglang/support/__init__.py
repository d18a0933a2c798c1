"""Helpers for every layer; they import only the package's errors.

``checks`` validates arguments, ``urls`` handles addresses, ``event_loop`` runs the
coroutines behind synchronous calls, ``blocking`` runs the user's functions beside a
loop, ``user_code`` marks their errors as the user's, and ``tracing`` opens spans.
``fields`` makes a constructor's signature and documentation of a dataclass.

The counterpart of another library's argument is a row of
``counterparts.py::COUNTERPARTS``, and a traced operation is within
``tracing.py::span``.
"""
