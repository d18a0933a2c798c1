"""Requests for responses, as all layers know them. Pure: nothing is sent here.

``sampling.py`` has the table of sampling parameters and ``token_columns.py`` that of
the quantities of a token; ``request.py`` a request that is checked and complete, and
``resume.py`` what remains of one after an abort. ``token_values.py`` joins what its
parts know of their tokens.
"""
