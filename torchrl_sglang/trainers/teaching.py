"""Teachers of a run: their arguments, and their servers."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from torchrl_sglang.backends.async_sglang import AsyncSGLang
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.backends.launch.gpus import visible_devices
from torchrl_sglang.backends.launch.server_command import check_local_model
from torchrl_sglang.collectors.groups.user_functions import check_call
from torchrl_sglang.collectors.scheduling.prompts import to_task
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.config import as_config
from torchrl_sglang.objectives.distillation import refuse_recomputed
from torchrl_sglang.objectives.divergences import Distillation
from torchrl_sglang.trainers.arguments import RunArguments, check_model
from torchrl_sglang.trainers.placement import (
    COLOCATED_SHARE,
    check_engine,
    connect_arguments,
    place_apart,
    server_arguments,
)
from torchrl_sglang.trainers.progress import tell
from torchrl_sglang.trainers.ranks import TrainerRanks
from torchrl_sglang.trainers.serving import Served, load_tokenizer
from torchrl_sglang.trainers.teacher import Teacher, check_name, check_same_tokens

INITIAL, STUDENT = "initial", "student"
"""Teachers that are the model before training, and the one that is trained."""


class Teaching:
    """Checks and starts a run's teachers."""

    def __init__(self, arguments: RunArguments) -> None:
        self.arguments = arguments
        self.distillation: Distillation | None = None
        self._copies: dict[Any, RLSGLangEngine] = {}
        """Copies of engines for other ranks, made while their servers were awake."""
        self.teachers: dict[Any, Any] = {}
        """Teachers by the values of ``teacher_key``: an engine, ``STUDENT``, arguments
        of a connection, or ``"model"`` and arguments of servers to start."""
        if arguments.teacher is None:
            _refuse_without_teacher(arguments)
            return
        settings = arguments.distillation or Distillation()
        assert isinstance(settings, Distillation)
        self.distillation = settings
        steps = arguments.minibatches * arguments.epochs_per_batch
        correction = arguments.correction
        if steps > 1 and correction is not None and as_config(correction).recomputes:
            refuse_recomputed(settings)
        teachers, key = arguments.teacher, arguments.teacher_key
        if key is None:
            teachers = {None: teachers}
        if not (isinstance(teachers, Mapping) and teachers):
            raise ConfigurationError(
                f"teacher_key={key!r} is a column of the tasks, and teacher a mapping "
                f"of its values to teachers, got {teachers!r}."
            )
        self.teachers = {
            name: self._read(teacher) for name, teacher in teachers.items()
        }
        self._check_prompt()
        self._check_tasks()
        if self.sleeps and STUDENT in self.teachers.values():
            raise ConfigurationError(
                "With colocated=True, teachers whose servers are started have memory "
                "only while the student's servers sleep, so 'student' cannot be "
                "another teacher; give an address or an engine of one of them."
            )

    def _read(self, teacher: Any) -> Any:
        """Returns a teacher in the form of :attr:`teachers`."""
        if teacher == STUDENT or isinstance(teacher, RLSGLangEngine):
            return teacher
        is_path = isinstance(teacher, os.PathLike)
        if is_path or (isinstance(teacher, str) and "://" not in teacher):
            teacher = {"model": teacher}
        options = dict(teacher) if isinstance(teacher, Mapping) else teacher
        model = None
        if isinstance(options, dict):
            model = options.pop("model", None)
            for name in ("model_name", "model_path"):
                if name in options:
                    raise ConfigurationError(
                        f"teacher has {name!r}; give its model as 'model'."
                    )
        check_engine("teacher", options)
        running = connect_arguments(options)
        if (model is None) is (running is None):
            raise ConfigurationError(
                f"teacher must have either 'model' and arguments of its servers, or an "
                f"address of servers, got {', '.join(map(str, teacher))}. Several "
                f"teachers need a teacher_key."
            )
        if running is not None:
            return running
        if model == INITIAL:
            model = self.arguments.model
        if isinstance(check_model("teacher", model), nn.Module):
            raise ConfigurationError(
                f"The teacher's model is a module ({type(model).__name__}), of which "
                f"no server can be started; give its folder or hub name, or an engine "
                f"that serves it, as teacher=...."
            )
        return {"model": check_model("teacher", model), **options}

    def _check_prompt(self) -> None:
        prompt, arguments = self.arguments.teacher_prompt, self.arguments
        if prompt is None:
            if STUDENT in self.teachers.values():
                raise ConfigurationError(
                    "teacher='student' has the student's own log-probs; give it a "
                    "teacher_prompt that says more than the task, or another teacher."
                )
            return
        check_call("teacher_prompt", prompt, "task")
        has_turns = any((arguments.step, arguments.tools, arguments.env))
        if has_turns and arguments.max_turns != 1:
            raise ConfigurationError(
                "teacher_prompt replaces the first prompt, and rows of later turns do "
                "not say where that ends; give max_turns=1, or an agent, each of whose "
                "rows is a whole conversation."
            )

    def _check_tasks(self) -> None:
        """Checks that each task of a list names a teacher."""
        key, prompts = self.arguments.teacher_key, self.arguments.prompts
        if key is None or not isinstance(prompts, (list, tuple)):
            return
        for row in prompts:
            name = to_task(row, self.arguments.query_key).get(key)
            check_name(key, name, self.teachers)

    @property
    def sleeps(self) -> list[Any]:
        """Names of teachers that have memory only while the student's servers sleep.

        Those with GPUs of their own do not sleep.
        """
        if not self.arguments.colocated:
            return []
        return [
            name
            for name, teacher in self.teachers.items()
            if _starts(teacher) and not _has_gpus(teacher)
        ]

    @property
    def scores_groups(self) -> bool:
        """Whether groups are scored while others are generated.

        A batch is scored at once if its teachers share memory or weights with the
        student's servers, or its number of top tokens depends on all of it.
        """
        settings, engine = self.distillation, self.arguments.engine
        if settings is None or settings.mass is not None or self.sleeps:
            return False
        students: list[Any] = [STUDENT, engine, connect_arguments(engine)]
        return not any(teacher in students for teacher in self.teachers.values())

    def start(self, stack: ExitStack, ranks: TrainerRanks) -> dict[Any, Any]:
        """Returns engines by name, without the student's, on the first rank.

        A stack ends their servers. All ranks call this.

        Raises:
            ConfigurationError: if a teacher has other token ids than the student.
        """
        engines: dict[Any, Any] = {}

        def open_engines() -> None:
            # Before anything is started, which takes minutes.
            self._check_tokenizers()
            teachers = self.teachers | self._place()
            for name, teacher in teachers.items():
                if isinstance(teacher, RLSGLangEngine):
                    engines[name] = teacher
                elif teacher != STUDENT:
                    engines[name] = stack.enter_context(self._open(teacher, ranks))
                    if name in self.sleeps:
                        self._copies[name] = copy.deepcopy(engines[name])
                        engines[name].sleep()

        ranks.first(open_engines)
        return engines

    def _place(self) -> dict[Any, Mapping[str, Any]]:
        """Returns the arguments of servers to start, which share GPUs and memory."""
        started = {name: t for name, t in self.teachers.items() if _starts(t)}
        if not self.arguments.colocated:
            several = len(started) > 1 and torch.cuda.is_available()
            return place_apart(started, len(visible_devices())) if several else started
        # All of them are awake while a batch is scored.
        sleeps = self.sleeps
        share = {"mem_fraction_static": COLOCATED_SHARE / max(len(sleeps), 1)}
        return {
            name: options
            if "gpu_memory_utilization" in options or name not in sleeps
            else {**share, **options}
            for name, options in started.items()
        }

    def _open(self, teacher: Mapping[str, Any], ranks: TrainerRanks) -> AsyncSGLang:
        if not _starts(teacher):
            return AsyncSGLang.connect(**teacher)
        options = dict(teacher)
        model = options.pop("model")
        if self.arguments.colocated and not _has_gpus(teacher):
            options = server_arguments(
                {"enable_weights_cpu_backup": True, **options},
                ranks,
                colocated=True,
                lora=None,
                by_file=True,
                seed=self.arguments.seed,
            )
        tell(f"Starting the servers of the teacher {model} ...")
        return AsyncSGLang.from_pretrained(model, **options)

    def _check_tokenizers(self) -> None:
        """Compares the token ids of student and teachers, and their number with k."""
        engine: Any = self.arguments.engine
        source = connect_arguments(engine) or engine
        if source is None or (source is engine and isinstance(engine, Mapping)):
            source = {"model": str(self.arguments.model), **(engine or {})}
        student = _read_tokenizer(source)
        for teacher in self.teachers.values():
            if teacher != STUDENT:
                name = teacher.get("model") if isinstance(teacher, Mapping) else None
                other = _read_tokenizer(teacher)
                check_same_tokens(student, other, name=name or str(other.name_or_path))
                assert self.distillation is not None
                self.distillation.num_top(len(other))

    def make(
        self, engines: Mapping[Any, Any], student: Served, ranks: TrainerRanks
    ) -> Teacher | None:
        """Returns the teacher on each rank, from engines on the first one.

        Its own prompts have the student's chat template.
        """
        if self.distillation is None:
            return None
        everyone = {name: engines.get(name, student.engine) for name in self.teachers}
        shared: Any = ranks.share(everyone | self._copies if ranks.is_first else None)
        if ranks.is_first:
            shared = everyone
        arguments = self.arguments
        return Teacher(
            shared if arguments.teacher_key is not None else shared[None],
            self.distillation,
            key=arguments.teacher_key,
            prompt=arguments.teacher_prompt,
            chat_template=ranks.share(student.chat_template),
            chat_template_kwargs=arguments.chat_template_kwargs,
            sleeps=self.sleeps,
        )


def _refuse_without_teacher(arguments: RunArguments) -> None:
    for name in ("distillation", "teacher_key", "teacher_prompt"):
        if getattr(arguments, name) is not None:
            raise ConfigurationError(f"{name} is for a teacher; give a teacher.")


def _starts(teacher: Any) -> bool:
    """Returns whether servers of a teacher are started."""
    return isinstance(teacher, Mapping) and "model" in teacher


def _has_gpus(teacher: Mapping[str, Any]) -> bool:
    """Returns whether servers of a teacher have GPUs of their own."""
    return teacher.get("cuda_devices") is not None


def _read_tokenizer(source: Any) -> Any:
    """Returns the tokenizer of an engine, or of servers, running or not."""
    if isinstance(source, RLSGLangEngine):
        return source.get_tokenizer()
    if _starts(source):
        check_local_model(source["model"])
        return load_tokenizer(source["model"], source)
    with AsyncSGLang.connect(**source) as engine:
        return engine.get_tokenizer()
