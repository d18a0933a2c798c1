"""What a run did, written to files while it runs, and read again.

``recorder.py`` is what users hold: each call puts a job into the queue of
``writer.py``, whose thread makes lines of it and appends them to the files of
``streams.py``. ``records.py`` says what a line holds, ``format.py`` which files there
are, ``lines.py`` what a reader gets of a line, and ``reading.py`` reads them: also
while they grow, cut off, or too large.
"""
