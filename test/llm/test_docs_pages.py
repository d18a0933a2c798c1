"""Names on the pages of the documentation exist, and what they must name is there."""

from __future__ import annotations

import ast
import inspect
import os
import pkgutil
import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest

import torchrl_sglang
from torchrl_sglang import errors
from torchrl_sglang.backends.launch.cpu import engine_python
from torchrl_sglang.backends.launch.ports import PORTS
from torchrl_sglang.backends.launch.server_command import (
    find_flags,
    make_server_command,
)
from torchrl_sglang.backends.launch.vllm_arguments import RENAMED
from torchrl_sglang.policies import sampling
from torchrl_sglang.requests.sampling import (
    SAMPLING_ALIASES,
    SAMPLING_PARAMETERS,
)
from torchrl_sglang.weight_update.options import SchemeOptions
from torchrl_sglang.weight_update.transports.registry import TRANSPORTS

SOURCE = Path(__file__).parents[2] / "docs" / "source"
CONFIGURATION = (SOURCE / "configuration.rst").read_text()
TROUBLESHOOTING = SOURCE / "guides" / "troubleshooting.rst"

ROW = re.compile(r"^   \* - (.*?)(?=^   \* - |^\S)", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"``((?:examples|benchmarks|tutorials|test)/[\w/.]+)")
LITERAL = re.compile(r"``(.+?)``", re.DOTALL)

OBJECTS = {
    "engine": torchrl_sglang.AsyncSGLang,
    "sender": torchrl_sglang.SGLangWeightSender,
}
CALLS = {
    "from_pretrained": torchrl_sglang.AsyncSGLang.from_pretrained,
    "connect": torchrl_sglang.AsyncSGLang.connect,
}
STARTS_SERVERS = {"from_pretrained", "make_sglang_server"}
GENERATE_ARGUMENTS = {*SAMPLING_PARAMETERS, *SAMPLING_ALIASES, *sampling._KNOWN}


def table_rows() -> list[tuple[str, str]]:
    """Returns the setting and the cell beside it, of each row of the page's tables."""
    rows = []
    for row in ROW.findall(CONFIGURATION + "\n.\n"):
        setting, here, *_ = re.split(r"^     - ?", row, flags=re.MULTILINE)
        if setting.strip() != "setting":
            rows.append((" ".join(setting.split()), " ".join(here.split())))
    return rows


@pytest.fixture(scope="module")
def server_arguments() -> set[str]:
    flags = find_flags(str(engine_python()), os.environ)
    return {*flags, *RENAMED}


def keywords(call: str, arguments: set[str]) -> set[str]:
    """Returns the names that a call of the page may use."""
    function = CALLS.get(call) or getattr(torchrl_sglang, call)
    names = set(inspect.signature(function).parameters)
    if inspect.isclass(function):
        names |= set(inspect.signature(function.__init__).parameters)
    if call in STARTS_SERVERS:
        names |= arguments
        names |= set(inspect.signature(torchrl_sglang.make_sglang_server).parameters)
    if call == "SGLangWeightSyncScheme":
        names |= {
            option.name
            for kind in (
                SchemeOptions,
                *(row.options_type for row in TRANSPORTS.values()),
            )
            for option in fields(kind)
        }
    return names


def test_the_tables_are_found():
    assert len(table_rows()) > 70


def unknown_names(literal: str, arguments: set[str]) -> set[str]:
    """Returns the arguments in a call or dict of the page that do not exist."""
    node = ast.parse(literal.replace("[...]", "[]")).body[0]
    if isinstance(node, ast.Assign):
        assert node.targets[0].id == "generate_kwargs"
        return {key.value for key in node.value.keys} - GENERATE_ARGUMENTS
    call = node.value
    function = call.func if isinstance(call, ast.Call) else call
    names = {keyword.arg for keyword in getattr(call, "keywords", ())}
    if not isinstance(function, ast.Attribute):
        return names - keywords(function.id, arguments)
    method = getattr(OBJECTS[function.value.id], function.attr)
    return names - set(inspect.signature(method).parameters) if names else set()


def test_every_setting_has_a_name_or_a_reason(server_arguments):
    problems = []
    for setting, cell in table_rows():
        if cell.startswith("none: "):
            continue
        literals = LITERAL.findall(cell)
        if not literals:
            problems.append(f"{setting} is mapped to nothing.")
        problems += [
            f"{setting}: {literal} with {sorted(unknown)}"
            for literal in literals
            if (unknown := unknown_names(literal, server_arguments))
        ]
    assert problems == []


CLUSTER = (SOURCE / "cluster.rst").read_text()
PLACES_AND_ARGUMENTS = {
    name: (place, choice)
    for row in ROW.findall(CLUSTER.partition("What the network must allow")[2])
    for name, place, choice, *_ in [re.split(r"\n     - ", row)]
}
CHOSEN_IN = {
    "a server": "make_sglang_server",
    "store of a server's ranks": "make_sglang_server",
    "store of a broadcast": "SGLangWeightSyncScheme",
    "the router": "from_pretrained",
    "the gateway": "Gateway",
    "metrics": "serve_metrics",
}
"""What listens in a cluster -> the call whose arguments choose where."""


@pytest.mark.parametrize("name", CHOSEN_IN)
def test_arguments_choose_where_to_listen(name, server_arguments):
    _, choice = PLACES_AND_ARGUMENTS[name]
    arguments = {literal.partition("=")[0] for literal in LITERAL.findall(choice)}
    assert arguments
    assert arguments <= keywords(CHOSEN_IN[name], server_arguments)


def test_a_server_listens_where_the_page_says(tiny_model_path):
    assert f"of {PORTS[0]} to {PORTS[-1]} for servers" in CLUSTER
    command = make_server_command(tiny_model_path, device="cpu")
    host, port = command.url.removeprefix("http://").split(":")
    assert PLACES_AND_ARGUMENTS["a server"][0] == f"{host}, a free port"
    ports = {lease.port for lease in command.leases}
    command.release()
    assert int(port) in ports
    assert ports <= set(PORTS)


@pytest.mark.parametrize("name", ["the gateway", "metrics"])
def test_an_endpoint_listens_where_the_page_says(name):
    arguments = inspect.signature(getattr(torchrl_sglang, CHOSEN_IN[name])).parameters
    assert PLACES_AND_ARGUMENTS[name][0] == f"{arguments['host'].default}, any port"
    assert arguments["port"].default == 0


def test_every_error_has_an_entry():
    """Under a heading of its own, so that a search for it ends there."""
    text = TROUBLESHOOTING.read_text()
    headings = re.findall(r"^(\w+)\n[~\-]+$", text, re.MULTILINE)
    names = {name for name in vars(errors) if name.endswith("Error")}
    assert names - {*headings} == set()


MEASURED = (SOURCE / "measured.rst").read_text()
RESULTS = (SOURCE.parents[1] / "benchmarks" / "RESULTS.md").read_text()
FIGURES = re.findall(
    r"^   \* - (.*?)\n     - (.*?)\n     - (.*?)\n"
    r"     - (?:[24] H200(?:, one of them)?|H200|CPU)\n     - (\d{4}-\d{2}-\d{2})\n",
    MEASURED,
    re.MULTILINE | re.DOTALL,
)


def test_the_figures_are_found():
    assert len(FIGURES) > 25
    assert len(FIGURES) == MEASURED.count("     - 2026-")


def test_every_figure_is_a_recorded_one():
    """What the page says, ``benchmarks/RESULTS.md`` says as well."""
    number = r"\d[\d,]*\d(?:\.\d+)?|\d+\.\d+"
    offenders = {
        figure: [n for n in re.findall(number, figure) if n not in RESULTS]
        for _, figure, _, _ in FIGURES
    }
    assert {figure: absent for figure, absent in offenders.items() if absent} == {}


def test_scripts_and_folders_exist():
    """Paths of the repository that a page names."""
    absent = [
        f"{page.relative_to(SOURCE)}: {path}"
        for page in SOURCE.rglob("*.rst")
        if not {"generated", "tutorials"} & set(page.relative_to(SOURCE).parts)
        for path in PATH.findall(page.read_text())
        if not (SOURCE.parents[1] / path).exists()
    ]
    assert absent == []


def test_every_tutorial_has_its_place():
    order = runpy.run_path(str(SOURCE / "tutorial_order.py"))["ORDER"]
    found = {path.stem for path in (SOURCE.parents[1] / "tutorials").glob("*.py")}
    assert sorted(found) == sorted(f"plot_{name}" for name in order)


LISTED = re.compile(
    r"currentmodule:: (\S+)|autosummary::\n(?:   :.*\n)*\n((?:   [\w.]+\n)+)"
)


def test_names_that_the_reference_lists_exist():
    absent = []
    for page in sorted((SOURCE / "reference").glob("*.rst")):
        module = ""
        for match in LISTED.finditer(page.read_text()):
            module = match[1] or module
            for name in (match[2] or "").split():
                try:
                    pkgutil.resolve_name(f"{module}.{name}")
                except (ImportError, AttributeError):
                    absent.append(f"{page.name}: {module}.{name}")
    assert absent == []
