"""Configuration of the documentation; ``make docs`` builds it."""

from __future__ import annotations

import atexit
import inspect
import logging
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.inspect import signature as read_signature
from sphinx.util.inspect import stringify_signature
from transformers.utils.logging import disable_progress_bar

import torchrl_sglang

sys.path.insert(0, str(Path(__file__).parent))  # For tutorial_order.
# For helpers.forked_starts.
sys.path.append(str(Path(__file__).parents[2] / "test"))

# The tutorials run in this process, and their output becomes part of the pages.
disable_progress_bar()
for name in ("httpx", "httpx2"):  # What OpenAI's client logs each request with.
    logging.getLogger(name).setLevel(logging.WARNING)

warnings.filterwarnings("ignore", message="size_average and reduce args")

project = "torchrl_sglang"
author = "The torchrl_sglang authors"
copyright = f"2026, {author}"  # noqa: A001  # Sphinx's name for it.
version = release = torchrl_sglang.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
]
HIDDEN_COLON = "\N{REPLACEMENT CHARACTER}"

templates_path = ["_templates"]
exclude_patterns = ["**/*.ipynb", "**/*.py", "**/*.zip"]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_title = f"torchrl_sglang {release}"

autosummary_generate = True
# A class has one page, under the name that users import it by.
autosummary_ignore_module_all = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

autodoc_inherit_docstrings = True

napoleon_numpy_docstring = False
napoleon_use_ivar = True

# The tutorials run against a real SGLang server on CPU while they are built, and an
# error in one is an error of the build.
sphinx_gallery_conf = {
    "abort_on_example_error": True,
    "backreferences_dir": None,
    "capture_repr": (),  # What a tutorial shows, it prints.
    "download_all_examples": False,
    "examples_dirs": ["../../tutorials"],
    "gallery_dirs": ["tutorials"],
    "image_scrapers": ("matplotlib",),
    "reset_modules": (),
    "run_stale_examples": True,
    "show_signature": False,
    "within_subsection_order": "tutorial_order.position",
    "write_computation_times": False,
}


def show_own_signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str, str | None] | None:
    """Shows a class's own arguments, not those of TorchRL's metaclasses."""
    if what != "class" or signature != "(*args, **kwargs)":
        return None
    own = read_signature(obj.__init__, bound_method=True)
    kinds = {parameter.kind for parameter in own.parameters.values()}
    if kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return "", returns  # An interface, which nobody makes.
    return stringify_signature(own, show_annotation=False), returns


def hide_colons(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Has Napoleon read no type before a colon in an attribute's first line."""
    if what in ("attribute", "data", "property") and lines:
        lines[0] = lines[0].replace(":", HIDDEN_COLON)


def show_colons(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Undoes :func:`hide_colons`."""
    lines[:] = [line.replace(HIDDEN_COLON, ":") for line in lines]


def start_quickly(app: Sphinx) -> None:
    """Has the servers of tutorials be forks of a process that has SGLang imported.

    They are real servers, each its tutorial's own. Only their imports are shared, which
    are nearly all of the time that a tutorial takes.
    """
    if str(app.config.plot_gallery).lower() in ("0", "false"):
        return
    from helpers.forked_starts import forked_starts

    quick_starts.enter_context(forked_starts())


def end_starts(app: Sphinx, error: Exception | None) -> None:
    """Ends that process."""
    quick_starts.close()


quick_starts = ExitStack()
atexit.register(quick_starts.close)


def setup(app: Sphinx) -> None:
    # Before sphinx-gallery runs the tutorials.
    app.connect("builder-inited", start_quickly, priority=100)
    app.connect("build-finished", end_starts)
    app.connect("autodoc-process-signature", show_own_signature)
    # Before and after Napoleon, whose priority is 500.
    app.connect("autodoc-process-docstring", hide_colons, priority=400)
    app.connect("autodoc-process-docstring", show_colons, priority=600)
