"""A server that speaks SGLang's protocol and computes nothing.

It produces late, broken, short and missing answers, and shows the time that a client
takes. It is as strict as SGLang 0.5.23: it refuses the same requests with the same
messages, and a request that would kill an SGLang server ends this one too. Tests of
generated tokens need a real server.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import msgspec
from aiohttp import web

from torchrl_sglang.requests.sampling import SAMPLING_PARAMETERS

__all__ = ["FakeServer", "Fault"]

Fault: TypeAlias = Literal[
    "hang",  # accept the request and never answer
    "hang_up",  # close the connection without an answer
    "hang_up_mid_body",  # close it after the first bytes of the answer
    "hang_up_mid_stream",  # close it after the first tokens of a long response
    "hang_mid_stream",  # send nothing more after the first tokens of one
    "malformed_json",  # answer 200 and something that is not JSON
    "error_500",  # answer "Internal Server Error"
    "short_tokens",  # leave out the last token of each response
    "short_log_probs",  # leave out its last log-probability
    "short_top_log_probs",  # leave out the last token's alternatives
    "no_log_probs",  # leave out all log-probabilities
    "null_log_probs",  # send null for the last one
    "other_tokens",  # send the log-probabilities of other tokens
    "abort",  # end each response as a pause with mode "abort" does
    "abort_400",  # end each response as a late refusal does
    "hang_compiling",  # answer nothing, as while a grammar is compiled, until an abort
    "abort_compiling",  # end each response as such an abort does
    "abort_503",  # refuse each request as a server with a full queue does
    "hang_up_at_end",  # end a streamed response, and hang up before the stream's end
]
"""Faults that the server can be told to show."""

ABORTED_AS: dict[Fault | None, Fault] = {
    "hang": "abort",
    "hang_compiling": "abort_compiling",
}
"""How requests that hang end when they are aborted."""

VERSION = "0.5.23"
RESERVED_TOKENS = 2
"""Tokens of the context that the scheduler never fills with a response."""
LONGEST_PROMPT_ROOM = 6
"""The scheduler refuses a prompt that leaves no more than this of the context."""
MOST_STOPS = 32
OTHER_PARSER = "gpt-oss"
"""Parser of calls and of reasoning that finds nothing here."""
CHANGES_LOGITS = (
    "ebnf",
    "frequency_penalty",
    "json_schema",
    "logit_bias",
    "min_new_tokens",
    "presence_penalty",
    "regex",
    "repetition_penalty",
    "structural_tag",
)
"""Parameters that SGLang applies to the logits before it takes log-probs."""
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
LOG_PROB = -1.5
"""Log-prob of every token under the model."""
SAMPLING_LOG_PROB = -0.5
"""Log-prob of every sampled token under changed logits."""
HOT = 100.0
"""At this temperature all tokens are equally probable."""

OPEN_ROUTES = frozenset(
    {"/generate", "/server_info", "/model_info", "/openapi.json"}
    | {"/parse_function_call", "/separate_reasoning"}
)
"""Routes beside those below ``/v1`` that an admin key is not for."""

_LORA_TENSORS = "/load_lora_adapter_from_tensors"

_NO_SESSION = (
    "update_weights_from_distributed must run between begin_weight_update() and "
    "end_weight_update()"
)


class FakeServer:
    """An SGLang server without a model behind it, in a thread of this process.

    A response to the prompt ``p`` is ``p`` over and over; every log-probability is the
    same. Use it as a context manager.

    Args:
        model_path: folder whose ``config.json`` gives the vocabulary and the context.
        api_key: key that requests must carry.
        admin_api_key: key that control calls must carry instead.
        context: context of the model, instead of the one in ``config.json``.
        enable_memory_saver: what it says of this argument of SGLang.
        enable_lora: whether it takes LoRA adapters, which change no response.
        original_log_probs: whether it was started with
            ``SGLANG_RETURN_ORIGINAL_LOGPROB=1``.
        version_spans: whether it says which tokens each version of the weights made,
            as SGLang does from 0.5.20 on.
        enable_deterministic_inference: whether it was started with this argument of
            SGLang. If so, a request with a ``sampling_seed`` is answered with tokens
            that depend on the seed and their positions alone.
        server_args: what it says of further arguments.

    Attributes:
        url (str): where it answers.
        requests (list): method, path and content of every request, in order.
        routes (dict): path to a function from a request's content to the answer.
        model_path (str): what it says that it serves.
        weight_version (str): whose weights it says that it generates with.
        earlier_version (tuple, optional): the version that wrote the first tokens of
            each response, and how many.
        cached_tokens (int): how many tokens of a prompt it says were cached.
        tokens_until_abort (int): how many tokens of a response an abort leaves,
            and a stream begins with.
        adapters (list): the LoRA adapters that it holds.
        paused (bool): whether generation is paused, which keeps no request waiting
            unless ``silent_while_paused`` is set.
        silent_while_paused (bool): whether a pause keeps requests waiting, as SGLang's
            does.
        poison (set): token ids; a request with a prompt that has one of them fails
            with status 500, and a batch breaks off.

    Examples:
        >>> with FakeServer(tiny_model_path) as server:
        ...     engine = AsyncSGLang.connect(server.url)
        ...     answers = engine.generate(
        ...         input_ids=[5, 6], sampling_params={"max_new_tokens": 3}
        ...     )
        ...     engine.shutdown()
        >>> answers[0].token_ids
        [5, 6, 5]
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        context: int | None = None,
        enable_memory_saver: bool = False,
        enable_lora: bool = False,
        original_log_probs: bool = True,
        version_spans: bool = True,
        enable_deterministic_inference: bool = False,
        server_args: Mapping[str, Any] | None = None,
    ) -> None:
        config = json.loads((Path(model_path) / "config.json").read_text())
        self.url = ""
        self.requests: list[tuple[str, str, Any]] = []
        self.headers: dict[str, Mapping[str, str]] = {}
        self.routes = self._make_routes()
        self.model_path = str(model_path)
        self._vocab_size: int = config["vocab_size"]
        self.context: int = context or config["max_position_embeddings"]
        self._api_key, self._admin_api_key = api_key, admin_api_key
        self.faults: dict[str, tuple[Fault, Callable[[Any], bool]]] = {}
        self.weight_version = "default"
        self.earlier_version: tuple[str, int] | None = None
        self.cached_tokens = 0
        self.tokens_until_abort = 1
        self.adapters: list[str] = []
        self.poison: set[int] = set()
        self._original_log_probs = original_log_probs
        self.version_spans = version_spans
        self._deterministic = enable_deterministic_inference
        self.server_args = dict(server_args or {})
        self._enable_lora = enable_lora
        self.in_session = False
        self._enable_memory_saver = enable_memory_saver
        self._released: set[str] = set()
        self.dead = False
        self.vanished = False
        self.paused = False
        self.silent_while_paused = False
        self._starts = 1
        self._peers: set[Any] = set()
        self._most_open = 0
        self._hanging: dict[asyncio.Event, set[str]] = {}
        self._changed = threading.Condition()
        self._ready = threading.Event()
        self._done = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        self._thread = threading.Thread(
            target=self._run, name="fake-sglang", daemon=True
        )

    @property
    def num_connections(self) -> int:
        """Number of connections so far."""
        return len(self._peers)

    @property
    def most_connections(self) -> int:
        """Most connections that were open at once."""
        return self._most_open

    @contextmanager
    def misbehaving(
        self,
        fault: Fault,
        path: str = "/generate",
        when: Callable[[Any], bool] = lambda content: True,
    ) -> Iterator[None]:
        """Shows a fault inside the ``with`` block.

        Args:
            fault: what is wrong.
            path: of the requests.
            when: whether a request with this content, which is among ``requests``
                already, meets the fault.
        """
        self.faults[path] = fault, when
        try:
            yield
        finally:
            self.faults.pop(path, None)

    def die(self) -> None:
        """Breaks every connection from now on, like a dead server."""
        self.dead = True

    def vanish(self) -> None:
        """Answers nothing any more and closes no connection, like a lost machine."""
        self.vanished = True

    def restart(self) -> None:
        """Restarts with the checkpoint's weights and without adapters."""
        self._starts += 1
        self.weight_version = "default"
        self.adapters.clear()
        self._released.clear()
        self.in_session = self.paused = self.dead = False

    def fault_of(self, path: str, content: Any) -> Fault | None:
        fault, when = self.faults.get(path, (None, lambda content: False))
        return fault if when(content) else None

    def recover(self) -> None:
        """Ends all faults, and aborts every request that hangs."""
        self.faults.clear()

        def release() -> None:
            for event in self._hanging:
                event.set()

        self._loop.call_soon_threadsafe(release)

    def wait_for(self, path: str, count: int = 1, timeout: float = 60.0) -> None:
        """Waits until that many requests to a path have arrived.

        Raises:
            TimeoutError: if they do not come.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: sum(p == path for _, p, _ in self.requests) >= count, timeout
            ):
                raise TimeoutError(f"{count} requests to {path} did not come.")

    def payloads(self, path: str = "/generate") -> list[Any]:
        """Returns the content of every request to a path.

        One to ``/generate`` has the form of a batch, also where it was one prompt.
        """
        found = [content for _, p, content in self.requests if p == path]
        return [_as_batch(content) for content in found]

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server. Safe to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._done.set)
            self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # What hangs is cancelled at the end, at once.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._ready.set()
        await self._done.wait()
        server = self._runner.server
        assert server is not None
        await self._runner.cleanup()
        # A connection that was accepted a moment before is only known now.
        await asyncio.sleep(0.01)
        await server.shutdown(0.01)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self._peers.add(request.transport.get_extra_info("peername"))
        server = self._runner.server
        assert server is not None
        self._most_open = max(self._most_open, len(server.connections))
        return await self.answer(request)

    async def answer(  # noqa: C901, PLR0911, PLR0912 - One branch for each way to go wrong.
        self, request: web.Request
    ) -> web.StreamResponse:
        """Answers a request; for programs that listen themselves."""
        transport = request.transport
        assert transport is not None
        body = await request.read()
        try:
            content = msgspec.json.decode(body) if body else None
        except ValueError:
            return _refusal("JSON decode error")
        with self._changed:
            self.requests.append((request.method, request.path, content))
            self.headers[request.path] = request.headers.copy()
            self._changed.notify_all()
        key = request.headers.get("Authorization")
        if not self._lets_in(request.path, key):
            return _json({"error": "Unauthorized"}, 401)
        if self.vanished:
            await self._done.wait()
        fault = self.fault_of(request.path, content)
        end = ABORTED_AS.get(fault)
        if end and await self._hang(content):
            return self.generate(content, end)
        if end or fault == "hang_up" or self.dead:
            transport.abort()
            return web.Response()
        if fault == "hang_up_mid_body":
            response = web.StreamResponse(headers={"Content-Length": "100000"})
            await response.prepare(request)
            await response.write(b'[{"text": "')
            transport.abort()
            return response
        if fault == "malformed_json":
            return web.Response(body=b'[{"text": "')
        if fault == "error_500":
            return web.Response(text="Internal Server Error", status=500)
        if request.path == "/openapi.json":
            return _json(self._describe())
        if request.path not in self.routes:
            return _json({"detail": "Not Found"}, 404)
        if (
            request.path == "/generate"
            and self.silent_while_paused
            and not self._running.is_set()
        ):
            # A paused server keeps what comes until it goes on.
            if await self._hang(content, self._running):
                return self.generate(content, "abort")
            if not self._running.is_set():
                transport.abort()
                return web.Response()
        try:
            answer = self.routes[request.path](content)
            if isinstance(answer, _Events):
                await answer.send(request)
                if answer.hangs:
                    await self._done.wait()
            return answer
        except _RefusedError as refused:
            return _json({"error": {"message": str(refused)}}, 400)
        except _BrokenError:
            return web.Response(text="Internal Server Error", status=500)
        except _FatalError:
            self.dead = True
            transport.abort()
            return web.Response()

    def _lets_in(self, path: str, key: str | None) -> bool:
        """Decides as ``decide_request_auth`` of SGLang does."""
        if path.startswith(("/health", "/ready", "/metrics")):
            return True
        is_admin = path not in OPEN_ROUTES and not path.startswith("/v1/")
        wanted = (is_admin and self._admin_api_key) or self._api_key
        return not wanted or key == f"Bearer {wanted}"

    async def _hang(self, content: Any, *until: asyncio.Event) -> bool:
        """Waits until the requests are aborted (True) or the server ends (False).

        Args:
            content: the requests.
            until: what else ends the wait.
        """
        aborted = asyncio.Event()
        rids = (content or {}).get("rid") or []
        self._hanging[aborted] = {rids} if isinstance(rids, str) else set(rids)
        ends = (aborted, self._done, *until)
        waits = [asyncio.ensure_future(event.wait()) for event in ends]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._hanging[aborted]
            for wait in waits:
                wait.cancel()
        return aborted.is_set()

    def _abort(self, content: Any) -> web.Response:
        everything, told = content.get("abort_all", False), content.get("rid", "")
        for event, rids in self._hanging.items():
            # As in SGLang, an id stands for all that begin with it, and an empty one
            # for none.
            rids -= {rid for rid in rids if told and rid.startswith(told)}
            if everything or not rids:
                event.set()
        return web.Response()

    def _make_routes(self) -> dict[str, Callable[[Any], web.StreamResponse]]:
        return {
            "/generate": self.generate,
            "/server_info": self._server_info,
            "/model_info": self._model_info,
            "/v1/models": self._models,
            "/v1/loads": self._loads,
            "/health": _empty,
            "/health_generate": _empty,
            "/ready": self._ready_route,
            "/flush_cache": _flushed,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
            "/abort_request": self._abort,
            "/init_weights_update_group": _refuse_group,
            "/destroy_weights_update_group": _refuse_group,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_distributed": self._update,
            "/update_weights_from_tensor": self._update_from_tensor,
            "/update_weights_from_disk": self._update_from_disk,
            "/update_weight_version": self._set_version,
            "/load_lora_adapter": self._load_adapter,
            _LORA_TENSORS: self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
            "/parse_function_call": self._parse_function_call,
            "/separate_reasoning": self._separate_reasoning,
        }

    def _describe(self) -> dict[str, Any]:
        """The answer to ``/openapi.json``."""
        paths: dict[str, Any] = {path: {} for path in self.routes}
        sessions = "/begin_weight_update" in paths
        told = {
            _LORA_TENSORS: ["serialized_named_tensors"],
            "/begin_weight_update": ["selector"],
            "/update_weights_from_tensor": [
                "selector" if sessions else "disable_draft_model"
            ],
        }
        schemas: dict[str, Any] = {}
        for path in told.keys() & paths.keys():
            name = path.strip("/")
            schema = {"$ref": f"#/components/schemas/{name}"}
            body = {"content": {"application/json": {"schema": schema}}}
            paths[path] = {"post": {"requestBody": body}}
            schemas[name] = {"properties": {field: {} for field in told[path]}}
        return {"paths": paths, "components": {"schemas": schemas}}

    def _load_adapter(self, content: Any) -> web.Response:
        name = content["lora_name"]
        if not self._enable_lora:
            return _lora_outcome(
                "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
            )
        if name in self.adapters:
            return _lora_outcome(
                f"Failed to load LoRA adapter {name} because it is already loaded"
            )
        self.adapters.append(name)
        return _lora_outcome()

    def _unload_adapter(self, content: Any) -> web.Response:
        name = content["lora_name"]
        if name not in self.adapters:
            return _lora_outcome(f"LoRA with name {name} does not exist.")
        self.adapters.remove(name)
        return _lora_outcome()

    def _parse_function_call(self, content: Any) -> web.Response:
        """Finds calls as SGLang's parser ``"qwen25"`` does, with its failures."""
        if content["tool_call_parser"] == OTHER_PARSER:
            return _json({"normal_text": content["text"], "calls": []})
        if content["tool_call_parser"] != "qwen25":
            raise _BrokenError
        text, names = content["text"], {t["function"]["name"] for t in content["tools"]}
        blocks = re.findall("<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
        calls = []
        for block in blocks:
            try:
                call = json.loads(block)
            except ValueError:
                continue
            if not isinstance(call, dict):
                raise _BrokenError
            if call.get("name") in names:
                given = json.dumps(call.get("arguments", {}))
                calls.append({"name": call["name"], "parameters": given})
        normal = text.partition("<tool_call>\n")[0].strip() if blocks else text
        return _json({"normal_text": normal, "calls": calls})

    def _separate_reasoning(self, content: Any) -> web.Response:
        """Finds reasoning as SGLang's parser ``"qwen3"`` does."""
        if content["reasoning_parser"] == OTHER_PARSER:
            return _json({"reasoning_text": "", "text": content["text"]})
        if content["reasoning_parser"] != "qwen3":
            raise _BrokenError
        reasoning, _, text = content["text"].partition("</think>")
        _, begin, reasoning = reasoning.partition("<think>")
        if not begin:
            return _json({"reasoning_text": "", "text": content["text"]})
        return _json({"reasoning_text": reasoning.strip(), "text": text.strip()})

    def _server_info(self, content: Any) -> web.Response:
        return _json(
            {
                "enable_lora": self._enable_lora or None,
                "version": VERSION,
                "dtype": "float32",
                "tp_size": 1,
                "pp_size": 1,
                "dp_size": 1,
                "skip_tokenizer_init": False,
                "grammar_backend": "none",
                "max_req_input_len": self.context - LONGEST_PROMPT_ROOM,
                "enable_memory_saver": self._enable_memory_saver,
                "startup_time": {"tokenizer_e2e": float(self._starts)},
                "enable_deterministic_inference": self._deterministic,
                "disable_radix_cache": self._deterministic,
                **self.server_args,
            }
        )

    def _model_info(self, content: Any) -> web.Response:
        return _json(
            {
                "model_path": self.model_path,
                "tokenizer_path": self.model_path,
                "is_generation": True,
                "weight_version": self.weight_version,
            }
        )

    def _models(self, content: Any) -> web.Response:
        model = {"id": self.model_path, "max_model_len": self.context}
        adapters = [{"id": n, "parent": self.model_path} for n in self.adapters]
        return _json({"object": "list", "data": [model, *adapters]})

    def _loads(self, content: Any) -> web.Response:
        running = len(self._hanging)
        return _json({"loads": [{"num_running_reqs": running, "num_waiting_reqs": 0}]})

    def _pause(self, content: Any) -> web.Response:
        mode = (content or {}).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return _refusal("Input should be 'abort', 'retract' or 'in_place'")
        self.paused = True
        self._running.clear()
        return _ok(content)

    def _continue(self, content: Any) -> web.Response:
        self.paused = False
        self._running.set()
        return _ok(content)

    def _ready_route(self, content: Any) -> web.Response:
        return web.Response(status=503 if self.paused else 200)

    def _release(self, content: Any) -> web.Response:
        tags = set(content["tags"] or MEMORY_TAGS)
        if self._hanging or tags & self._released:
            raise _FatalError
        self._released |= tags
        return _json(None)

    def _resume(self, content: Any) -> web.Response:
        tags = set(content["tags"] or MEMORY_TAGS)
        if tags - self._released:
            raise _FatalError
        self._released -= tags
        return _json(None)

    def _begin(self, content: Any) -> web.Response:
        if self.in_session:
            return _outcome(
                "a weight-update session is already open; "
                "call end_weight_update() first"
            )
        self.in_session = True
        return _outcome()

    def _end(self, content: Any) -> web.Response:
        if not self.in_session:
            return _outcome(
                "no weight-update session is open; call begin_weight_update() first"
            )
        self.in_session = False
        return _outcome()

    def _update(self, content: Any) -> web.Response:
        # There is nobody here who could join a broadcast.
        if not self.in_session:
            return _outcome(_NO_SESSION)
        return _outcome("Group is not initialized")

    def _update_from_tensor(self, content: Any) -> web.Response:
        # A server without sessions takes weights at any time.
        if not self.in_session and "/begin_weight_update" in self.routes:
            return _outcome(_NO_SESSION.replace("distributed", "tensor"))
        self.weight_version = content.get("weight_version") or self.weight_version
        return _outcome()

    def _update_from_disk(self, content: Any) -> web.Response:
        path = Path(content["model_path"])
        if not path.is_dir():
            return _outcome(f"Failed to get model loader: no {path}.")
        self.model_path = str(path)
        self.weight_version = content.get("weight_version") or self.weight_version
        return _outcome()

    def _set_version(self, content: Any) -> web.Response:
        self.weight_version = content["new_version"]
        return _outcome()

    def generate(self, content: Any, fault: Fault | None = None) -> web.StreamResponse:
        items = list(_items(content))
        for item in items:
            self._check(item)
            if item["lora_path"] not in (None, *self.adapters):
                raise _RefusedError(
                    f"Got LoRA adapter that has never been loaded: {item['lora_path']}"
                )
        fault = fault or self.fault_of("/generate", content)
        if fault == "abort_compiling" and not content.get("stream"):
            raise _RefusedError("Aborted by AbortReq.")
        replies = [self.reply(item) for item in items]
        for reply in replies:
            _spoil(reply, fault, self.tokens_until_abort)
        poisoned = any(self.poison.intersection(item["input_ids"]) for item in items)
        return _respond(content, replies, fault, self.tokens_until_abort, poisoned)

    def _sampled_log_prob(self, params: dict[str, Any]) -> float:
        temperature = params.get("temperature", 1.0)
        scaled = temperature not in (0, 1) and not self._original_log_probs
        if scaled and temperature > HOT:
            return -math.log(self._vocab_size)
        masked = any(params.get(name) for name in CHANGES_LOGITS)
        return SAMPLING_LOG_PROB if scaled or masked else LOG_PROB

    def _check(self, item: dict[str, Any]) -> None:
        ids, params = item["input_ids"], item["sampling_params"]
        for name, value in params.items():
            _check_parameter(name, value)
        if not ids or not all(0 <= token < self._vocab_size for token in ids):
            raise _FatalError
        if params.get("top_k", 1) > 2**30:
            raise _FatalError
        asked, length = params.get("max_new_tokens", 128), len(ids)
        if length >= self.context:
            raise _RefusedError(
                f"The input ({length} tokens) is longer than the model's context "
                f"length ({self.context} tokens)."
            )
        if asked + length > self.context:
            raise _RefusedError(
                f"Requested token count exceeds the model's maximum context length of "
                f"{self.context} tokens."
            )
        if length >= self.context - LONGEST_PROMPT_ROOM:
            raise _RefusedError(
                f"Input length ({length} tokens) exceeds the maximum allowed length "
                f"({self.context - LONGEST_PROMPT_ROOM} tokens)."
            )
        if item["top_logprobs_num"] > self._vocab_size:
            raise _FatalError
        if params.get("min_new_tokens", 0) > asked:
            raise _RefusedError(
                f"min_new_tokens must be in [0, max_new_tokens({asked})]"
            )
        if item["logprob_start_len"] > length:
            raise _RefusedError(
                "logprob_start_len is higher than the number of input tokens"
            )

    def _drawn(self, seed: int, start: int, count: int) -> list[int]:
        """Returns tokens by seed and position, as SGLang's deterministic mode does."""
        return [
            3 + random.Random(seed + place).randrange(self._vocab_size - 3)
            for place in range(start, start + count)
        ]

    def reply(self, item: dict[str, Any]) -> dict[str, Any]:
        prompt = item["input_ids"]
        room = self.context - RESERVED_TOKENS - len(prompt)
        count = min(item["sampling_params"].get("max_new_tokens", 128), room)
        tokens = (prompt * (count // len(prompt) + 1))[:count]
        seed = item["sampling_params"].get("sampling_seed")
        if self._deterministic and seed is not None:
            tokens = self._drawn(seed, len(prompt), count)
        meta: dict[str, Any] = {
            "finish_reason": {"type": "length", "length": count},
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "cached_tokens": min(self.cached_tokens, len(prompt)),
            "weight_version": self.weight_version,
        }
        if self.version_spans:
            earlier, own = self.earlier_version or ("", 0)
            spans = ((earlier, 0, own), (self.weight_version, own, count))
            meta["weight_versions"] = [
                {"version": version, "start": start, "end": end}
                for version, start, end in spans
                if end > start
            ]
        if item["return_logprob"]:
            sampled = self._sampled_log_prob(item["sampling_params"])
            start = item["logprob_start_len"]
            scored = prompt[start:] if start >= 0 else []
            before = [[LOG_PROB, token, None] for token in scored]
            if scored:
                before[0][0] = None
            meta["input_token_logprobs"] = before
            meta["output_token_logprobs"] = [[sampled, token, None] for token in tokens]
            number = range(item["top_logprobs_num"])
            if number:
                row = [[sampled, token, None] for token in number]
                meta["output_top_logprobs"] = [row for _ in tokens]
                row = [[LOG_PROB, token, None] for token in number]
                meta["input_top_logprobs"] = [None, *(row for _ in scored[1:])]
        return {"text": "", "output_ids": tokens, "meta_info": meta}


class _Events(web.StreamResponse):
    """The events of a batch: the begin and the end of each response."""

    def __init__(
        self,
        replies: list[dict[str, Any]],
        begun: int,
        *,
        whole: bool = True,
        marked: bool = True,
        hangs: bool = False,
    ) -> None:
        super().__init__(headers={"Content-Type": "text/event-stream"})
        self._replies = replies
        self._begun = begun
        self._whole = whole
        self._marked = marked
        self.hangs = hangs

    async def send(self, request: web.Request) -> None:
        """Sends the events; closes the connection if some are left out."""
        await self.prepare(request)
        for reply in self._replies:
            begun = copy.deepcopy(reply)
            _cut_off(begun, self._begun)
            begun["meta_info"]["finish_reason"] = None
            await self._write(begun)
        if self._whole:
            for reply in self._replies:
                await self._write(reply)
        if self._whole and self._marked:
            await self.write(b"data: [DONE]\n\n")
            await self.write_eof()
        elif request.transport is not None and not self.hangs:
            # What was written reaches the client, and the end of the answer does not.
            request.transport.close()

    async def _write(self, content: Any) -> None:
        await self.write(b"data: " + msgspec.json.encode(content) + b"\n\n")


def _respond(
    content: Any,
    replies: list[dict[str, Any]],
    fault: Fault | None,
    begun: int,
    poisoned: bool,
) -> web.StreamResponse:
    batched = isinstance(content["input_ids"][0], list)
    if content.get("stream"):
        for index, reply in enumerate(replies if batched else ()):
            reply["index"] = index
        if poisoned:
            return _Events([], 0, whole=False)
        return _Events(
            replies,
            begun,
            whole=fault not in ("hang_up_mid_stream", "hang_mid_stream"),
            hangs=fault == "hang_mid_stream",
            marked=fault != "hang_up_at_end",
        )
    if fault == "abort_503":
        return _json({"detail": "The request queue is full."}, 503)
    if poisoned:
        return web.Response(text="Internal Server Error", status=500)
    return _json(replies if batched else replies[0])


class _RefusedError(Exception):
    """The server answers 400."""


class _BrokenError(Exception):
    """The server answers 500."""


class _FatalError(Exception):
    """A request that would kill an SGLang server."""


def _as_batch(content: Any) -> Any:
    ids = content.get("input_ids") if isinstance(content, dict) else None
    if not ids or not isinstance(ids[0], int):
        return content
    return {
        name: value if name == "stream" else [value] for name, value in content.items()
    }


def _items(  # noqa: C901 - One branch for each shape that SGLang refuses.
    content: Any,
) -> Iterator[dict[str, Any]]:
    """Checks the shapes of a ``/generate`` request and takes the batch apart."""
    if not isinstance(content, dict):
        raise _RefusedError(
            "Input should be a dictionary or an instance of GenerateReqInput"
        )
    rows = content.get("input_ids")
    if rows is None:
        raise _RefusedError(
            "Either text, input_ids or input_embeds should be provided."
        )
    if not isinstance(rows, list):
        raise _RefusedError(f"must be list or null; got {type(rows).__name__}")
    if not rows:
        raise _RefusedError("input_ids cannot be empty.")
    batched = isinstance(rows[0], list)
    rows = rows if batched else [rows]
    columns: dict[str, Any] = {}
    for name, default in (
        ("sampling_params", {}),
        ("return_logprob", False),
        ("logprob_start_len", -1),
        ("top_logprobs_num", 0),
        ("rid", None),
        ("extra_key", None),
        ("lora_path", None),
    ):
        value = content.get(name, default)
        if not isinstance(value, list):
            value = [value] * len(rows)
        if not batched and isinstance(content.get(name), list):
            raise _RefusedError(f"{name} is a list, and the request is not a batch.")
        if len(value) != len(rows):
            raise _RefusedError(
                f"The length of {name} should be equal to the batch size."
            )
        columns[name] = value
    for index, row in enumerate(rows):
        if not isinstance(row, list) or any(type(token) is not int for token in row):
            raise _RefusedError(f"row {index}: contains non-int64 element")
        item = {name: column[index] for name, column in columns.items()}
        if not isinstance(item["sampling_params"], dict):
            raise _RefusedError("sampling_params must be a dictionary")
        if not isinstance(item["extra_key"], (str, type(None))):
            raise _RefusedError("Input should be a valid string")
        yield {"input_ids": row, **item}


def _check_parameter(name: str, value: Any) -> None:
    if name == "stream_interval" and type(value) is int:
        return
    if name not in SAMPLING_PARAMETERS:
        expected = ", ".join(f"`{known}`" for known in SAMPLING_PARAMETERS)
        raise _RefusedError(f"unknown field `{name}`, expected one of {expected}")
    row = SAMPLING_PARAMETERS[name]
    if value is None:
        return
    is_bool = isinstance(value, bool)
    fits = isinstance(value, row.types) and (bool in row.types or not is_bool)
    if not fits:
        raise _RefusedError(f"invalid type: {value!r}")
    if name == "logit_bias" and not all(
        isinstance(bias, (int, float)) for bias in value.values()
    ):
        raise _RefusedError(f"invalid type: {value!r}, expected f64")
    if name in ("stop", "stop_regex"):
        texts = [value] if isinstance(value, str) else value
        if not all(isinstance(text, str) for text in texts):
            raise _RefusedError(f"invalid type: {value!r}, expected a string")
        if len(texts) > MOST_STOPS:
            raise _RefusedError(
                f"at most {MOST_STOPS} stop strings are allowed, got {len(texts)}"
            )
    number = isinstance(value, (int, float)) and not is_bool and name != "top_k"
    if number and not row.least <= value <= row.greatest:
        raise _RefusedError(
            f"{name} must be in [{row.least:g}, {row.greatest:g}], got {value}."
        )


def _cut_off(reply: dict[str, Any], tokens: int) -> None:
    """Leaves the first tokens of a response."""
    meta = reply["meta_info"]
    reply["output_ids"] = reply["output_ids"][:tokens]
    meta["completion_tokens"] = len(reply["output_ids"])
    for name in ("output_token_logprobs", "output_top_logprobs"):
        if name in meta:
            meta[name] = meta[name][:tokens]
    for span in meta.get("weight_versions", ()):
        span["end"] = min(span["end"], tokens)


def _spoil(  # noqa: C901 - One branch for each fault.
    reply: dict[str, Any], fault: Fault | None, tokens: int
) -> None:
    """Breaks one item of a reply according to a fault."""
    meta = reply["meta_info"]
    entries = meta.get("output_token_logprobs")
    if fault == "abort":
        _cut_off(reply, tokens)
        meta["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
    elif fault == "abort_400":
        reply["output_ids"] = []
        meta["finish_reason"] = {
            "type": "abort",
            "message": "It cannot be served.",
            "status_code": 400,
        }
    elif fault == "abort_compiling":
        # It was given another prompt, of one token, and answered that.
        meta.pop("output_token_logprobs", None)
        _cut_off(reply, 1)
        meta["finish_reason"] = {
            "type": "abort",
            "message": "Aborted by AbortReq.",
            "status_code": 400,
        }
    elif fault == "abort_503":
        _cut_off(reply, 0)
        meta["finish_reason"] = {
            "type": "abort",
            "message": "The request queue is full.",
            "status_code": 503,
        }
    elif fault == "hang_up_at_end":
        _cut_off(reply, tokens)
        meta["finish_reason"] = {"type": "stop", "matched": "the end"}
    elif fault == "short_tokens":
        reply["output_ids"] = reply["output_ids"][:-1]
    elif fault == "no_log_probs":
        meta.pop("output_token_logprobs", None)
        meta.pop("input_token_logprobs", None)
    elif entries and fault == "short_log_probs":
        entries.pop()
    elif entries and fault == "short_top_log_probs":
        meta["output_top_logprobs"].pop()
    elif fault == "null_log_probs":
        for scored in filter(None, (entries, meta.get("input_token_logprobs"))):
            scored[-1][0] = None
    elif entries and fault == "other_tokens":
        entries[-1][1] += 1


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content),
        status=status,
        content_type="application/json",
    )


def _refusal(message: str) -> web.Response:
    return _json({"object": "error", "message": message, "code": 400}, 400)


def _outcome(refusal: str | None = None) -> web.Response:
    content = {"success": refusal is None, "message": refusal or "Success"}
    return _json(content, 200 if refusal is None else 400)


def _lora_outcome(refusal: str | None = None) -> web.Response:
    content = {"success": refusal is None, "error_message": refusal or ""}
    return _json(content, 200 if refusal is None else 400)


def _ok(content: Any) -> web.Response:
    return _json({"status": "ok"})


def _empty(content: Any) -> web.Response:
    return web.Response()


def _flushed(content: Any) -> web.Response:
    return web.Response(text="Cache flushed.\n")


def _refuse_group(content: Any) -> web.Response:
    return _outcome("This server has no model and joins no group.")
