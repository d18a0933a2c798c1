"""For tools that ask for this file; the metadata is in ``pyproject.toml``."""

from setuptools import setup

setup()
