"""OpenAI's Responses: requests of items, answers of items, and their events.

``read.py`` parses a body, ``tools.py`` its tools and ``items.py`` its items, which
become the messages of chat completions, so both are recorded alike. ``write.py``
formats a turn as a response, ``events.py`` a response as a stream, and ``dialect.py``
has the addresses.

A field is a row of ``_SAMPLING``, ``_ABOUT``, ``_WISHES`` or ``_REFUSED`` in
``read.py``.
"""
