"""Which layer may import which: the layers of CONTRIBUTING.md."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchrl_sglang

PACKAGE = "torchrl_sglang"
ROOT = Path(torchrl_sglang.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

FLOOR = {
    "errors": 0,
    "types": 0,
    "support": 1,
    "telemetry": 2,
    "requests": 2,
    "observer": 2,
    "chat": 2,
    "backends": 3,
    "policies": 4,
    "weight_update": 4,
    "objectives": 4,
    "collectors": 5,
    "gateway": 6,
    "recording": 6,
    "trainers": 7,
    "rollouts": 7,
    "viewer": 8,
    "testing": 8,
    "cli": 9,
    "__main__": 10,
}
"""A layer imports itself and the layers below it."""

RUN_BY_SGLANG = {
    "backends/launch/cpu/launch.py",
    "backends/launch/loaders/torchrl_sglang_loader.py",
    "backends/launch/loaders/torchrl_sglang_delta.py",
    "backends/launch/loaders/torchrl_sglang_vllm.py",
}
"""Run in SGLang's own Python, where this package is not."""

IMPORTS_SGLANG = RUN_BY_SGLANG | {"weight_update/transports/cuda_ipc.py"}
WRITES_PICKLES = {
    "backends/lora/payload.py",
    "collectors/shared_collector.py",
    "weight_update/transports/handles.py",
}
"""Servers take tensors in this form, and ranks of a trainer tell each other objects in
it; nothing is read in it here."""

READS_PICKLES = {
    "collectors/packed_rows.py",
    "backends/launch/loaders/torchrl_sglang_vllm.py",
}
"""NCCL's id of a trainer is read with that class alone. Batches go to the ranks of a
trainer, or come from an actor on Ray, over connections that carry pickles anyway."""

HEAVY = {"sglang", "vllm", "torchvision", "ray", "sglang_router"}


@functools.cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Every module that a file imports, and whether it does so at module level."""
    return list(_imports(path))


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    tree = parse(path)
    inner = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and _is_module(node.value):
            # As importlib takes it.
            found = [node.value]
        else:
            continue
        for name in found:
            yield name, id(node) not in inner


def _is_module(name: object) -> bool:
    if not isinstance(name, str) or not name.startswith(f"{PACKAGE}."):
        return False
    path = ROOT.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def layer_of(module: str) -> str | None:
    """Returns the layer of a module; None for the package itself and other packages."""
    package, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    return name if package == PACKAGE and name in FLOOR else None


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_file_has_a_layer():
    assert len(FILES) > 30
    for path in FILES:
        top = relative(path).partition("/")[0].removesuffix(".py")
        assert top in FLOOR or top == "__init__", f"{path} is in no layer"


def test_imports_point_down():
    offenders = []
    for path in FILES:
        layer = layer_of(f"{PACKAGE}.{relative(path).replace('/', '.')}")
        for name, _ in imports(path):
            other = layer_of(name)
            if layer is None or other is None or layer == other:
                continue
            if FLOOR[other] >= FLOOR[layer]:
                offenders.append(f"{relative(path)} imports {name}")
    assert offenders == []


def test_subscribers_are_not_imported_by_publishers():
    """They publish events; a gateway renders its own /metrics, and that is all."""
    publishers = ("backends/", "weight_update/", "collectors/", "gateway/")
    subscribers = {"recording", "telemetry", "viewer"}
    offenders = {
        f"{relative(path)} imports {name}"
        for path in FILES
        if relative(path).startswith(publishers)
        for name, _ in imports(path)
        if layer_of(name) in subscribers
    }
    rendering = f"gateway/gateway.py imports {PACKAGE}.telemetry.prometheus"
    assert all(offender.startswith(rendering) for offender in offenders)


REACHES_ENGINE = {
    "async_sglang.AsyncSGLang",
    "client.control.CONTROL_TIMEOUT_SECONDS",
    "client.control.ControlPlane",
    "client.model_info.MARK",
    "client.model_info.write_mark",
    "contract.RLSGLangEngine",
    "fleet.weights_state.WeightUpdate",
    "fleet.weights_state.next_version",
    "fleet.weights_state.version_order",
    "launch.gpus.visible_devices",
    "launch.loaders.torchrl_sglang_delta",
    "lora.names.check_name",
    "lora.names.is_published",
    "lora.names.parse_served_name",
    "lora.payload.check_kind",
    "lora.payload.fits_servers",
    "lora.payload.read_folder",
    "session",
}
"""What the layers above import of the engine: the contract, two types in it, the class
whose objects they make of an address, the order of a weight update, and pure functions.
"""

ENGINE_ORDER = [
    "client",
    "lora",
    "fleet",
    "generation",
    "launch",
    "contract",
    "session",
    "torchrl_calls",
    "async_sglang",
]
"""Each folder or file of ``backends`` imports itself and those before it."""

COLLECTORS_ORDER = [
    "timeouts",
    "copies",
    "packed_rows",
    "weight_sync",
    "base",
    "scheduling",
    "options",
    "runtime",
    "groups",
    "llm_collector",
    "async_llm_collector",
    "ray_collector",
    "shared_collector",
]
"""The same of ``collectors``."""


def test_the_engine_is_reached_through_its_contract():
    above = ("policies", "weight_update", "collectors", "objectives")
    offenders = []
    for path in (file for layer in above for file in (ROOT / layer).rglob("*.py")):
        for name, _ in imports(path):
            inner = name.removeprefix(f"{PACKAGE}.backends.")
            if inner != name and inner not in REACHES_ENGINE:
                offenders.append(f"{relative(path)} imports {name}")
    assert offenders == []


@pytest.mark.parametrize(
    ("layer", "order"),
    [("backends", ENGINE_ORDER), ("collectors", COLLECTORS_ORDER)],
)
def test_imports_within_a_layer_point_down(layer, order):
    offenders = []
    for path in (ROOT / layer).rglob("*.py"):
        part = relative(path).removesuffix(".py").split("/")[1]
        for name, _ in imports(path):
            inner = name.removeprefix(f"{PACKAGE}.{layer}.")
            other = inner.partition(".")[0]
            if inner != name and order.index(other) > order.index(part):
                offenders.append(f"{relative(path)} imports {name}")
    assert offenders == []


def test_each_class_has_a_name_of_its_own():
    """Nobody has to look up which ``Response`` or ``_Call`` of several is meant."""
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(str(path))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_no_imports_are_circular():
    """Imports in functions and for type checking count, too."""
    modules = {
        ".".join([PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(
            ".__init__"
        ): path
        for path in FILES
    }
    graph = {
        module: {
            name if name in modules else name.rpartition(".")[0]
            for name, _ in imports(path)
        }
        & (modules.keys() - {module})
        for module, path in modules.items()
    }
    # Raises CycleError, which names the modules of a circle.
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(modules)


def test_nothing_heavy_is_imported():
    offenders = []
    for path in FILES:
        by_sglang = relative(path) in IMPORTS_SGLANG
        for name, at_module_level in imports(path):
            top = name.partition(".")[0]
            allowed = {"ray", "sglang_router"} | (HEAVY if by_sglang else set())
            if top in HEAVY and (at_module_level or top not in allowed):
                offenders.append(f"{relative(path)} imports {name}")
    assert offenders == []


def test_the_watchdog_stands_alone():
    """It is run as a script, with the standard library and nothing else."""
    found = {
        name.partition(".")[0]
        for name, _ in imports(ROOT / "backends/launch/watchdog.py")
    }
    assert found <= set(sys.stdlib_module_names)


ENGINE_FOLDERS = ("backends", "recording", "requests", "support", "telemetry")
"""What the engine consists of, and what looks at it."""


def test_the_engine_knows_neither_torchrl_nor_collectives():
    for path in (each for f in ENGINE_FOLDERS for each in (ROOT / f).rglob("*.py")):
        if relative(path) in RUN_BY_SGLANG:
            continue
        for name, _ in imports(path):
            top = name.partition(".")[0]
            assert top not in {"tensordict", "torchrl"}, path
            assert not name.startswith("torch.distributed"), path


def test_chat_knows_neither_tensors_nor_the_engine():
    """What TorchRL would choose is imported where it is asked for."""
    for path in (ROOT / "chat").rglob("*.py"):
        for name, at_module_level in imports(path):
            top = name.partition(".")[0]
            if at_module_level:
                assert top not in {"tensordict", "torch", "torchrl"}, path


OPTIONAL = {
    *("hydra", "mlflow", "omegaconf", "opentelemetry", "peft", "prometheus_client"),
    *("promql_parser", "ray", "tensorboard", "trackio", "wandb"),
}


def test_tests_are_found_without_optional_packages():
    """On a machine with a GPU there may be none; the tests that need one skip."""
    found = []
    for path in Path(__file__).parents[1].rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if OPTIONAL & {name.partition(".")[0] for name in names}:
                found.append((path.name, names))
    assert not found


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        (
            f"import {PACKAGE}",
            {"torch", "torchrl", "tensordict", "transformers", "aiohttp"},
        ),
        (
            f"from {PACKAGE} import AsyncSGLang",
            {"torchrl", "tensordict", "transformers"},
        ),
    ],
    ids=["package", "engine"],
)
def test_importing_it_is_cheap(statement, absent):
    code = (
        f"{statement}; import sys; "
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert PACKAGE in loaded
    assert not loaded & absent


def test_messages_of_the_engine_are_seen_once():
    """Without TorchRL as with it, whose import replaces the handler."""
    code = (
        "from torchrl_sglang.support.log import torchrl_logger as logger\n"
        "logger.info('engine alone')\n"
        "import torchrl\n"
        "logger.info('with TorchRL')\n"
        "assert logger is torchrl.torchrl_logger\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("engine alone") == 1
    assert done.stdout.count("with TorchRL") == 1


def test_a_level_of_logging_that_does_not_exist():
    done = subprocess.run(
        [sys.executable, "-c", "import torchrl_sglang.support.log"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "RL_LOGGING_LEVEL": "debug"},
    )
    assert "ConfigurationError: The environment variable RL_LOGGING_LEVEL='debug'" in (
        done.stderr
    )


def test_the_trainer_never_imports_sglang():
    for name in torchrl_sglang.__all__:
        getattr(torchrl_sglang, name)
    assert not {"sglang", "torchvision", "vllm"} & set(sys.modules)


def test_nothing_is_unpickled():
    """What a server or a router sends is JSON, and is read as nothing else."""
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    for name in WRITES_PICKLES:
        used = {
            node.attr
            for node in ast.walk(parse(ROOT / name))
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "pickle"
        }
        assert used <= {"HIGHEST_PROTOCOL", "Pickler", "dumps"}, name
    for path in sorted(ROOT.rglob("*.py")):
        if relative(path) in WRITES_PICKLES | READS_PICKLES:
            continue
        found = {name.partition(".")[0] for name, _ in imports(path)}
        assert not found & forbidden, path


def documented() -> Iterator[str]:
    """Yields the names of the package itself that the pages of its reference list."""
    for page in (ROOT.parent / "docs" / "source" / "reference").glob("*.rst"):
        module = ""
        for line in page.read_text().splitlines():
            if line.startswith(".. currentmodule:: "):
                module = line.split()[-1]
            elif module == PACKAGE and re.fullmatch(r"   \w+", line):
                yield line.strip()


def test_public_names_are_those_of_the_reference():
    assert sorted(torchrl_sglang.__all__) == sorted({*documented(), "__version__"})
    assert dir(torchrl_sglang) == sorted(torchrl_sglang.__all__)
    namespace: dict[str, object] = {}
    exec(f"from {PACKAGE} import *", namespace)
    assert set(torchrl_sglang.__all__) <= set(namespace)


def test_public_names_can_be_imported():
    declared = {name for name, _ in imports(ROOT / "__init__.py")}
    offenders = []
    for name in sorted({*torchrl_sglang.__all__} - {"__version__"}):
        value = getattr(torchrl_sglang, name)
        home = value.__module__
        if (
            f"{home}.{name}" not in declared
            or value is not getattr(importlib.import_module(home), name)
            or not value.__doc__
        ):
            offenders.append(f"{name} of {home}")
    assert offenders == []


def test_a_name_that_is_not_public():
    with pytest.raises(AttributeError, match="'SGLang' has no attribute|no attribute"):
        torchrl_sglang.SGLang  # noqa: B018
