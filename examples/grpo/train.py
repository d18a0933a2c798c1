"""A GRPO run from a YAML file, whose keys are the arguments of ``GRPO``.

    python train.py gsm8k.yaml lr=2e-6 engine.num_replicas=4
    python train.py gsm8k.yaml task=reasoning_gym/gsm_symbolic model=smollm2
    torchrun --nproc-per-node 4 train.py gsm8k.yaml

Functions are ``module:function``; a module of the current folder can be imported.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from torchrl_sglang import GRPO, RayLauncher
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_names

NAMES = tuple(inspect.signature(GRPO).parameters)
FUNCTIONS = ("step", "agent", "env", "loss", "optimizer", "collector", "keep_group")
SEVERAL = ("rewards", "group_rewards", "tools")
"""Arguments that are functions, and lists or mappings of these."""
FILES = (".json", ".jsonl", ".parquet")
"""Ends of what is a file, and no data set of the hub."""
TASK = "task"
"""Key that stands for several arguments: see ``reasoning.py``."""
OF_A_TASK = ("prompts", "eval_prompts", "rewards", "system_prompt", "query_key")
"""Arguments of a file that a task on the command line takes the place of."""


def read_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments of ``GRPO``, from a file and what changes them."""
    if not arguments or any("=" not in each for each in arguments[1:]):
        raise ConfigurationError("Give a YAML file, then NAME=VALUE for each change.")
    try:
        file = OmegaConf.load(arguments[0])
        changes = OmegaConf.from_dotlist([*arguments[1:]])
        for name, value in changes.items():
            if OmegaConf.is_list(value):
                # A list takes the place of what is there, such as a mapping.
                file[name] = None
        merged = OmegaConf.merge(file, changes)
        given = OmegaConf.to_container(merged, resolve=True)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigurationError(f"{arguments[0]} cannot be read: {error}") from error
    given = with_task(given, changes)
    check_names("GRPO", given, [*NAMES, TASK])
    folder = Path(arguments[0]).parent
    return {name: convert(name, value, folder) for name, value in given.items()}


def with_task(given: dict[str, Any], changes: Any) -> dict[str, Any]:
    """Returns the arguments with those that ``task`` stands for in its place."""
    if given.get(TASK) is None:
        return {name: value for name, value in given.items() if name != TASK}
    from reasoning import arguments_of

    rest = {name: value for name, value in given.items() if name != TASK}
    if TASK in changes:
        # Those of the file are of another task.
        rest = {k: v for k, v in rest.items() if k in changes or k not in OF_A_TASK}
    return {**arguments_of(given[TASK]), **rest}


def convert(name: str, value: Any, folder: Path) -> Any:
    """Returns what ``GRPO`` takes for a value of the file."""
    if name in SEVERAL or (name in FUNCTIONS and isinstance(value, str)):
        return find_functions(name, value)
    options = value.get("launcher") if isinstance(value, dict) else None
    if name == "engine" and isinstance(options, dict):
        return {**value, "launcher": RayLauncher(**options)}
    if name == "model" and value == "smollm2":
        value = "smollm2:smollm2"
    if name in ("advantage", "model") and ":" in str(value):
        function = find_functions(name, value)
        return function() if name == "model" else function
    if name == "chat_template" and str(value).endswith(".jinja"):
        return read_template(value, folder)
    if name in ("prompts", "eval_prompts") and isinstance(value, (str, Mapping)):
        return read_prompts(name, value, folder)
    return value


def find_functions(name: str, value: Any) -> Any:
    """Returns the functions of a text, or of a list or mapping of texts."""
    if isinstance(value, dict):
        return {key: find_functions(name, each) for key, each in value.items()}
    if isinstance(value, list):
        found = [find_functions(name, each) for each in value]
        # A reward with its weight.
        weighted = len(found) == 2 and isinstance(found[1], (int, float))
        return tuple(found) if weighted else found
    if not isinstance(value, str):
        return value
    module, _, function = value.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"{name}={value!r} names no function: {error}. Write MODULE:FUNCTION, with "
            f"a module that is installed or in the current folder."
        ) from error


def find_file(path: str, folder: Path) -> Path | None:
    """Returns a file of the current folder or of that of the YAML file, if any."""
    here = Path(path).expanduser()
    return next((each for each in (here, folder / here) if each.is_file()), None)


def read_template(path: str, folder: Path) -> str:
    """Returns the text of a file in the current folder or in that of the YAML file."""
    file = find_file(path, folder)
    if file is None:
        raise ConfigurationError(f"chat_template={path!r}: there is no such file.")
    return file.read_text(encoding="utf-8")


def read_prompts(name: str, given: str | Mapping[str, Any], folder: Path) -> Any:
    """Returns the rows of a JSON-lines or parquet file, or of a data set of the hub.

    ``given`` is a path, or a mapping with ``path``, ``map``, a function of a row, and
    further arguments of ``datasets.load_dataset``.
    """
    options = {"path": given} if isinstance(given, str) else dict(given)
    function, path = options.pop("map", None), str(options.pop("path", ""))
    file = find_file(path, folder)
    if file is None and Path(path).suffix in FILES:
        raise ConfigurationError(
            f"{name}={given!r}: there is no file {path!r}, neither in {Path.cwd()} nor "
            f"in {folder.resolve()}."
        )
    try:
        if file is not None and file.suffix == ".jsonl" and not options:
            # Unlike str.splitlines(), JSON has other line ends in its texts.
            lines = file.read_text(encoding="utf-8").split("\n")
            rows: Any = [json.loads(line) for line in lines if line.strip()]
        else:
            from datasets import load_dataset

            if file is not None:
                kind = "parquet" if file.suffix == ".parquet" else "json"
                options, path = {"data_files": str(file), **options}, kind
            rows = load_dataset(path, **{"split": "train", **options})
    except (ImportError, OSError, ValueError) as error:
        raise ConfigurationError(f"{name}={given!r} cannot be read: {error}") from error
    return rows if function is None else [*map(find_functions(name, function), rows)]


if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(f"{__doc__}\nArguments: {', '.join((TASK, *NAMES))}")
        sys.exit()
    sys.path.insert(0, "")
    try:
        GRPO(**read_arguments(sys.argv[1:])).train()
    except ConfigurationError as problem:
        sys.exit(f"train.py: {problem}")
