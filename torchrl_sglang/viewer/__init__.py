"""What a run recorded, as a page: ``torchrl-sglang view FOLDER``.

``run.py`` makes a run of the lines of a recording. ``timeline.py``, ``curves.py``,
``groups.py`` and ``advice.py`` are pure: they make bars, points, rows and sentences of
it. ``charts.py`` says how they are drawn, as specifications of Vega-Lite, and
``page.py`` puts all of it and the files in ``static/`` into one HTML file; ``serve.py``
serves the same page, which follows a run that goes on.
"""
