"""Generation: from a call to its completions.

``batch`` plans requests and returns their outcomes, ``complete`` sends each until it
is complete, ``dispatch`` places and retries it, and ``reply`` reads replies. Requests
themselves are in ``torchrl_sglang.requests``.

``complete.py`` and ``in_flight.py`` continue running requests through a weight update.
"""
