"""AsyncSGLang: the engine that users hold.

It composes the rooms beside it: servers that it started (``server.py``) or that run
elsewhere, what they can do (``capabilities.py``), generation (``data_plane.py``) and
control (``control_plane.py``). The work is asynchronous, on the process's background
loop; the plain methods wait for it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from torchrl_sglang.backends import capabilities as capabilities_module
from torchrl_sglang.backends.base import RLSGLangEngine, WeightUpdate
from torchrl_sglang.backends.control_plane import ControlPlane
from torchrl_sglang.backends.data_plane import DataPlane
from torchrl_sglang.backends.event_loop import run_sync, submit
from torchrl_sglang.backends.http import HttpClient, normalize_url
from torchrl_sglang.backends.metadata import metadata_from_config
from torchrl_sglang.backends.server import (
    START_TIMEOUT_SECONDS,
    ServerProcess,
    find_free_port,
    make_sglang_server,
)
from torchrl_sglang.backends.wire import (
    GenerateRequest,
    check_prompt,
    check_sampling_params,
    check_top_log_probs,
)
from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    RequestRefusedError,
    ServerDiedError,
    ServerUnavailableError,
    SGLangError,
    WeightSyncStateError,
)
from torchrl_sglang.types import Completion, ModelMetadata, ServerCapabilities

__all__ = ["AsyncSGLang"]

GENERATE_TIMEOUT_SECONDS = 1800.0
"""Default budget for one batch."""

DEATH_GRACE_SECONDS = 2.0
"""A server that hung up gets this long to be seen dead, so that the error says so."""


class AsyncSGLang(RLSGLangEngine):
    """SGLang as an engine for TorchRL.

    Make one with :meth:`from_pretrained`, which starts a server and owns it, or with
    :meth:`connect`, which uses one that runs elsewhere. An engine can be used from
    several threads and event loops at once. It pickles and deep-copies to a connection
    without ownership, and without touching the network.

    Examples:
        >>> with AsyncSGLang.from_pretrained(tiny_model_path, device="cpu") as engine:
        ...     (answer,) = engine.generate(
        ...         input_ids=[[5, 6, 7]],
        ...         sampling_params={"max_new_tokens": 4, "ignore_eos": True},
        ...         return_logprobs=True,
        ...     )
        >>> len(answer.token_ids), len(answer.log_probs), answer.finish_reason
        (4, 4, 'length')
    """

    def __init__(
        self,
        url: str,
        capabilities: ServerCapabilities,
        *,
        model: str | None = None,
        api_key: str | None = None,
        server: ServerProcess | None = None,
    ) -> None:
        self._url = url
        self._capabilities = capabilities
        self._model = model
        self._http = HttpClient(api_key)
        self._server = server
        self._weight_version = capabilities.weight_version
        self._doubt: str | None = None
        self._closed = False
        self._tokenizer: Any = None
        self._compose()

    def _compose(self) -> None:
        self._data = DataPlane(self._http, self._url, self._capabilities)
        self._control = ControlPlane(self._http, [self._url], self._capabilities)
        self._update_lock = threading.Lock()

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] | None = None,
        *,
        device: str | None = None,
        python: str | os.PathLike[str] | None = None,
        start_timeout: float = START_TIMEOUT_SECONDS,
        num_replicas: int = 1,
        api_key: str | None = None,
        **server_args: Any,
    ) -> Self:
        """Starts a server for ``model`` and owns it.

        The server and everything below it end with :meth:`shutdown`, with the ``with``
        block, with the interpreter, and also when this process is killed.

        Args:
            model: path or hub name of the model; ``model_name`` is accepted too.
            device: ``"cuda"`` or ``"cpu"``; by default ``"cuda"`` where there is one.
            python: interpreter that has sglang installed; see
                :func:`~torchrl_sglang.make_sglang_server` for the default.
            start_timeout: budget for the start, in seconds.
            num_replicas: number of servers; only 1 so far.
            api_key: key that the server shall ask for.
            **server_args: arguments of SGLang's server, under its own names or vLLM's.

        Raises:
            ConfigurationError: if an argument is wrong or no engine is installed.
            ServerStartError: if the server ends or is not ready within the budget; the
                message carries the end of its log.
        """
        alias = server_args.pop("model_name", None)
        if (model is None) == (alias is None):
            raise ConfigurationError(
                f"Give the model once: model={model!r}, model_name={alias!r}."
            )
        if num_replicas != 1:
            raise ConfigurationError(
                f"num_replicas={num_replicas!r}: this version starts one server for an "
                f"engine. Make several engines, and share the prompts out among them."
            )
        server = make_sglang_server(
            model if model is not None else alias,
            device=device,
            python=python,
            start_timeout=start_timeout,
            api_key=api_key,
            **server_args,
        )
        try:
            return cls._connected(server.url, api_key=api_key, server=server)
        except BaseException:
            server.stop()
            raise

    @classmethod
    def connect(
        cls, url: str, *, model: str | None = None, api_key: str | None = None
    ) -> Self:
        """Uses a server that runs elsewhere, without owning it.

        Args:
            url: its address, like ``"http://127.0.0.1:30000"``.
            model: folder or hub name with the served model's configuration and
                tokenizer, where the path that the server reports cannot be read here.
            api_key: key that the server asks for.

        Raises:
            ServerUnavailableError: if no SGLang server answers there.
            ConfigurationError: if the address or the model is wrong.
        """
        return cls._connected(normalize_url(url), model=model, api_key=api_key)

    @classmethod
    def _connected(
        cls,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        server: ServerProcess | None = None,
    ) -> Self:
        async def ask() -> ServerCapabilities:
            http = HttpClient(api_key)
            try:
                return await capabilities_module.find_out(http, url, model=model)
            finally:
                await http.close()

        return cls(url, run_sync(ask()), model=model, api_key=api_key, server=server)

    @property
    def server_url(self) -> str:
        """Address that generation requests go to."""
        return self._url

    @property
    def capabilities(self) -> ServerCapabilities:
        """What the server can do."""
        return self._capabilities

    @property
    def control(self) -> ControlPlane:
        """Control calls to the server; to be awaited on the background loop."""
        return self._control

    @property
    def weight_version(self) -> str:
        """Version of the weights that the server generates with."""
        return self._weight_version

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        return_logprobs: bool | Sequence[bool] = False,
        return_prompt_logprobs: bool | Sequence[bool] = False,
        top_logprobs: int | Sequence[int] = 0,
        timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> list[Completion]:
        """Continues a batch of prompts and returns the responses in the same order.

        Args:
            prompts: one text or several; the tokenizer turns them into tokens here.
            input_ids: token ids of one prompt or of several, instead of ``prompts``.
            sampling_params: under SGLang's names, one mapping for all or one for each.
                ``max_new_tokens`` is cut to what the context leaves room for;
                ``max_new_tokens=0`` scores the prompt.
            return_logprobs: also return the log-probability of each response token,
                ``log_softmax(logits / temperature)``.
            return_prompt_logprobs: also return that of each prompt token, at
                temperature 1. Like the next one, for all or one for each prompt.
            top_logprobs: also return this many of the likeliest tokens in the place of
                each response token, with their log-probabilities.
            timeout: budget for the batch, in seconds. Defaults to 1800.
            return_exceptions: put the error of an item in its place instead of
                raising the first one.

        Returns:
            One completion for each prompt.

        Raises:
            ConfigurationError: if a prompt or a parameter is wrong. Nothing was sent.
            RequestRefusedError: if the server refused an item; ``index`` tells which.
            GenerationAbortedError: if a response was cut off by an abort.
            ServerUnavailableError: if the server cannot be reached.
            ServerDiedError: if a server that this engine owns has ended.
            ServerTimeoutError: if the budget is used up.
            WeightSyncStateError: if a failed update left the weights in doubt.
        """
        return run_sync(
            self._generate(
                prompts,
                input_ids,
                sampling_params,
                return_logprobs,
                return_prompt_logprobs,
                top_logprobs,
                timeout,
                return_exceptions,
            )
        )

    async def agenerate(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        return_logprobs: bool | Sequence[bool] = False,
        return_prompt_logprobs: bool | Sequence[bool] = False,
        top_logprobs: int | Sequence[int] = 0,
        timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> list[Completion]:
        """The same as :meth:`generate`, to be awaited on any event loop."""
        future = submit(
            self._generate(
                prompts,
                input_ids,
                sampling_params,
                return_logprobs,
                return_prompt_logprobs,
                top_logprobs,
                timeout,
                return_exceptions,
            )
        )
        return await asyncio.wrap_future(future)

    async def _generate(
        self,
        prompts: str | Sequence[str] | None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        return_logprobs: bool | Sequence[bool],
        return_prompt_logprobs: bool | Sequence[bool],
        top_logprobs: int | Sequence[int],
        timeout: float | None,
        return_exceptions: bool,
    ) -> list[Completion]:
        self._check_usable()
        batch = self._to_batch(prompts, input_ids)
        outcomes: list[Completion | SGLangError | None] = [None] * len(batch)
        requests: dict[int, GenerateRequest] = {}
        checked: dict[int, dict[str, Any]] = {}
        size = len(batch)
        params = self._to_params(sampling_params, size)
        scored = _for_each(return_logprobs, size, "return_logprobs")
        prompts_scored = _for_each(
            return_prompt_logprobs, size, "return_prompt_logprobs"
        )
        tops = _for_each(top_logprobs, size, "top_logprobs")
        for index, (prompt, own) in enumerate(zip(batch, params, strict=True)):
            try:
                what = (
                    "The prompt"
                    if return_exceptions
                    else f"Prompt {index} of the batch"
                )
                check_prompt(prompt, self._capabilities, what)
                # Most items of a batch share one mapping, which is checked once.
                if id(own) not in checked:
                    checked[id(own)] = check_sampling_params(own, self._capabilities)
                check_top_log_probs(tops[index], self._capabilities)
            except SGLangError as error:
                if not return_exceptions:
                    raise
                outcomes[index] = error
                continue
            requests[index] = GenerateRequest(
                input_ids=prompt,
                sampling_params=checked[id(own)],
                return_log_probs=scored[index],
                return_prompt_log_probs=prompts_scored[index],
                top_log_probs=tops[index],
            )
        budget = GENERATE_TIMEOUT_SECONDS if timeout is None else timeout
        deadline = time.monotonic() + budget
        try:
            answers = await self._data.generate(
                list(requests.values()),
                cache_key=self._weight_version,
                timeout=budget,
            )
            # Another engine object may have updated the weights since this one looked.
            if self._learn_version(answers):
                answers = await self._data.generate(
                    list(requests.values()),
                    cache_key=self._weight_version,
                    timeout=max(deadline - time.monotonic(), 1e-3),
                )
        except ServerUnavailableError as error:
            raise await self._explain(error) from error
        for index, answer in zip(requests, answers, strict=True):
            # Not all of the batch was sent, so its place is another one there.
            if isinstance(answer, (GenerationAbortedError, RequestRefusedError)):
                answer.index = index
            if isinstance(answer, SGLangError) and not return_exceptions:
                answer.add_note(f"It is item {index} of {len(batch)}.")
                raise answer
            outcomes[index] = answer
        return outcomes  # type: ignore[return-value]  # errors only where asked for

    def _learn_version(self, answers: Sequence[Completion | SGLangError]) -> bool:
        """Takes over a newer weight version from what was answered.

        Returns:
            Whether an answer began with newer weights and with cached state that was
            looked up under the older version: it may have been computed by older ones.
        """
        key, newest, stale = self._weight_version, self._weight_version, False
        for answer in answers:
            if isinstance(answer, Completion) and answer.versions:
                newest = max(newest, answer.versions[-1].version, key=_version_order)
                newer = _version_order(answer.versions[0].version) > _version_order(key)
                stale = stale or (newer and answer.cached_tokens > 0)
        self._weight_version = newest
        return stale

    def _to_batch(
        self,
        prompts: str | Sequence[str] | None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    ) -> list[Sequence[int]]:
        if (prompts is None) == (input_ids is None):
            raise ConfigurationError("Give either prompts or input_ids, and not both.")
        if prompts is not None:
            texts = [prompts] if isinstance(prompts, str) else list(prompts)
            for index, text in enumerate(texts):
                if not isinstance(text, str):
                    raise ConfigurationError(
                        f"Prompt {index} of the batch is a {type(text).__name__}; "
                        f"prompts are strings, and token ids go to input_ids."
                    )
            return list(self.get_tokenizer()(texts)["input_ids"]) if texts else []
        ids: Any = _plain(input_ids)
        if not isinstance(ids, (list, tuple)):
            raise ConfigurationError(
                f"input_ids is a {type(input_ids).__name__}; give the token ids of one "
                f"prompt as a list of integers, or a list of such lists."
            )
        if ids and isinstance(ids[0], int):
            return [ids]
        return [_plain(prompt) for prompt in ids]

    def _to_params(
        self,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        size: int,
    ) -> list[Mapping[str, Any]]:
        if sampling_params is None or isinstance(sampling_params, Mapping):
            return [sampling_params or {}] * size
        given = isinstance(sampling_params, (list, tuple))
        every: list[Any] = list(sampling_params) if given else [sampling_params]
        for own in every:
            if not isinstance(own, Mapping):
                raise ConfigurationError(
                    f"sampling_params holds {own!r}, a {type(own).__name__}; give one "
                    f"mapping of names to values, or a list of them."
                )
        if len(every) != size:
            raise ConfigurationError(
                f"{len(every)} sampling_params were given for {size} "
                f"prompts; give one mapping, or one for each prompt."
            )
        return every

    def _check_open(self) -> None:
        if self._closed:
            raise ServerUnavailableError(
                f"The engine at {self._url} was shut down; make a new one."
            )

    def _check_usable(self) -> None:
        self._check_open()
        if self._doubt is not None:
            raise WeightSyncStateError(
                f"The weights on {self._url} are in doubt: {self._doubt} Generation "
                f"stays paused until a weight update succeeds; send the weights again."
            )

    async def _explain(self, error: ServerUnavailableError) -> SGLangError:
        """Returns the better error where the server is ours and has ended."""
        if self._server is None:
            return error
        for _ in range(20):
            if self._server.state == "dead":
                return ServerDiedError(
                    f"The server at {self._url} has ended. The end of its log:\n"
                    f"{self._server.log_tail()}"
                )
            await asyncio.sleep(DEATH_GRACE_SECONDS / 20)
        return error

    def get_tokenizer(self) -> Any:
        """Returns the tokenizer of the served model, loaded at the first call.

        Raises:
            ConfigurationError: if it cannot be read from here.
        """
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            path = self._model or self._capabilities.tokenizer_path
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(path)
            except Exception as error:
                raise ConfigurationError(
                    f"The tokenizer {path!r} cannot be read from here "
                    f"({type(error).__name__}: {error}); pass a tokenizer, or "
                    f"connect(..., model=...) with a folder that holds it."
                ) from error
        return self._tokenizer

    def get_model_metadata(self) -> ModelMetadata:
        """Returns (dtype, shape) of every parameter, under Hugging Face's names.

        Tied weights appear once. These are the names that the server's weight loader
        takes, with the type that it serves them in.
        """
        path = self._model or self._capabilities.model_path
        config = capabilities_module.load_model_config(path)
        return metadata_from_config(config, self._capabilities.dtype)

    def get_master_address(self) -> str:
        """Returns the address at which the server meets a sender of weights."""
        return "127.0.0.1"

    def get_master_port(self) -> int:
        """Returns a free port for that meeting; a new one at every call."""
        return find_free_port()

    @contextmanager
    def weight_update(self) -> Iterator[WeightUpdate]:
        """Holds the engine for one weight update; a second one is refused meanwhile.

        Raises:
            WeightSyncStateError: if an update is under way.
        """
        if not self._update_lock.acquire(blocking=False):
            raise WeightSyncStateError(
                f"A weight update of {self._url} is under way; wait for it to end."
            )
        try:
            yield _Outcome(self)
        finally:
            self._update_lock.release()

    def flush_cache(self) -> bool:
        """Empties the prefix cache; returns False if the server is too busy for it."""
        self._check_open()
        return run_sync(self._control.flush_cache())

    def health(self) -> bool:
        """Returns whether the server answers."""
        return not self._closed and run_sync(self._control.healthy())

    def shutdown(self) -> None:
        """Ends the server if this engine owns it, and closes the connections."""
        if self._closed:
            return
        self._closed = True
        try:
            run_sync(self._http.close())
        finally:
            if self._server is not None:
                self._server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        # Ownership, locks and the tokenizer stay here; the rest is plain values.
        state = dict(self.__dict__)
        for name in ("_data", "_control", "_update_lock"):
            del state[name]
        state["_server"] = None
        state["_tokenizer"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._compose()

    def __repr__(self) -> str:
        if self._closed:
            status = "closed"
        elif self._doubt is not None:
            status = "weights in doubt"
        else:
            status = self._server.state if self._server is not None else "connected"
        return (
            f"AsyncSGLang({self._url!r}, model={self._capabilities.model_path!r}, "
            f"weight_version={self._weight_version!r}, "
            f"owned={self._server is not None}, status={status!r})"
        )


def _version_order(version: str) -> int:
    """Returns a weight version as a number; a name, such as ``default``, is oldest."""
    return int(version) if version.isdigit() else -1


def _for_each(value: Any, size: int, name: str) -> list[Any]:
    """Returns what holds for each prompt, given for all of them or for each."""
    if not isinstance(value, (list, tuple)):
        return [value] * size
    if len(value) != size:
        raise ConfigurationError(
            f"{len(value)} values of {name} were given for {size} prompts; give one "
            f"for all, or one for each prompt."
        )
    return list(value)


def _plain(ids: Any) -> Any:
    """Returns the list that a tensor or an array of token ids holds."""
    return ids.tolist() if hasattr(ids, "tolist") else ids


class _Outcome(WeightUpdate):
    def __init__(self, engine: AsyncSGLang) -> None:
        self._engine = engine

    @property
    def already_in_doubt(self) -> bool:
        return self._engine._doubt is not None

    def committed(self, version: str) -> None:
        self._engine._weight_version = version
        self._engine._doubt = None

    def in_doubt(self, reason: str) -> None:
        self._engine._doubt = reason
