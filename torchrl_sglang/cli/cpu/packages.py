"""Installs packages with uv, which pip installs if necessary.

It takes the arguments of ``pip install``, and ``--python PATH`` before them for another
environment than the running Python's::

    python -m torchrl_sglang.cli.cpu.packages --requirement requirements.txt

uv ignores pip's configuration, which may name a machine's indexes, folders of packages,
certificates and proxy; they are passed to uv as its own settings.

This module needs only the standard library: it installs everything else.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torchrl_sglang.errors import ConfigurationError

UV = "uv==0.13.9"
"""Requirement of uv, for its installation."""

ERROR_TAIL_LINES = 20
"""Lines of an installer's output in an error."""

PIP_SECTIONS = (":env:", "install", "global")
"""The sections of pip's configuration for ``pip install``, strongest first."""

YES = [["1"], ["true"], ["yes"], ["on"]]
"""Values of a switch in pip's configuration."""

SAME_VALUES = {
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "trusted-host": ("UV_INSECURE_HOST",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "timeout": ("UV_HTTP_TIMEOUT",),
}
"""Options of pip -> equivalent variables of uv."""


def install_packages(python: Path, arguments: Sequence[str | Path]) -> None:
    """Installs packages into the environment of an interpreter, which needs no pip."""
    words = list(map(str, arguments))
    # An installer must see only the changed environment.
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    pip = [sys.executable, "-m", "pip"]
    has_pip, configuration = _run([*pip, "config", "list"], variables)
    with tempfile.TemporaryDirectory(prefix="torchrl_sglang_uv_") as folder:
        # In this environment or on the search path.
        folders = [str(Path(sys.prefix) / "bin"), os.environ.get("PATH", "")]
        uv = shutil.which("uv", path=os.pathsep.join(folders))
        if uv is None and not has_pip:
            raise ConfigurationError(
                f"{sys.executable} has neither uv nor pip to install packages with. "
                f"Run `{sys.executable} -m ensurepip`, or install uv."
            )
        if uv is None:
            quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
            into = ["install", "--no-deps", "--target", folder, UV]
            _check(UV, sys.executable, *_run([*pip, *into, *quiet], variables))
            uv = f"{folder}/bin/uv"
        # The user's settings for uv override those for pip.
        if has_pip:
            settings = uv_settings(configuration, _default_index())
            variables = {**_certificates(), **settings, **variables}
        into = ["pip", "install", "--quiet", "--python", str(python)]
        # uv has no variable for it.
        if has_pip and _words(configuration, "no-index")[:1] in YES:
            into.append("--no-index")
        _check(" ".join(words), python, *_run([uv, *into, *words], variables))


def _check(words: str, python: str | Path, done: bool, output: str) -> None:
    """Raises RuntimeError if an installer has failed."""
    if not done:
        lines = "\n".join(output.strip().splitlines()[-ERROR_TAIL_LINES:])
        raise RuntimeError(
            f"`{words}` could not be installed for {python}. Run this again once the "
            f"cause is removed. The installer's last lines were:\n{lines}"
        )


def _certificates() -> dict[str, str]:
    """Returns variables to make uv trust pip's authorities."""
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if bundle := os.environ.get(name):
            return {"SSL_CERT_FILE": bundle}
    paths = ssl.get_default_verify_paths()
    # pip trusts the machine's, or its own if the machine has none.
    if paths.cafile or (paths.capath and os.listdir(paths.capath)):
        return {"UV_SYSTEM_CERTS": "1"}
    return {}


def uv_settings(pip_configuration: str, default_index: str) -> dict[str, str]:
    """Returns variables to make uv find packages like pip with this configuration."""
    words = functools.partial(_words, pip_configuration)
    settings: dict[str, str] = {}
    *first, final = [
        *(words("index-url") or [default_index]),
        *words("extra-index-url"),
    ]
    if final != default_index:
        # pip takes the best version of any index, and among equals the file with the
        # most specific tags; uv takes the first index's, which has to be pip's first.
        settings["UV_INDEX"] = " ".join(first)
        settings["UV_DEFAULT_INDEX"] = final
        settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if words("find-links"):
        settings["UV_FIND_LINKS"] = ",".join(words("find-links"))
    for option, names in SAME_VALUES.items():
        if words(option):
            settings |= dict.fromkeys(names, " ".join(words(option)))
    return settings


def _words(pip_configuration: str, option: str) -> list[str]:
    """Returns the words of an option's value in pip's configuration."""
    lines = (line.partition("=") for line in pip_configuration.splitlines())
    values = {key: value for key, _, value in lines}
    keys = (f"{section}.{option}" for section in PIP_SECTIONS)
    value = next((values[key] for key in keys if key in values), "''")
    return str(ast.literal_eval(value)).split()


def _default_index() -> str:
    """Returns the URL of pip's default index, which no pip command prints."""
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        return ""
    return str(PyPI.simple_url)


def _run(command: Sequence[str], variables: dict[str, str]) -> tuple[bool, str]:
    """Runs a command; returns whether it succeeded, and its output."""
    done = subprocess.run(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode == 0, done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_sglang.cli.cpu.packages",
        description="Install packages with uv; takes `pip install`'s arguments.",
        allow_abbrev=False,
    )
    text = "interpreter of the environment (default: %(default)s)"
    parser.add_argument("--python", type=Path, default=sys.executable, help=text)
    options, words = parser.parse_known_args(arguments)
    try:
        install_packages(options.python, words)
    except (ConfigurationError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
