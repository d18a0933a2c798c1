"""Requests for responses, as all layers know them. Pure: nothing is sent here.

``sampling.py`` has the table of sampling parameters and ``token_columns.py`` the table
of the quantities of a token. ``request.py`` reads a caller's arguments, ``plan.py``
checks a request and decides all that its sending depends on, and ``resume.py`` goes on
after an abort. ``token_values.py`` joins the values of a response's parts.

A sampling parameter is a row of ``sampling.py::SAMPLING_PARAMETERS``, and a quantity of
each token a row of ``token_columns.py::TOKEN_COLUMNS``; another argument of
``generate`` is a field of ``request.py::GenerateRequest``, and a decision about a
request a field of ``plan.py::RequestPlan``. ``seeds.py::sample_seed`` makes runs equal.
"""
