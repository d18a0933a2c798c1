"""A weight update in a thread, which receives the tensors that a trainer announces."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchrl_sglang.backends import session
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.backends.fleet.weights_state import WeightUpdate, next_version
from torchrl_sglang.errors import WeightSyncStateError, WeightTransferError
from torchrl_sglang.gateway.vllm.broadcasts import BroadcastReceiver, Wire
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.weight_update.weights import TensorSpec


@dataclass
class _ReceivedTensors:
    """Tensors that an update has received so far."""

    specs: list[TensorSpec] = field(default_factory=list)
    quantized: None = None

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(spec.num_bytes for spec in self.specs)


class AnnouncedUpdate(session.Transfer):
    """A weight update whose tensors a trainer announces one part after the other.

    The order of the control calls is :func:`.session.update_weights`'s, in a thread
    that waits for the next part.
    """

    name = "vllm"
    route = "tensor"
    in_session = True

    def __init__(
        self,
        engine: RLSGLangEngine,
        receiver: BroadcastReceiver,
        timeout: float,
        *,
        resume: bool,
    ) -> None:
        self._engine, self.receiver, self._timeout = engine, receiver, timeout
        self.resumes = resume
        self._content = _ReceivedTensors()
        self._calls: queue.Queue[tuple[Callable[[], None], Future[None]]] = (
            queue.Queue()
        )
        self._started: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._held: WeightUpdate | None = None
        self._is_whole = False

    @property
    def is_open(self) -> bool:
        """Whether it takes further tensors."""
        return not self._ended.done()

    def begin(self) -> None:
        """Starts the thread, and returns when the servers wait for tensors."""
        threading.Thread(
            target=self._run, name="torchrl_sglang-vllm-update", daemon=True
        ).start()
        self._wait(self._started)

    def receive(self, specs: Sequence[TensorSpec], wire: Wire) -> None:
        """Receives tensors."""
        self._put(partial(self._take, specs, wire))

    def finish(self) -> None:
        """Ends the update."""
        self._put(self._end)
        self._ended.result()

    def abandon(self) -> None:
        """Ends the update without its remaining tensors, and waits for its end."""
        self._calls.put((self._give_up, Future()))
        wait([self._ended], timeout=self._timeout)

    def _put(self, call: Callable[[], None]) -> None:
        done: Future[None] = Future()
        self._calls.put((call, done))
        self._wait(done)

    def _wait(self, done: Future[None]) -> None:
        """Waits for a step; raises the error that ended the update."""
        wait([done, self._ended], return_when=FIRST_COMPLETED)
        if not done.done():
            self._ended.result()
            raise WeightSyncStateError("The weight update has ended.")

    def _run(self) -> None:
        try:
            with self._engine.weight_update() as held:
                self._held = held
                # Whoever paused consistent servers resumes them.
                if self._engine.control.paused and not held.was_inconsistent:
                    self.resumes = False
                session.update_weights(
                    self._engine,
                    self,
                    self._content,
                    version=self._next_version(),
                    pause_mode="continue",
                    held=held,
                )
        except BaseException as error:  # noqa: BLE001 - The caller raises it.
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def _next_version(self) -> str:
        engine = self._engine
        versions = run_sync(engine.control.weight_versions())
        return next_version([*versions, engine.weight_version, engine.newest_version])

    def send(self, weights: Any, *, version: str) -> int:
        """Receives tensors until the trainer's end of the update."""
        count = 0
        self.receiver.begin()
        self._started.set_result(None)
        while not self._is_whole:
            try:
                call, done = self._calls.get(timeout=self._timeout)
            except queue.Empty:
                raise self._error(
                    f"The trainer sent nothing for {self._timeout:g} s, between "
                    f"start_weight_update and finish_weight_update."
                ) from None
            call()
            done.set_result(None)
            count += 1
        control = self._engine.control
        run_sync(control.set_weight_version(version, timeout=self._timeout))
        return count - 1

    def _take(self, specs: Sequence[TensorSpec], wire: Wire) -> None:
        self.receiver.receive(specs, wire)
        self._content.specs += specs

    def _end(self) -> None:
        """Checks that the weights are whole."""
        names = {spec.name for spec in self._content.specs}
        if not names:
            raise self._error(
                "finish_weight_update came before any update_weights, so that nothing "
                "was sent."
            )
        missing = self._engine.get_model_metadata().keys() - names
        if missing and self._held is not None and self._held.was_inconsistent:
            raise WeightSyncStateError(
                f"An earlier update has failed, and this one lacks {min(missing)!r}: "
                f"send all weights."
            )
        self._is_whole = True

    def _give_up(self) -> None:
        raise self._error("Another trainer has begun anew before finish_weight_update.")

    def _error(self, problem: str) -> WeightTransferError:
        return WeightTransferError(problem, untouched=not self._content.specs)
