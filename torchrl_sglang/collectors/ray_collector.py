"""RayAsyncLLMCollector: an AsyncLLMCollector in a Ray actor."""

from __future__ import annotations

import functools
import inspect
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from tensordict import TensorDictBase, list_to_stack, set_list_to_stack
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase

from torchrl_sglang.collectors.async_llm_collector import (
    COLLECTOR_ARGUMENTS,
    AsyncLLMCollector,
)
from torchrl_sglang.collectors.base import GroupCollector, Pause
from torchrl_sglang.collectors.packed_rows import Packed, pack, unpack
from torchrl_sglang.collectors.runtime.collection import ON_WAIT_SECONDS
from torchrl_sglang.collectors.runtime.contract import GroupKind
from torchrl_sglang.collectors.timeouts import CollectorTimeouts
from torchrl_sglang.collectors.weight_sync import (
    attach_weight_sync,
    check_schemes,
    detach_weight_sync,
)
from torchrl_sglang.errors import (
    CollectionError,
    CollectionTimeoutError,
    ConfigurationError,
)
from torchrl_sglang.support.checks import check_flag, check_names
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import SyncReport
from torchrl_sglang.weight_update.scheme import SGLangWeightSyncScheme

START_TIMEOUT_SECONDS = 300.0
"""Timeout of starting the actor and making its collector."""

CALL_TIMEOUT_SECONDS = 60.0
"""Timeout of a call that does not wait for a batch."""

MAX_CONCURRENCY = 8
"""Calls that the actor runs at once: one waits for a batch, others do not wait."""


P = ParamSpec("P")
R = TypeVar("R")


def _forwarded(
    method: Callable[Concatenate[AsyncLLMCollector, P], R],
    *,
    seconds: Callable[[CollectorTimeouts], float] = lambda _: CALL_TIMEOUT_SECONDS,
) -> Callable[Concatenate[RayAsyncLLMCollector, P], R]:
    """Returns a method that the actor's collector runs, with its signature and text."""

    @functools.wraps(method)
    def forward(self: RayAsyncLLMCollector, /, *args: P.args, **kwargs: P.kwargs) -> R:
        timeout = seconds(self.timeouts)
        result: R = self._call(
            "call", method.__name__, *args, seconds=timeout, **kwargs
        )
        return result

    return forward


class RayAsyncLLMCollector(GroupCollector):
    """An :class:`.AsyncLLMCollector` in a Ray actor, a process of its own.

    Its functions and its layout do not take the trainer's processor time. The trainer
    sends the weights; each update counts in the actor. Batches are sent to the trainer,
    or written to a ``RayReplayBuffer``. It has the methods of
    :class:`.AsyncLLMCollector`, and each of them has a timeout. Save its state while
    the actor lives: a new one goes on from that.

    Args:
        groups (GroupKind, optional): see :class:`.AsyncLLMCollector`.

    Keyword Args:
        replay_buffer (RayReplayBuffer, optional): to write to, or its ``client()``.
        weight_sync_schemes (dict, optional): ``{"policy": scheme}``, which stays in
            this process.
        timeouts (CollectorTimeouts, optional): in seconds.
        remote_config (dict, optional): of the actor, as for ``ray.remote``. Defaults to
            ``{"num_cpus": 1}``.
        ray_init_config (dict, optional): for ``ray.init``, if Ray is not running.
        **kwargs: the other arguments of :class:`.AsyncLLMCollector`. They are pickled:
            give prompts as a dataset or a ``DataLoader``, not as an iterator.

    Raises:
        ConfigurationError: if an argument is wrong, or cannot be pickled, or if
            ``remote_config`` asks for more than the cluster has.
        CollectionTimeoutError: if the actor does not start within five minutes.
        CollectionError: if it ended; by every method, also later.

    Examples:
        >>> collector = RayAsyncLLMCollector(  # doctest: +SKIP
        ...     policy=SGLangWrapper(engine),
        ...     prompts=["1+1=", "2+2="],
        ...     rewards=lambda conversation, task: float("2" in conversation.response),
        ...     group_size=8,
        ...     groups_per_batch=2,
        ...     weight_sync_schemes={"policy": scheme},
        ...     remote_config={"num_cpus": 2},
        ... )
        >>> for batch in collector:  # doctest: +SKIP
        ...     train(batch)
        ...     collector.update_policy_weights_()
    """

    def __init__(
        self,
        groups: GroupKind | Callable[[], EnvBase] | None = None,
        *,
        replay_buffer: Any = None,
        weight_sync_schemes: Mapping[str, SGLangWeightSyncScheme] | None = None,
        timeouts: CollectorTimeouts | None = None,
        remote_config: Mapping[str, Any] | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        # Before an actor starts.
        check_names(type(self).__name__, kwargs, COLLECTOR_ARGUMENTS)
        schemes = check_schemes(weight_sync_schemes)
        client = _to_client(replay_buffer)
        self.replay_buffer = replay_buffer
        self.group_size = kwargs.get("group_size", 1)
        self.batches_per_update = kwargs.get("batches_per_update", 1)
        self.timeouts = timeouts or CollectorTimeouts()
        _start_ray(ray_init_config)
        arguments = _send(
            {
                "groups": groups,
                "replay_buffer": client,
                "timeouts": self.timeouts,
                **kwargs,
            }
        )
        _check_resources(remote_config or {})
        self._actor = _start_actor(remote_config)
        self._finalizer = weakref.finalize(self, _kill, self._actor)
        try:
            self._call(
                "make", list_to_stack(), arguments, seconds=START_TIMEOUT_SECONDS
            )
        except BaseException:
            self._finalizer()
            raise
        for scheme in schemes.values():
            attach_weight_sync(self, scheme)

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yields batches, or ``None`` for each one that was written to the buffer.

        Raises:
            CollectionTimeoutError: if no batch is complete in time.
            CollectionError: if functions, the engine or the actor failed for good.
        """
        seconds = self.timeouts.batch + CALL_TIMEOUT_SECONDS
        while True:
            answer = self._begin("next")
            has_ended, packed = self._result(answer, seconds, self._refresh_weights)
            if has_ended:
                return
            yield unpack(packed)

    __len__ = _forwarded(AsyncLLMCollector.__len__)
    start = _forwarded(AsyncLLMCollector.start)
    check = _forwarded(AsyncLLMCollector.check)
    is_running = _forwarded(AsyncLLMCollector.is_running)
    resume = _forwarded(AsyncLLMCollector.resume)
    get_policy_version = _forwarded(AsyncLLMCollector.get_policy_version)
    set_seed = _forwarded(AsyncLLMCollector.set_seed)
    state_dict = _forwarded(AsyncLLMCollector.state_dict)
    load_state_dict = _forwarded(
        AsyncLLMCollector.load_state_dict, seconds=lambda timeouts: timeouts.batch
    )
    stats = _forwarded(AsyncLLMCollector.stats)

    def pause(self, resume: bool = True) -> Pause:
        """Starts no more groups; see :meth:`.AsyncLLMCollector.pause`."""
        check_flag("resume", resume)
        self._call("call", "pause", resume=False, seconds=self.timeouts.batch)
        return Pause(self.resume if resume else None)

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Ends all conversations, and the actor. Safe to call twice.

        Args:
            timeout: for the conversations to end before the actor is killed, in
                seconds. Defaults to ``timeouts.shutdown``.
            close_env: must be True: environments end with their conversations.
            raise_on_error: without effect: nothing is left in any case.
        """
        if not check_flag("close_env", close_env):
            raise ConfigurationError("close_env=False is not supported; leave it out.")
        check_flag("raise_on_error", raise_on_error)
        detach_weight_sync(self)
        seconds = self.timeouts.shutdown if timeout is None else timeout
        if self._finalizer.alive:
            with suppress(CollectionError):
                self._call("call", "shutdown", seconds=seconds)
            self._finalizer()

    def increment_version(self) -> None:
        """Counts a weight update; the scheme's sender calls it."""
        self._call("increment_version", self.last_sync_report)

    _served_next = _forwarded(AsyncLLMCollector._served_next)
    _served_again = _forwarded(AsyncLLMCollector._served_again)
    _update_failed = _forwarded(AsyncLLMCollector._update_failed)

    def __repr__(self) -> str:
        state = "running" if self._finalizer.alive else "shut down"
        return f"{type(self).__name__}({state})"

    def _call(
        self,
        method: str,
        *args: Any,
        seconds: float = CALL_TIMEOUT_SECONDS,
        **kwargs: Any,
    ) -> Any:
        """Returns the result of a method of the actor, or raises its error."""
        return self._result(self._begin(method, *args, **kwargs), seconds)

    def _begin(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the actor, and returns a reference to its answer."""
        if not self._finalizer.alive:
            raise CollectionError("The collector was shut down; make a new one.")
        return getattr(self._actor, method).remote(*args, **kwargs)

    def _result(
        self,
        answer: Any,
        seconds: float,
        on_wait: Callable[[], object] | None = None,
    ) -> Any:
        """Returns an answer of the actor, or raises its error."""
        import ray

        deadline = time.monotonic() + seconds
        try:
            while on_wait is not None and time.monotonic() < deadline:
                if ray.wait([answer], timeout=ON_WAIT_SECONDS)[0]:
                    break
                on_wait()
            seconds_left = max(deadline - time.monotonic(), 0.0)
            return ray.get(answer, timeout=seconds_left)
        except ray.exceptions.GetTimeoutError as error:
            raise CollectionTimeoutError(
                f"The collector's actor did not answer within {seconds:g} s. If it has "
                f"not started, the cluster lacks what remote_config asks for."
            ) from error
        except ray.exceptions.RayTaskError as error:
            # The error's text has the actor's traceback.
            raise error.cause from error
        except ray.exceptions.RayError as error:
            reason = str(error).partition("\n")[0]
            raise CollectionError(
                f"The collector's actor has ended ({type(error).__name__}: {reason}); "
                f"make a new collector and load the state that was saved last."
            ) from error


class _Host:
    """The actor."""

    _collector: AsyncLLMCollector

    def make(self, to_stack: bool, arguments: Mapping[str, Any]) -> None:
        """Makes the collector; not at the actor's start, which would hide errors."""
        set_list_to_stack(to_stack).set()
        self._collector = AsyncLLMCollector(**arguments)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the collector."""
        return getattr(self._collector, method)(*args, **kwargs)

    def next(self) -> tuple[bool, Packed | None]:
        """Returns whether the batches have ended, and the next one."""
        from ray.cloudpickle import CloudPickler

        for batch in self._collector:
            return False, pack(batch, CloudPickler)
        return True, None

    def increment_version(self, report: SyncReport | None) -> None:
        """Counts a weight update of the trainer's process."""
        self._collector.last_sync_report = report
        self._collector.increment_version()


def _start_ray(config: Mapping[str, Any] | None) -> None:
    import ray

    if not ray.is_initialized():
        from torchrl.collectors.distributed.ray import DEFAULT_RAY_INIT_CONFIG

        ray.init(**(config or DEFAULT_RAY_INIT_CONFIG))


def _send(arguments: Mapping[str, Any]) -> Any:
    """Returns a reference to pickled arguments."""
    import ray

    try:
        return ray.put(arguments)
    except Exception as error:
        named = _find_unpicklable(arguments)
        if named is None:
            raise
        reason = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"{named} cannot be sent to an actor: {reason} Give prompts as a dataset "
            f"or a DataLoader, and functions without locks, open files and connections."
        ) from error


def _find_unpicklable(arguments: Mapping[str, Any]) -> str | None:
    """Returns the name of an argument that cannot be pickled, and its part."""
    for name, value in arguments.items():
        if _can_be_pickled(value):
            continue
        if is_dataclass(value):
            # A kind of groups, whose arguments have names of their own.
            options = {part.name: getattr(value, part.name) for part in fields(value)}
            return _find_unpicklable(options)
        parts: Mapping[Any, Any] = {}
        if isinstance(value, Mapping):
            parts = value
        elif isinstance(value, Sequence) and not isinstance(value, str):
            parts = dict(enumerate(value))
        for key, part in parts.items():
            if not _can_be_pickled(part):
                return f"{name}[{key!r}]{_what_it_uses(part)}"
        return f"{name}{_what_it_uses(value)}"
    return None


def _what_it_uses(value: Any) -> str:
    """Returns a function's name, and the variable that it cannot be pickled with."""
    if not inspect.isfunction(value):
        return f", a {type(value).__name__},"
    variables = inspect.getclosurevars(value)
    for name, used in {**variables.globals, **variables.nonlocals}.items():
        if not _can_be_pickled(used):
            return (
                f", the function {value.__qualname__!r}, which uses {name!r}, a "
                f"{type(used).__name__},"
            )
    return f", the function {value.__qualname__!r},"


def _can_be_pickled(value: Any) -> bool:
    from ray import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - Objects raise anything.
        return False
    return True


def _check_resources(config: Mapping[str, Any]) -> None:
    """Refuses an actor that no machine of this process's own cluster has room for."""
    import ray
    from ray._private import worker

    resources = {
        "CPU": config.get("num_cpus", 1),
        "GPU": config.get("num_gpus"),
        "memory": config.get("memory"),
        **(config.get("resources") or {}),
    }
    # An actor runs on one machine.
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name, count in resources.items():
        largest = max((node.get(name, 0) for node in nodes), default=0)
        if count is None or count <= largest:
            continue
        shortage = (
            f"remote_config={dict(config)!r} asks for {count:g} of {name!r}, and no "
            f"machine of the Ray cluster has more than {largest:g}"
        )
        node = getattr(worker, "_global_node", None)
        if node is not None and node.is_head():
            raise ConfigurationError(
                f"{shortage}; ask for less, or start Ray with more, for instance "
                f"ray_init_config={{'num_cpus': {count:g}}}."
            )
        torchrl_logger.warning(
            f"{shortage}. The collector starts when the cluster grows by one that has, "
            f"and gives up after {START_TIMEOUT_SECONDS:g} s."
        )


def _start_actor(remote_config: Mapping[str, Any] | None) -> Any:
    import ray

    options = {
        "num_cpus": 1,
        "max_concurrency": MAX_CONCURRENCY,
        **(remote_config or {}),
    }
    return ray.remote(**options)(_Host).remote()


def _kill(actor: Any) -> None:
    """Ends an actor; if Ray has ended, it is gone."""
    import ray

    if ray.is_initialized():
        with suppress(ray.exceptions.RayError, ValueError):
            ray.kill(actor)


def _to_client(buffer: Any) -> Any:
    """Returns the client with which another process writes to a buffer."""
    client = buffer.client() if hasattr(buffer, "client") else buffer
    if isinstance(client, ReplayBuffer):
        raise ConfigurationError(
            f"replay_buffer is a {type(buffer).__name__} of this process, which a Ray "
            f"actor cannot write to; give a RayReplayBuffer."
        )
    return client
