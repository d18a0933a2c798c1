"""Findings about Python environments and models: pure, facts in and findings out."""

from __future__ import annotations

from collections.abc import Iterator

from torchrl_sglang.cli.doctor.facts import (
    EngineFacts,
    GpuFacts,
    ModelFacts,
    SystemFacts,
    TrainerFacts,
)
from torchrl_sglang.cli.doctor.findings import GIB, Finding, ok, problem, warning
from torchrl_sglang.cli.doctor.versions import in_range

__all__ = ["judge_engine", "judge_model", "judge_trainer"]

INSTALL_ENGINE = "run `python -m torchrl_sglang.backends.launch.cpu.install`"


def judge_trainer(trainer: TrainerFacts) -> Iterator[Finding]:
    """Looks at this Python and its packages."""
    if in_range(trainer.python, trainer.requires_python):
        yield ok("python", f"Python {trainer.python}.")
    else:
        yield problem(
            "python",
            f"Python {trainer.python} is not in {trainer.requires_python}.",
            "Make the trainer's environment with a Python that is.",
        )
    for name, wanted in trainer.requirements.items():
        version = trainer.packages.get(name)
        install = f'Run `pip install "{name}{wanted}"`.'
        if version is None:
            yield problem(name, f"{name} is not installed.", install)
        elif name in trainer.broken:
            yield problem(
                name,
                f"{name} {version} cannot be imported: {trainer.broken[name]}.",
                f"Install it again in an environment without SGLang's packages, "
                f"{wanted or 'any version'}.",
            )
        elif not in_range(version, wanted):
            yield problem(name, f"{name} {version} is not in {wanted}.", install)
        else:
            yield ok(name, f"{name} {version}.")


def judge_engine(engine: EngineFacts) -> Iterator[Finding]:
    """Looks at the Python that SGLang would run in."""
    on_cpu = engine.device == "cpu"
    if engine.error is not None or engine.python is None:
        yield problem(
            "engine",
            engine.error or "There is no interpreter to run SGLang with.",
            f"Name one that has SGLang with --python, or {INSTALL_ENGINE}."
            if on_cpu
            else "Name one that has SGLang with --python.",
        )
        return
    version = engine.packages.get("sglang")
    if version is None:
        yield problem(
            "engine",
            f"{engine.python} has no sglang.",
            f"Name another one with --python, or {INSTALL_ENGINE}."
            if on_cpu
            else 'Run `pip install "torchrl-sglang[sglang]"`, or name another '
            "interpreter with --python.",
        )
        return
    if in_range(version, engine.required):
        others = "".join(f", {other}" for other in engine.generations)
        yield ok(
            "engine",
            f"SGLang {version}{others} for {engine.device} in {engine.python}.",
        )
    else:
        yield warning(
            "engine",
            f"SGLang {version} in {engine.python} is not in {engine.required}, which "
            f"this package is used with.",
            "Install a version that is, or run the tests with this one.",
        )
    router = engine.packages.get("sglang-router")
    if router is None:
        yield warning(
            "router",
            f"{engine.python} has no sglang-router, which several servers share.",
            "Install sglang-router there, or start one server at a time.",
        )
    else:
        yield ok("router", f"sglang-router {router}.")


def judge_model(
    model: ModelFacts, gpus: GpuFacts, system: SystemFacts, device: str
) -> Iterator[Finding]:
    """Looks at a model's folder."""
    if model.folder is None:
        yield warning(
            "model",
            f"{model.name} is neither a folder nor in the cache of the hub.",
            "It is downloaded at the first start, if it exists; or give a folder.",
        )
        return
    if model.config_error is not None:
        yield problem(
            "model",
            f"{model.name} has no usable config.json: {model.config_error}.",
            "Give the folder that a model was saved to.",
        )
        return
    yield ok(
        "model",
        f"{model.model_type or 'A model'} of dtype {model.dtype or 'unknown'}, "
        f"{model.weight_bytes / 1e9:.3g} GB of weights, in {model.folder}.",
    )
    yield from _model_files(model)
    room = max(gpus.free_mib, default=0) << 20 if device == "cuda" else 0
    room = room or (system.memory_free or 0 if device == "cpu" else 0)
    if room and model.weight_bytes > room:
        yield warning(
            "model size",
            f"The weights are {model.weight_bytes / GIB:.1f} GiB, and "
            f"{room / GIB:.1f} GiB are free on one device.",
            "Split it with tp_size, or choose a smaller one.",
        )


def _model_files(model: ModelFacts) -> Iterator[Finding]:
    if model.missing_files or not model.weight_bytes:
        names = ", ".join(model.missing_files[:3]) or "*.safetensors"
        yield problem(
            "weights",
            f"Weights are missing: {names}.",
            "Complete the download, or give load_format=dummy for random ones.",
        )
    elif model.pointer_files:
        yield problem(
            "weights",
            f"{', '.join(model.pointer_files[:3])} is a reference to Git LFS.",
            "Run `git lfs pull` in the folder.",
        )
    if not model.has_tokenizer:
        yield warning(
            "tokenizer",
            "There is no tokenizer.",
            "Give token ids, start with skip_tokenizer_init, or add the files.",
        )
    elif not model.has_chat_template:
        yield warning(
            "chat template",
            "The tokenizer has no chat template.",
            "Conversations need one; texts and tokens do not.",
        )
    else:
        yield ok("tokenizer", "There is one, with a chat template.")
