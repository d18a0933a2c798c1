"""OpenAI's Responses: requests of items, answers of items, and their events.

``read.py`` reads a body, ``tools.py`` its tools and ``items.py`` its items, which
become the messages that chat completions have, too: the same is recorded of both.
``write.py`` writes a turn as a response, ``events.py`` a response as a stream, and
``dialect.py`` has the addresses.
"""
