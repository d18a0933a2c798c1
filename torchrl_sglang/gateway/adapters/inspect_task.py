"""``InspectAgent``: a task of Inspect as an agent."""

from __future__ import annotations

import asyncio
import contextvars
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

from torchrl_sglang.errors import ConfigurationError, UserFunctionError

SAMPLE = "sample"
"""Column of a task."""
START_SECONDS = 300.0
MAX_SAMPLES = 256

_RUN: contextvars.ContextVar[_SampleRun] = contextvars.ContextVar("inspect_run")
"""Run of the current sample."""


@dataclass(eq=False, kw_only=True, slots=True)
class _SampleRun:
    """A run of a sample in a session."""

    sample: Any
    """The sample of Inspect."""
    epoch: int
    """Number of the run of this sample."""
    model: Any
    """Model of Inspect that calls the session."""
    result: Future[Any]
    """The sample's log, with its scores."""


class InspectAgent:
    """A task of Inspect as an agent, with its dataset, solver, tools and scorers.

    A task here is a sample of the task's dataset. Inspect runs its solver with the
    gateway as the model, in its sandbox, if any, and scores it. All samples are parts
    of a common evaluation of Inspect in a thread, which begins with the first sample
    and ends with :meth:`close`; a process can have a single evaluation at a time. It
    has no progress bars unless ``INSPECT_DISPLAY`` is set.

    It needs an Inspect with ``SampleSource``, as 0.3.285; extra ``inspect``.

    Args:
        task: an ``inspect_ai.Task``. It is changed: its dataset becomes a source.

    Keyword Args:
        reward: name of the reward's scorer, or a function of the ``EvalSample``.
            Defaults to the only scorer. Inspect's ``value_to_float`` converts values:
            ``"C"`` is 1, ``"P"`` 0.5 and ``"I"`` 0.
        max_samples: most samples at once. Defaults to 256.
        eval_args: further arguments of ``inspect_ai.eval_async``, such as
            ``{"time_limit": 600, "model_roles": {"grader": "openai/gpt-5"}}``. A
            model-graded scorer needs another model than the policy.

    Raises:
        ConfigurationError: if Inspect is too old or missing, or an argument is wrong.

    Examples:
        >>> from inspect_evals.gsm8k import gsm8k  # doctest: +SKIP
        >>> agent = InspectAgent(gsm8k())  # doctest: +SKIP
        >>> run = GRPO(  # doctest: +SKIP
        ...     "Qwen/Qwen3-4B", prompts=agent.prompts(), agent=agent
        ... )
    """

    def __init__(
        self,
        task: Any,
        *,
        reward: str | Callable[[Any], float] | None = None,
        max_samples: int = MAX_SAMPLES,
        eval_args: Mapping[str, Any] | None = None,
    ) -> None:
        _check(task)
        self._task = task
        self._samples = {
            number if sample.id is None else sample.id: sample
            for number, sample in enumerate(task.dataset, start=1)
        }
        self._reward = reward
        self._evaluation = _Evaluation(task, max_samples, dict(eval_args or {}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def prompts(self) -> list[dict[str, Any]]:
        """Returns the tasks: a mapping with the id of each sample."""
        return [{SAMPLE: name} for name in self._samples]

    async def __call__(
        self, task: Mapping[str, Any], *, base_url: str, api_key: str
    ) -> float:
        """Runs a sample in a session, and returns its score.

        Raises:
            ConfigurationError: if there is no such sample, or several scorers and no
                ``reward``.
            UserFunctionError: if the sample, or the evaluation, fails.
        """
        name = task.get(SAMPLE) if isinstance(task, Mapping) else None
        if name not in self._samples:
            raise ConfigurationError(
                f"{task!r} is no sample of this task; give prompts=agent.prompts()."
            )
        sample = self._samples[name].model_copy(deep=True)
        sample.id = name
        log = await self._evaluation.run(sample, base_url=base_url, api_key=api_key)
        if log.error is not None:
            raise UserFunctionError(
                f"The sample {name!r} of Inspect has failed: {log.error.message}."
            )
        return self._reward_of(log)

    def close(self) -> None:
        """Ends the evaluation; running samples are cancelled."""
        self._evaluation.close()

    def _reward_of(self, log: Any) -> float:
        from inspect_ai.scorer import value_to_float

        if callable(self._reward):
            return float(self._reward(log))
        scores = log.scores or {}
        name = self._reward
        if name is None and len(scores) == 1:
            (name,) = scores
        if name not in scores:
            raise ConfigurationError(
                f"reward={self._reward!r} is not one of this task's scorers, which are "
                f"{', '.join(map(repr, scores)) or 'none'}; give the name of one, or a "
                f"function of the sample."
            )
        return float(value_to_float()(scores[name].value))


class _Evaluation:
    """An evaluation of Inspect with samples added while it runs."""

    def __init__(self, task: Any, max_samples: int, arguments: dict[str, Any]) -> None:
        self._task = task
        self._arguments = {
            "max_samples": max_samples,
            "fail_on_error": False,
            **arguments,
        }
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: contextvars.Context | None = None
        self._wake: asyncio.Event | None = None
        self._ready = threading.Event()
        self._closed = False
        self._runs: dict[tuple[Any, int], _SampleRun] = {}
        self._epochs: Counter[Any] = Counter()
        self._failure: BaseException | None = None

    async def run(self, sample: Any, *, base_url: str, api_key: str) -> Any:
        """Returns the log of a sample after its run in a session."""
        from inspect_ai.model import get_model

        await asyncio.to_thread(self._start)
        model = get_model(
            "openai-api/gateway/policy",
            base_url=base_url,
            api_key=api_key,
            memoize=False,
        )
        with self._lock:
            self._check_alive()
            self._epochs[sample.id] += 1
            run = _SampleRun(
                sample=sample,
                epoch=self._epochs[sample.id],
                model=model,
                result=Future(),
            )
            self._runs[sample.id, run.epoch] = run
        try:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._enqueue, run, context=self._context)
            return await asyncio.wrap_future(run.result)
        finally:
            # An abandoned sample has no model.
            self._runs.pop((sample.id, run.epoch), None)
            self._close(model)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        thread, loop, wake = self._thread, self._loop, self._wake
        if thread is None or loop is None or wake is None or not thread.is_alive():
            return
        self._fail(UserFunctionError("The InspectAgent was closed."))
        loop.call_soon_threadsafe(wake.set)
        thread.join(30.0)

    # In other threads than the evaluation's.

    def _close(self, model: Any) -> None:
        """Closes a model on the loop of its connections."""

        async def close() -> None:
            async with model:
                pass

        if self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(close(), self._loop)

    def _start(self) -> None:
        with self._lock:
            self._check_alive()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="torchrl_sglang-inspect", daemon=True
                )
                self._thread.start()
        if not self._ready.wait(START_SECONDS):
            raise UserFunctionError(
                f"Inspect's evaluation did not begin within {START_SECONDS:g} s."
            )

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise UserFunctionError(
                f"Inspect's evaluation has ended: {self._failure}."
            ) from self._failure
        if self._closed:
            raise UserFunctionError("The InspectAgent was closed.")

    # In the evaluation's thread.

    def _serve(self) -> None:
        folder = tempfile.mkdtemp(prefix="torchrl_sglang_inspect_")
        try:
            asyncio.run(self._evaluate(folder))
            cause: BaseException = UserFunctionError("it was closed")
        except BaseException as error:  # noqa: BLE001 - Passed on.
            cause = error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        with self._lock:
            self._failure = cause
        self._fail(UserFunctionError(f"Inspect's evaluation has ended: {cause}."))
        self._ready.set()

    async def _evaluate(self, folder: str) -> None:
        from inspect_ai import eval_async, task_with

        # Progress bars are for evaluations with a viewer.
        os.environ.setdefault("INSPECT_DISPLAY", "none")
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        setup = self._task.setup
        solvers = [] if setup is None else setup if isinstance(setup, list) else [setup]
        task = task_with(
            self._task, dataset=_source_of(self), setup=[_router_of(self), *solvers]
        )
        arguments = {"log_dir": folder, **self._arguments}
        logs = await eval_async(task, model=_session_model(), **arguments)
        for log in logs:
            if log.error is not None:
                raise UserFunctionError(log.error.message)

    def find(self, sample_id: Any, epoch: int) -> _SampleRun:
        """Returns the run of a sample."""
        run = self._runs.get((sample_id, epoch))
        if run is None:
            raise UserFunctionError(f"Nobody waits for sample {sample_id!r} any more.")
        return run

    async def next_samples(self) -> list[Any] | None:
        """Waits for samples, which are enqueued meanwhile."""
        assert self._wake is not None
        # Samples are added in the context of the running task.
        self._context = contextvars.copy_context()
        self._ready.set()
        await self._wake.wait()
        self._wake.clear()
        return None if self._closed else []

    def ended(self, sample_id: Any, epoch: int, log: Any) -> None:
        """Passes the log of a sample to its waiting run."""
        run = self._runs.get((sample_id, epoch))
        if run is not None and not run.result.done():
            run.result.set_result(log)

    def abandoned(self, sample_id: Any, epoch: int) -> None:
        run = self._runs.get((sample_id, epoch))
        if run is not None and not run.result.done():
            run.result.set_exception(
                UserFunctionError(f"Inspect has cancelled the sample {sample_id!r}.")
            )

    def _enqueue(self, run: _SampleRun) -> None:
        from inspect_ai import enqueue_sample

        try:
            enqueue_sample(run.sample, epoch=run.epoch)
        except Exception as error:  # noqa: BLE001 - Who waits gets it.
            run.result.set_exception(error)
        assert self._wake is not None
        self._wake.set()

    def _fail(self, error: BaseException) -> None:
        for run in list(self._runs.values()):
            if not run.result.done():
                run.result.set_exception(error)


def _source_of(evaluation: _Evaluation) -> Any:
    from inspect_ai import SampleSource

    async def complete(log: Any) -> None:
        evaluation.ended(log.id, log.epoch, log)

    async def abandoned(sample: Any, epoch: int) -> None:
        evaluation.abandoned(sample.id, epoch)

    return SampleSource.from_samples(
        [],
        next_samples=evaluation.next_samples,
        sample_complete=complete,
        sample_abandoned=abandoned,
    )


def _router_of(evaluation: _Evaluation) -> Any:
    """Returns a solver to set the session for the later solvers of a sample."""
    from inspect_ai.solver import solver

    @solver
    def torchrl_sglang_session() -> Any:
        async def solve(state: Any, generate: Any) -> Any:
            _RUN.set(evaluation.find(state.sample_id, state.epoch))
            return state

        return solve

    return torchrl_sglang_session()


def _session_model() -> Any:
    """Returns an Inspect model with routes to the current sample's session."""
    from inspect_ai.model import ModelAPI, get_model, modelapi

    class SessionAPI(ModelAPI):
        """Routes calls to the session of the current sample."""

        async def generate(self, *arguments: Any, **keywords: Any) -> Any:
            run = _RUN.get(None)
            if run is None or run.result.done():
                raise UserFunctionError(
                    "There is no session for this request: the sample's run has ended, "
                    "or a scorer asks the policy; give it a model by eval_args="
                    "{'model_roles': ...}."
                )
            return await run.model.api.generate(*arguments, **keywords)

    @modelapi(name="torchrl_sglang")
    def session_api() -> Any:
        return SessionAPI

    return get_model("torchrl_sglang/policy", memoize=False)


def _check(task: Any) -> None:
    try:
        from inspect_ai import SampleSource, Task  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "InspectAgent needs Inspect with SampleSource: pip install "
            "'inspect-ai>=0.3.285'."
        ) from error
    if not isinstance(task, Task):
        raise ConfigurationError(
            f"task must be an inspect_ai.Task, got {task!r}; call its function first."
        )
    if task.sample_source is not None:
        raise ConfigurationError("task has a SampleSource; give it a dataset instead.")
