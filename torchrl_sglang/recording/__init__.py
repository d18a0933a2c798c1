"""Records a run in files while it runs, and reads them again.

``recorder.py`` is what users hold: each call, and each event that it subscribes to,
puts a job into the queue of ``writer.py``, whose thread makes lines of it and appends
them to the files of ``streams.py``. ``records.py`` makes the lines of groups,
``format.py`` lists the files, ``lines.py`` parses lines, and ``reading.py`` reads
files: also while they grow, cut off, or too large.

An event of a run is one of ``observer.py``, a case of ``recorder.py::RunRecorder`` and
a method of ``viewer/run.py::_Assembly``; a field of a response is one of
``observer.py::ResponseRecord`` and of ``lines.py::ResponseLine``. Other files need
another ``format.py::FORMAT``.
"""
