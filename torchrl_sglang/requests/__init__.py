"""Requests for responses, as all layers know them. Pure: nothing is sent here.

``sampling.py`` has the table of sampling parameters and ``token_columns.py`` that of
the quantities of a token; ``request.py`` a request that is checked and complete, and
``resume.py`` what remains of one after an abort. ``token_values.py`` joins what its
parts know of their tokens.

A sampling parameter is a row of ``sampling.py::SAMPLING_PARAMETERS``, and a quantity of
each token a row of ``token_columns.py::TOKEN_COLUMNS``; another argument of
``generate`` is a field of ``request.py::GenerateRequest``. ``seeds.py::sample_seed``
makes runs equal.
"""
