"""Checks of the recipe's configuration, before anything is started.

The files in ``config/`` say which parameters there are and of which type. Parameters of
the engine, the weight-sync scheme and Ray are checked by these.
"""

from __future__ import annotations

import difflib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
from omegaconf import DictConfig, OmegaConf

from torchrl_sglang.errors import ConfigurationError

FOLDER = Path(__file__).parent

OPEN = (
    "inference_model.server_args",
    "inference_model.generate_kwargs",
    "weight_sync",
    "ray.init_config",
    "ray.launcher",
    "train.correction",
)
"""Sections whose names belong to somebody else, who checks them."""

OPTIONAL = (
    "inference_model.gpu_memory_utilization",
    "inference_model.max_model_len",
    "logging.checkpoint_frequency",
    "logging.eval_frequency",
    "optimizer.clip_grad_norm",
    "train_model.attn_implementation",
)
"""Parameters with a default value that may be null, too."""

COUNTS = (
    "train.total_dialog_turns",
    "train.dialog_turns_per_batch",
    "train.weight_update_frequency",
    "train.epochs",
    "train.optim_batch_size",
    "train.gradient_accumulation_steps",
    "env.repeats",
    "train_model.num_devices",
    "inference_model.num_devices",
    "inference_model.num_replicas",
    "inference_model.max_tokens",
    "logging.checkpoint_frequency",
    "logging.keep_checkpoints",
    "logging.eval_frequency",
    "logging.eval_problems",
)
"""Parameters that are null or at least 1."""

OF_STARTED_SERVERS = tuple(
    f"inference_model.{name}"
    for name in (
        "num_devices",
        "num_replicas",
        "launcher",
        "torch_dtype",
        "gpu_memory_utilization",
        "max_model_len",
        "enforce_eager",
        "server_args",
    )
)
"""Parameters that servers which run already do not have."""

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "env.answer": ("tags", "last_number"),
    "train.on_stale": ("drop", "retry", "mask"),
    "train_model.device": ("cuda", "cpu"),
    "inference_model.device": ("cuda", "cpu"),
    "inference_model.launcher": (None, "local", "ray"),
    "logging.backend": (None, "csv", "tensorboard", "wandb"),
}


def add_mode(arguments: Sequence[str], mode: str) -> list[str]:
    """Returns a command line with a script's own mode, if it names none."""
    named = any(each.startswith("mode=") for each in arguments)
    return [*arguments] if named else [*arguments, f"mode={mode}"]


def check_overrides(arguments: Sequence[str]) -> None:
    """Refuses parameters on the command line that the recipe does not have.

    Hydra refuses a wrong ``name=value``, too, but advises ``+name=value``, which would
    be ignored.

    Raises:
        ConfigurationError: with the nearest name; also for hydra's multirun.

    Examples:
        >>> check_overrides(["train.epochs=2", "+debug=cpu"])
        >>> check_overrides(["+train.epoch=2"])
        Traceback (most recent call last):
        ...
        torchrl_sglang.errors.ConfigurationError: There is no parameter 'train.epoch'; \
did you mean 'train.epochs'?
    """
    known = dict(_leaves(_defaults()))
    sections = {name.rsplit(".", 1)[0] for name in known if "." in name}
    for argument in arguments:
        if argument.lstrip("+") in ("-m", "--multirun", "hydra.mode=MULTIRUN"):
            raise ConfigurationError(
                f"{argument}: a script makes one run; start it for each, with another "
                f"logging.experiment_name."
            )
        name = argument.partition("=")[0].lstrip("+~").partition("@")[0]
        if argument.startswith("-") or name.startswith("hydra") or _is_open(name):
            continue
        if name in ("mode", "debug") or name in known or name in sections:
            continue
        raise ConfigurationError(_unknown(name, known))


def check_config(cfg: DictConfig, *, sync: bool) -> None:
    """Checks names, types and what has to fit together.

    Args:
        cfg: the composed configuration.
        sync: whether the synchronous script runs it.

    Raises:
        ConfigurationError: naming the parameter, and what to write instead.
    """
    known = dict(_leaves(_defaults()))
    given = dict(_leaves(OmegaConf.to_container(cfg, resolve=True)))
    for name, value in given.items():
        if _is_open(name):
            continue
        if name not in known:
            raise ConfigurationError(_unknown(name, known))
        _check_type(name, value, known[name])
    for name, choices in CHOICES.items():
        if given[name] not in choices:
            raise ConfigurationError(
                f"{name}={given[name]!r} is not one of {', '.join(map(repr, choices))}."
            )
    if cfg.train.sync is not sync:
        own, other = ("sync", "async") if sync else ("async", "sync")
        raise ConfigurationError(
            f"grpo-{own}.py runs mode={own}; run grpo-{other}.py for mode={other}."
        )
    _check_sizes(cfg)
    _check_placement(cfg)
    _check_used(cfg)


def flatten(cfg: DictConfig) -> dict[str, bool | int | float | str]:
    """Returns dotted names and values that every logger takes."""
    return {
        name: value if isinstance(value, (bool, int, float)) else str(value)
        for name, value in _leaves(OmegaConf.to_container(cfg, resolve=True))
    }


def is_changed(cfg: DictConfig, name: str) -> bool:
    """Returns whether a parameter has another value than the files give it."""
    value = OmegaConf.select(cfg, name)
    return all(value != OmegaConf.select(each, name) for each in _files())


def _check_sizes(cfg: DictConfig) -> None:
    """Checks that groups, batches and steps divide each other."""
    train = cfg.train
    for name in COUNTS:
        count = OmegaConf.select(cfg, name)
        if count is not None and count < 1:
            null = ", or null for none" if name in OPTIONAL else ""
            raise ConfigurationError(f"{name}={count} must be at least 1{null}.")
    for name, part, size in (
        ("train.dialog_turns_per_batch", "env.repeats", cfg.env.repeats),
        ("train.total_dialog_turns", "env.repeats", cfg.env.repeats),
        (
            "train.optim_batch_size",
            "train.gradient_accumulation_steps",
            train.gradient_accumulation_steps,
        ),
        (
            "train.dialog_turns_per_batch",
            "train.optim_batch_size",
            train.optim_batch_size,
        ),
    ):
        value = OmegaConf.select(cfg, name)
        if value % size:
            raise ConfigurationError(
                f"{name}={value} must be a multiple of {part}={size}."
            )
    every, updates = cfg.logging.checkpoint_frequency, train.weight_update_frequency
    if every is not None and every % updates:
        raise ConfigurationError(
            f"logging.checkpoint_frequency={every} must be a multiple of "
            f"train.weight_update_frequency={updates}, so that servers have what is "
            f"saved."
        )
    if train.sync and train.max_staleness != 0:
        raise ConfigurationError(
            f"mode=sync trains on the newest weights only; train.max_staleness="
            f"{train.max_staleness} is for mode=async."
        )


def _check_placement(cfg: DictConfig) -> None:
    """Checks where trainer and servers are to run."""
    inference = cfg.inference_model
    if inference.colocated and not cfg.train.sync:
        raise ConfigurationError(
            "inference_model.colocated=true lets the servers sleep while the trainer "
            "trains, so that mode=async would wait for them; run mode=sync, or give "
            "the servers GPUs of their own."
        )
    if inference.colocated and cfg.train.weight_update_frequency != 1:
        raise ConfigurationError(
            "inference_model.colocated=true has the servers forget their weights while "
            "the trainer trains; leave train.weight_update_frequency=1."
        )
    if inference.colocated and inference.url is not None:
        raise ConfigurationError(
            "inference_model.colocated=true needs servers that are started here; leave "
            "inference_model.url out."
        )
    if inference.colocated and inference.launcher == "ray":
        raise ConfigurationError(
            "inference_model.colocated=true is for servers on this machine; leave "
            "inference_model.launcher out."
        )
    by_memory = not (cfg.train_model.lora.enabled or cfg.weight_sync.get("directory"))
    if inference.colocated and inference.num_replicas > 1 and by_memory:
        raise ConfigurationError(
            f"inference_model.colocated=true has a server read the weights from the "
            f"memory of the trainer's GPU, which the others of inference_model."
            f"num_replicas={inference.num_replicas} cannot open; give one server "
            f"inference_model.num_devices GPUs, or the servers GPUs of their own."
        )


def _check_used(cfg: DictConfig) -> None:
    """Refuses what this run would not use."""
    unused: dict[str, str] = {}
    if cfg.inference_model.launcher != "ray":
        need = "needs inference_model.launcher=ray; leave it out."
        unused |= dict.fromkeys(("ray.init_config", "ray.launcher"), need)
    if cfg.inference_model.url is not None:
        need = "is for servers that are started; leave it, or inference_model.url, out."
        unused |= dict.fromkeys(OF_STARTED_SERVERS, need)
    for name, need in unused.items():
        if is_changed(cfg, name):
            raise ConfigurationError(f"{name}={OmegaConf.select(cfg, name)} {need}")
    use, coefficient = cfg.train.use_kl_to_ref, cfg.train.kl_to_ref_coeff
    if use is not (coefficient > 0):
        raise ConfigurationError(
            f"train.use_kl_to_ref={use} and train.kl_to_ref_coeff={coefficient} do not "
            f"fit: give train.use_kl_to_ref=true and a coefficient above 0, or neither."
        )


@functools.cache
def _files() -> tuple[DictConfig, ...]:
    """Returns the default values, and those of a run without a GPU."""
    debug = OmegaConf.load(FOLDER / "config" / "debug" / "cpu.yaml")
    return OmegaConf.create(_defaults()), debug


def _defaults() -> dict[str, Any]:
    """Returns the parameters that there are, with their default values."""
    base = OmegaConf.load(FOLDER / "config" / "grpo_gsm8k.yaml")
    mode = OmegaConf.load(FOLDER / "config" / "mode" / "async.yaml")
    merged = OmegaConf.to_container(OmegaConf.merge(base, mode))
    return {
        name: section
        for name, section in merged.items()
        if name not in ("defaults", "hydra")
    }


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted names and values; a section without any is a value."""
    for key, value in section.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not _is_open(name):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _is_open(name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in OPEN)


def _check_type(name: str, value: Any, default: Any) -> None:
    """Refuses a value of another type than the default, where there is one."""
    if default is None or isinstance(value, type(default)):
        return
    if value is None and (name in OPTIONAL or None in CHOICES.get(name, ())):
        return
    if isinstance(default, float) and isinstance(value, int) and value is not True:
        return
    raise ConfigurationError(
        f"{name}={value!r} must be of the type {type(default).__name__}, as its "
        f"default, {default!r}."
    )


def _unknown(name: str, known: Iterable[str]) -> str:
    """Says that there is no such parameter, and which one was probably meant."""
    names = list(known)
    last = name.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.75) or [
        each for each in names if each.rsplit(".", 1)[-1] == last
    ]
    hint = f"did you mean {near[0]!r}?" if near else "config/grpo_gsm8k.yaml has all."
    return f"There is no parameter {name!r}; {hint}"


def start(mode: str, run: Callable[[DictConfig], None]) -> None:
    """Runs a script: reads the command line, checks it, and calls a function.

    Args:
        mode: of the script, "sync" or "async".
        run: gets the configuration.
    """

    def main(cfg: DictConfig) -> None:
        # Caught here, where hydra does not print its own words above it.
        try:
            check_config(cfg, sync=mode == "sync")
            run(cfg)
        except ConfigurationError as error:
            _refuse(error)

    sys.argv[1:] = add_mode(sys.argv[1:], mode)
    # Later versions have no other behaviour, and warn of the argument.
    old = hydra.__version__.startswith("1.3.")
    version = {"version_base": "1.3"} if old else {}
    folder = str(FOLDER / "config")
    try:
        check_overrides(sys.argv[1:])
    except ConfigurationError as error:
        _refuse(error)
    # Otherwise hydra prints what an error is, and hides where it comes from.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    hydra.main(config_path=folder, config_name="grpo_gsm8k", **version)(main)()


def _refuse(error: ConfigurationError) -> NoReturn:
    """Ends the script with what is wrong, and no traceback."""
    sys.exit(f"{Path(sys.argv[0]).name}: {error}")
