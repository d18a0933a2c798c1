"""What a run did, written to files while it runs, and read again.

``recorder.py`` is what users hold: each call puts a job into the queue of
``writer.py``, whose thread makes lines of it and appends them to the files of
``streams.py``. ``records.py`` says what a line holds, ``format.py`` which files there
are, ``lines.py`` what a reader gets of a line, and ``reading.py`` reads them: also
while they grow, cut off, or too large.

An event of a run is a method of ``recorder.py::RunRecorder`` and one of
``viewer/run.py::_Assembly``, a field of a response one of
``records.py::ResponseRecord`` and of ``lines.py::ResponseLine``. Other files need
another ``format.py::FORMAT``.
"""
