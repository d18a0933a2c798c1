"""The files that make a checkout work: pins, metadata, and make's rules."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
ENGINE = "torchrl_sglang/cli/cpu/requirements.txt"
SETS = ["trainer", "tasks", "test", "lint", "docs"]
FILES = [*(f"requirements/{name}.txt" for name in SETS), ENGINE]
PYTHONS = ["3.11.0", "3.11.2", "3.12.0", "3.13.0"]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read_pins(file: str, python: str) -> dict[str, str]:
    """Return the versions that a file pins for a version of Python."""
    environment = {
        "python_full_version": python,
        "python_version": python.rpartition(".")[0],
    }
    pins: dict[str, str] = {}
    for line in (ROOT / file).read_text().splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", line
        if not requirement.marker or requirement.marker.evaluate(environment):
            assert pins.setdefault(requirement.name, specifier.version)
    return pins


@pytest.mark.parametrize("file", FILES)
def test_pins_fit_every_machine(file: str) -> None:
    text = (ROOT / file).read_text()
    assert "://" not in text
    # Each build of torch asks for its own.
    assert not re.search(r"^(triton|nvidia|cuda)", text, re.MULTILINE)


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_agree(python: str) -> None:
    trainer = read_pins("requirements/trainer.txt", python)
    for name in SETS:
        pins = read_pins(f"requirements/{name}.txt", python)
        shared = pins.keys() & trainer.keys()
        assert {n: pins[n] for n in shared} == {n: trainer[n] for n in shared}


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_are_what_the_project_declares(python: str) -> None:
    assert python in SpecifierSet(PROJECT["requires-python"])
    minor = python.rpartition(".")[0]
    assert f"Programming Language :: Python :: {minor}" in PROJECT["classifiers"]
    pins = read_pins("requirements/trainer.txt", python)
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_demo_needs_no_tools() -> None:
    tools = {"mypy", "pytest", "ray", "ruff", "sphinx", "torchvision", "sglang"}
    for file in ("requirements/trainer.txt", ENGINE):
        assert not tools & read_pins(file, "3.11.0").keys()


def test_the_program_exists() -> None:
    module, _, function = PROJECT["scripts"]["torchrl-sglang"].partition(":")
    assert callable(getattr(import_module(module), function))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which everything is set up, as far as make can see."""
    for file in ["Makefile", "pyproject.toml", *FILES]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, tmp_path / file)
        os.utime(tmp_path / file, (1, 1))
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    stamps = ["created", "trainer-complete", "engine-packages-complete"]
    stamps += ["engine-complete", "old-engine-complete"]
    stamps += [f"{name}-complete" for name in SETS[1:]]
    for age, stamp in enumerate(stamps):
        (tmp_path / ".venv" / f".{stamp}").touch()
        os.utime(tmp_path / ".venv" / f".{stamp}", (age + 2, age + 2))
    return tmp_path


def plan(checkout: Path, target: str, *settings: str) -> str:
    """Return the commands that make would run."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHON", "MAKEFLAGS", "TORCHRL_SGLANG_TORCH_INDEX")
    }
    return subprocess.run(
        ["make", "--dry-run", "--no-print-directory", target, *settings],
        cwd=checkout,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize(
    ("target", "installs"),
    [
        ("demo", {"trainer", "engine"}),
        ("demo-real", {"trainer", "engine", "tasks"}),
        ("demo-distil", {"trainer", "engine", "tasks"}),
        ("test", {"trainer", "engine", "test", "tasks", "old"}),
        ("lint", {"trainer", "lint"}),
        ("docs", {"trainer", "engine", "docs"}),
    ],
)
def test_a_target_installs_what_it_needs(
    checkout: Path, target: str, installs: set[str]
) -> None:
    assert ".cpu." not in plan(checkout, target)
    for stamp in (checkout / ".venv").glob(".*-complete"):
        stamp.unlink()
    commands = plan(checkout, target)
    found = set(re.findall(r"requirements/(\w+)\.txt", commands))
    found |= {"engine"} if ".cpu.install --without-torch" in commands else set()
    found |= {"old"} if ".cpu.install --version" in commands else set()
    assert found == installs


def test_what_was_interrupted_is_made_again(checkout: Path) -> None:
    (checkout / ".venv" / ".installing").touch()
    commands = plan(checkout, "lint")
    assert "-m venv .venv" in commands
    assert "requirements/trainer.txt" in commands


def test_new_pins_are_installed(checkout: Path) -> None:
    os.utime(checkout / "requirements" / "lint.txt")
    commands = plan(checkout, "lint")
    assert "requirements/lint.txt" in commands
    assert "-m venv" not in commands


def test_new_pins_of_the_engine_are_installed(checkout: Path) -> None:
    os.utime(checkout / ENGINE)
    assert ".cpu.install --without-torch" in plan(checkout, "install")


def test_another_python_gets_its_own_environment(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert "-m venv" not in plan(checkout, "lint", f"PYTHON={sys.executable}")
    other = tmp_path_factory.mktemp("other") / "python"
    other.write_text("#!/bin/sh\necho 3.13.0\n")
    other.chmod(0o755)
    assert f"{other} -m venv .venv" in plan(checkout, "lint", f"PYTHON={other}")


def test_an_index_for_torch_gives_torch_alone(checkout: Path) -> None:
    (checkout / ".venv" / ".trainer-complete").unlink()
    index = "https://torch.test/cpu"
    commands = plan(checkout, "lint", f"TORCHRL_SGLANG_TORCH_INDEX={index}")
    assert f'--no-deps --index-url "{index}" torch==' in commands
