"""Page of a recorded run: ``torchrl-sglang view FOLDER``.

``run.py`` assembles a run from the lines of a recording. ``timeline.py``,
``curves.py``, ``groups.py`` and ``advice.py`` compute its bars, points, rows and
sentences without I/O. ``charts.py`` formats them as specifications of Vega-Lite, and
``page.py`` combines all of it and the files in ``static/`` into an HTML file;
``serve.py`` serves the same page, and follows a live run.

A curve is a function and its name in ``curves.py::curves_of``, and a filter of groups a
row of ``groups.py::FILTERS``.
"""
