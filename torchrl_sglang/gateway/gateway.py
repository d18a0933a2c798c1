"""``Gateway``: an endpoint for agents that records their tokens."""

from __future__ import annotations

import asyncio
import re
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

from aiohttp import web
from tensordict import LazyStackedTensorDict, TensorDictBase

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.chat.declarations import known_settings
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.errors import ConfigurationError, GatewayError
from torchrl_sglang.gateway.agents import Agent, run_agents
from torchrl_sglang.gateway.branches import BranchReason
from torchrl_sglang.gateway.credit import check_discount, trained_rule
from torchrl_sglang.gateway.dialects.base import Dialect
from torchrl_sglang.gateway.dialects.registry import DIALECTS
from torchrl_sglang.gateway.export import to_rows
from torchrl_sglang.gateway.policy import Policy, PolicyReply, Sampling
from torchrl_sglang.gateway.progress import Progress
from torchrl_sglang.gateway.reading import RequestReader, ToolChoiceMode
from torchrl_sglang.gateway.recorded import tell_session
from torchrl_sglang.gateway.request import Request
from torchrl_sglang.gateway.server import make_app
from torchrl_sglang.gateway.session import (
    NEW_CHARACTERS,
    Prompt,
    Session,
    Turn,
    as_reward,
)
from torchrl_sglang.gateway.store import Store
from torchrl_sglang.gateway.tool_grammar import GRAMMARS, with_choice
from torchrl_sglang.recording.recorder import RunRecorder, check_recorder
from torchrl_sglang.requests.behaviour import with_columns
from torchrl_sglang.requests.request import check_logprobs_mode
from torchrl_sglang.requests.sampling import SAMPLING_ALIASES, SAMPLING_PARAMETERS, hint
from torchrl_sglang.requests.token_columns import TokenColumn
from torchrl_sglang.support.checks import (
    check_count,
    check_mapping,
    check_port,
    check_seconds,
)
from torchrl_sglang.support.urls import check_public_url, is_loopback
from torchrl_sglang.telemetry.prometheus import StatsFamilies, write_text
from torchrl_sglang.telemetry.tracing import span
from torchrl_sglang.types import LogProbsMode

STOP_SECONDS = 10.0
START_SECONDS = 30.0

PROMPT_THREADS = 2
"""Threads that render and tokenize long prompts; tokenizers leave Python meanwhile."""

DROPPED = 10_000
"""Latest sessions that are known to have been dropped."""

KEY_EXPIRED = "key_expired"
"""Code of the error for a key that opens its session no more."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Gateway:
    """Serves OpenAI's and Anthropic's protocols, and records every token.

    Point an agent's client at a session's ``base_url`` (OpenAI) or ``url`` (Anthropic),
    with the session's ``key``, run it, and read the session back as TensorDicts that
    hold the tokens, log-probs and weight versions that the engine computed.

    A turn that goes on from an earlier one of its session begins with that turn's very
    tokens; only what was said since is tokenized. Where the chat template renders the
    earlier turns in another way now, or the client has edited them, the turn begins a
    branch.

    Streams bring reasoning and content as they are generated, and tool calls when a
    response is complete. What is recorded is the same as without a stream.

    Args:
        engine: generates.

    Keyword Args:
        tokenizer: defaults to the engine's.
        chat_template: a Jinja template. Defaults to the tokenizer's.
        tool_call_parser: SGLang's name of the model's format of tool calls, such as
            ``"qwen25"``. Defaults to None: tool calls stay text.
        reasoning_parser: the same for reasoning, such as ``"qwen3"``. Defaults to None.
        host: address to listen on. Defaults to ``"127.0.0.1"``, where the path of a
            session that there is opens it to programs of this machine, not to web
            pages of other hosts; any other address needs ``api_key``, and each request
            a key.
        port: defaults to 0, a free one.
        public_url: the address by which agents on other machines and in containers
            reach this gateway, such as that of a proxy with TLS:
            ``"https://gateway.example.org"``, with a path if it has one. The URLs of
            sessions begin with it. Each request needs a key then, and the gateway needs
            ``api_key``. Defaults to None: the address that it listens on.
        api_key: opens all sessions, and makes new ones over HTTP. Defaults to a random
            one.
        key_seconds: how long the key of a session opens it, in seconds from when it
            began; it is answered 401 afterwards, with the code ``"key_expired"``. What
            was recorded stays readable with ``api_key``. Defaults to None, no limit.
        default_sampling_params: for requests that do not give them, under SGLang's
            names. Defaults to temperature 1, without top-p or top-k.
        forced_sampling_params: for all requests, whatever they give. Defaults to none.
        request_timeout: of a response, in seconds. Defaults to 600.
        keep_alive_seconds: how often a stream that waits for its response says that it
            lives. Defaults to 10.
        max_sessions: most sessions at once. Defaults to 10,000.
        max_turns: most turns of a session. Defaults to 1,000.
        max_tokens: most generated tokens of a session; each of several requests at a
            time may generate what is left. Defaults to None, no limit.
        session_seconds: how long a session takes turns. Defaults to None, no limit.
        dialects: that clients may speak, see :class:`.Dialect`. Defaults to OpenAI's
            completions and Anthropic's messages.
        tool_choice: how a request is answered that says which tools are called, or that
            one is called at a time. ``"grammar"``: the response is held to it, on
            servers with a grammar backend and for formats of calls that are known.
            ``"auto"``: the model decides, and the field is ignored. Defaults to
            ``"grammar"``.
        ignored_params: names of fields that clients send and that have no effect here,
            such as ``["seed"]``; otherwise a request with a field that is not supported
            is refused. A field without effect is logged once, and the header
            ``x-torchrl-sglang-ignored`` of each answer names it. Defaults to none.
        token_columns: further quantities that the servers report for each token: names
            that :class:`.TokenColumn` lists, or rows. They are recorded, and
            rows have them. Defaults to none.
        logprobs_mode: log-probs that are recorded, as for :class:`.SGLangWrapper`.
            Clients set top-p themselves: ``"behaviour"`` records what their tokens were
            drawn from, and ``default_sampling_params={"top_k": 4096}`` is the ``top_k``
            that it needs then. Defaults to ``"model"``.
        trained: which turns are trained: a function of a :class:`.Turn` that returns a
            bool, or a regular expression that the whole name of its request's ``model``
            has to match, such as ``"(?!.*haiku).*"`` for all but titles. Other turns
            are recorded and read as others are; in rows they are masked, and a path to
            nothing that is trained is no row. Defaults to None: all turns.
        discount: in [0, 1], of a reward for each turn before the one that it stands at;
            see :meth:`to_tensordict`. Defaults to 1.
        path: an SQLite file that sessions are kept in, and read back from, which one
            gateway has at a time. A client's turn is in it before the client is
            answered. While it cannot be written, clients are answered 503, and nothing
            is generated. Defaults to None: in memory only.
        recorder: a :class:`.RunRecorder`, which records each session when it is
            dropped, or at the end, for ``torchrl-sglang view``. A collector with a
            recorder records the sessions of its agents itself. Defaults to None.

    Attributes:
        url (str): where it listens.
        public_url (str | None): as above.
        api_key (str): as above.
        engine (RLSGLangEngine): as above.
        token_columns (tuple of TokenColumn): as above.

    Raises:
        ConfigurationError: if an argument is wrong.

    Examples:
        >>> import openai
        >>> with Gateway(engine) as gateway:
        ...     session = gateway.session()
        ...     client = openai.OpenAI(base_url=session.base_url, api_key=session.key)
        ...     answer = client.chat.completions.create(
        ...         model="policy", messages=[{"role": "user", "content": "1+1="}]
        ...     )
        ...     gateway.set_reward(session, 1.0)
        ...     batch = gateway.to_tensordict([session])
        >>> batch["tokens", "full"].shape[0]
        1
    """

    def __init__(
        self,
        engine: RLSGLangEngine,
        *,
        tokenizer: Any = None,
        chat_template: str | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        public_url: str | None = None,
        api_key: str | None = None,
        key_seconds: float | None = None,
        default_sampling_params: Mapping[str, Any] | None = None,
        forced_sampling_params: Mapping[str, Any] | None = None,
        request_timeout: float = 600.0,
        keep_alive_seconds: float = 10.0,
        max_sessions: int = 10_000,
        max_turns: int = 1_000,
        max_tokens: int | None = None,
        session_seconds: float | None = None,
        dialects: Sequence[Dialect] = DIALECTS,
        tool_choice: ToolChoiceMode = "grammar",
        ignored_params: Sequence[str] = (),
        token_columns: Sequence[str | TokenColumn] = (),
        logprobs_mode: LogProbsMode = "model",
        trained: str | Callable[[Turn], bool] | None = None,
        discount: float = 1.0,
        path: str | Path | None = None,
        recorder: RunRecorder | None = None,
    ) -> None:
        self.dialects: Sequence[Dialect] = _check_dialects(dialects)
        self.public_url = None if public_url is None else check_public_url(public_url)
        # A proxy of this machine hands in what others ask.
        self.open = is_loopback(host) and public_url is None
        if not self.open and not api_key:
            raise ConfigurationError(
                f"host={host!r} and public_url={public_url!r} can be reached from "
                f"other machines; give an api_key."
            )
        self.api_key = api_key or secrets.token_urlsafe(32)
        self._host = host
        self._port = check_port("port", port) if port else 0
        self._default = _params("default_sampling_params", default_sampling_params)
        self._forced = _params("forced_sampling_params", forced_sampling_params)
        self.keep_alive_seconds = check_seconds(
            "keep_alive_seconds", keep_alive_seconds
        )
        self._max_sessions = check_count("max_sessions", max_sessions)
        self._max_turns = check_count("max_turns", max_turns)
        self._max_tokens = (
            None if max_tokens is None else check_count("max_tokens", max_tokens)
        )
        self._key_seconds = (
            None if key_seconds is None else check_seconds("key_seconds", key_seconds)
        )
        self._seconds = (
            None
            if session_seconds is None
            else check_seconds("session_seconds", session_seconds)
        )
        self.token_columns = with_columns(
            check_logprobs_mode(logprobs_mode), token_columns
        )
        tokenizer = engine.get_tokenizer() if tokenizer is None else tokenizer
        self._template = ChatTemplate(tokenizer, chat_template)
        self._parsers = tool_call_parser, reasoning_parser
        self._reader = RequestReader(
            ignored_params=ignored_params,
            tool_choice=tool_choice,
            variables=self._template.variables,
            forces_grammar=not GRAMMARS.isdisjoint(self._forced),
        )
        self._policy = Policy(
            engine,
            tokenizer,
            self._template,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            token_columns=self.token_columns,
            logprobs_mode=logprobs_mode,
            timeout=check_seconds("request_timeout", request_timeout),
        )
        self.engine = engine
        self.models = [engine.model_path]
        self._texts: dict[int, str] = {}
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._dropped: OrderedDict[str, None] = OrderedDict()
        self._turns = self._tokens = 0
        self._branches: Counter[BranchReason] = Counter()
        self._is_trained = trained_rule(trained)
        self._discount = check_discount(discount)
        self._recorder = check_recorder(recorder)
        self._store = None if path is None else Store(path)
        self._file_closed = False
        self._threads = _prompt_threads()
        self._families: StatsFamilies | None = None
        self._runner = _Runner(self, host, self._port)
        for session in self._store.load() if self._store else ():
            self._set_up(session)
            self._sessions[session.name] = self._by_key[session.key] = session

    @property
    def url(self) -> str:
        """Address on which the gateway listens."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._runner.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = self.url if self._runner.port else "not started"
        return f"Gateway({state}, sessions={len(self._sessions)})"

    def start(self) -> None:
        """Listens from now on.

        Raises:
            ConfigurationError: if the address cannot be used, or it has been started
                already.
        """
        self._threads.shutdown(wait=False)
        self._threads = _prompt_threads()
        self._runner.start()
        for session in self._sessions.values():
            self._set_up(session)

    def _set_up(self, session: Session) -> None:
        """Tells a session what the gateway knows of it."""
        session.is_trained, session.discount = self._is_trained, self._discount
        if self._key_seconds is not None:
            session.expires = session.created + self._key_seconds
        if self._runner.port:
            session.url = f"{self.public_url or self.url}/sessions/{session.name}"

    def shutdown(self) -> None:
        """Listens no more; requests under way are aborted. Sessions stay readable.

        With ``path``, rewards are set before: the file is closed.
        """
        self._runner.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for session in self.sessions:
            self._record(session)
        self._recorder = None
        if self._store is not None:
            self._store.close()
            self._store = None
            self._file_closed = True

    def _check_file(self) -> None:
        """Raises :class:`GatewayError` if there is a file that takes nothing."""
        if self._file_closed:
            raise GatewayError(
                "The file of sessions was closed by shutdown(), so that this would not "
                "be in it; do it before, or open the file with another gateway."
            )
        if self._store is not None:
            self._store.check()

    def session(self, name: str | None = None, *, group: str | None = None) -> Session:
        """Returns a session, a new one where there is none of that name.

        Args:
            name: of letters, digits, ``.``, ``_`` and ``-``. Defaults to a random one.
            group: sessions of a group are compared with each other. Defaults to none.

        Raises:
            ConfigurationError: if ``name`` has other characters, or more than 128.
            GatewayError: if there are ``max_sessions``, or the file cannot be written.
        """
        name = secrets.token_hex(16) if name is None else name
        _check_group(group)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"{name!r} is not a name of a session; give up to 128 letters, digits, "
                f"'.', '_' and '-'."
            )
        self._check_file()
        with self._lock:
            if (found := self._sessions.get(name)) is not None:
                return found
            if len(self._sessions) >= self._max_sessions:
                raise GatewayError(
                    f"There are {self._max_sessions} sessions, which is max_sessions; "
                    f"drop() those that are done.",
                    status=429,
                )
            session = Session(name, key=f"sk-{secrets.token_urlsafe(32)}", group=group)
            self._set_up(session)
            self._sessions[name] = self._by_key[session.key] = session
            # The key of a dropped session of this name stays dropped.
            self._dropped.pop(name, None)
            if self._store is not None:
                self._store.save_session(session)
        return session

    @property
    def sessions(self) -> list[Session]:
        """All sessions, in the order in which they began."""
        with self._lock:
            return list(self._sessions.values())

    def stats(self) -> dict[str, Any]:
        """Returns what was recorded since this gateway was made, dropped sessions too.

        Returns:
            dict: ``sessions`` that there are now, ``generating`` (responses under way),
            ``turns`` and their generated ``tokens``, and ``branches``: requests that
            began a branch, by :data:`.BranchReason`. Those other than ``"start"``,
            ``"conversation"``, ``"again"`` and ``"fork"`` went on from an earlier turn,
            as far as the client knows: their prompts are read once more.
            ``session.turns[3].branch.text`` says what was different.
        """
        generating = sum(session.generating for session in self.sessions)
        with self._lock:
            return {
                "sessions": len(self._sessions),
                "generating": generating,
                "turns": self._turns,
                "tokens": self._tokens,
                "branches": dict(self._branches),
            }

    def find(self, *, name: str | None = None, key: str | None = None) -> Session:
        """Returns the session of this name or key.

        Raises:
            GatewayError: if there is none, or its key has expired.
        """
        with self._lock:
            found = (
                self._sessions.get(name) if name else self._by_key.get(str(key or ""))
            )
            is_dropped = (name or key) in self._dropped
        if found is not None:
            if not name:
                _check_key(found)
            return found
        what = f"session {name!r}" if name else "session with this key"
        if is_dropped:
            raise GatewayError(
                f"The {what} was dropped, and takes nothing more.", status=410
            )
        raise GatewayError(
            f"There is no {what}; gateway.session() makes one.",
            status=404 if name else 401,
        )

    def drop(self, session: Session) -> None:
        """Forgets a session, also in the file.

        It takes no turn from then on: requests under way are answered 410, as are later
        ones with its key or its path.
        """
        with self._lock:
            if self._sessions.get(session.name) is not session:
                return
            session.is_dropped = True
            del self._sessions[session.name], self._by_key[session.key]
            self._dropped |= {session.name: None, session.key: None}
            while len(self._dropped) > 2 * DROPPED:
                self._dropped.popitem(last=False)
            if self._store is not None:
                self._store.delete(session)
        self._record(session)

    def _record(self, session: Session) -> None:
        """Has a session recorded, which takes no more turns."""
        if self._recorder is not None:
            tell_session(self._recorder, session, self._template.tokenizer)

    def set_reward(
        self,
        session: Session,
        reward: float,
        *,
        turn: int | str | None = None,
        agent: str | None = None,
        branch: int | str | None = None,
    ) -> None:
        """Sets the reward of a session, or of an agent, a branch or a turn of it.

        All of them add up, see :meth:`to_tensordict`; a later reward of the same thing
        replaces the earlier one.

        Args:
            session: of this gateway.
            reward: a finite number.
            turn: of one turn: its number, or its ``request_id``.
            agent: of one agent: the ``model`` that its requests name.
            branch: of all that goes on from a turn, and that turn: its number, or its
                ``request_id``.

        Raises:
            ConfigurationError: if the reward is not finite, or there is no such part of
                the session.
            GatewayError: if the file cannot be written, or was closed.
        """
        self._check_file()
        target = session.set_reward(reward, turn=turn, agent=agent, branch=branch)
        if self._store is not None:
            self._store.save_reward(session, target, as_reward(reward))

    def to_tensordict(
        self, sessions: Iterable[Session] | None = None
    ) -> TensorDictBase:
        r"""Returns trajectories as a lazy stack in TorchRL's layout.

        A row is a path through a session: ``tokens``, ``masks``, ``log_probs``,
        ``history`` and ``generation_info`` as :class:`.SGLangWrapper` writes them,
        where the response is everything behind the first prompt. ``("masks",
        "all_assistant_mask")`` covers what the policy wrote; tokens that two paths
        share are covered in the first one only, and all others have the log-prob NaN,
        which losses leave out. ``("next", "done")`` is True in the last row of a
        session. ``session`` and ``group`` are names, and
        ``policy_version`` is the oldest weight version of what is trained in the row,
        -1 where it is unknown.
        ``request`` has ``model``, ``user``, ``metadata`` (JSON) and ``request_id`` of
        the row's last turn, each a text, empty where the request had none.

        A path ends with a turn that is trained, see ``trained``; others before it are
        in the row, masked. A session of which nothing is trained has no row.

        Rewards stand at turns: a turn's own; those of the session and of its branches
        at the last turn of each row that they are of; an agent's at that agent's last
        turn in a row. What stands at one turn adds up to :math:`r_k`, and with
        ``discount`` :math:`d` the return of turn :math:`t` is

        .. math:: G_t = \sum_{k \ge t} d^{k-t} r_k

        over the turns :math:`k` of the row. ``turn_rewards`` has :math:`r_k` at the
        last token of each turn's response, ``turn_returns`` has :math:`G_t` at each
        token of it; both are 0 elsewhere, and as long as the row's response. ``("next",
        "reward")`` of shape ``(1, 1)`` is :math:`G_0`: the sum of all where
        ``discount`` is 1, and 0 where none was set. The reward of a turn that is in no
        row counts at the turn that it goes on from.

        Args:
            sessions: defaults to all.

        Raises:
            ConfigurationError: if none of them has a turn that is trained.
        """
        chosen = self.sessions if sessions is None else list(sessions)
        rows = to_rows(chosen)
        if not rows:
            models = {turn.model for each in chosen for turn in each.turns}
            raise ConfigurationError(
                f"No turn of these sessions is trained by the gateway's rule; their "
                f"requests name the models {', '.join(map(repr, sorted(models)))}."
                if models
                else "No turn was recorded in these sessions."
            )
        return LazyStackedTensorDict(*rows, stack_dim=0)

    async def run_agents(
        self,
        agent: Agent,
        tasks: Sequence[Any],
        *,
        group_size: int = 1,
        max_concurrent: int = 256,
        timeout: float = 3600.0,
    ) -> list[list[Session]]:
        """Runs an agent on each task, each time in a session of its own.

        Args:
            agent: ``async def agent(task, *, base_url, api_key)``, which returns a
                reward, or ``None`` if it sets rewards itself.
            tasks: what it is called with.
            group_size: how often it is called with each. Defaults to 1.
            max_concurrent: most agents at once. Defaults to 256.
            timeout: of each, in seconds. Defaults to 3600.

        Returns:
            The sessions of each task. The session of an agent that failed is dropped,
            which is logged.

        Raises:
            GatewayError: if all agents failed; the first failure is its cause.
        """
        return await run_agents(
            self,
            agent,
            tasks,
            group_size=check_count("group_size", group_size),
            max_concurrent=check_count("max_concurrent", max_concurrent),
            timeout=check_seconds("timeout", timeout),
        )

    def read(self, read: Callable[[Any], Request], body: Mapping[str, Any]) -> Request:
        """Returns what a body asks for. For the HTTP routes.

        Raises:
            ConfigurationError: for what is wrong or unsupported.
        """
        return self._reader(read, body)

    async def respond(
        self, session: Session, request: Request, progress: Progress | None = None
    ) -> list[Turn]:
        """Generates and keeps the responses to a request. For the HTTP routes."""
        number = request.sampling.number
        _check_takes_turns(session)
        self._check_limits(session, number)
        session.generating += number
        try:
            prompt = await self._prompt(session, request)
            self._policy.check_fits(prompt)
            if self._store is not None and self._store.has_failed:
                await self.written()
            with span(
                "chat",
                kind="server",
                of=session,
                session=session.name,
                gen_ai__operation__name="chat",
                gen_ai__request__model=request.model,
            ):
                replies = await self._policy.respond(
                    prompt,
                    self._sampling(session, request, prompt),
                    session=session.name,
                    priority=session.priority,
                    progress=progress,
                )
            turns = [
                _to_turn(session.next_number(), prompt, each, request)
                for each in replies
            ]
            await self.keep(session, turns)
        finally:
            session.generating -= number
        self._count(turns)
        return turns

    def _count(self, turns: Sequence[Turn]) -> None:
        """Counts the turns of one request."""
        branch = turns[0].branch
        with self._lock:
            self._turns += len(turns)
            self._tokens += sum(len(turn.completion.token_ids) for turn in turns)
            if branch is not None:
                self._branches[branch.reason] += 1

    async def keep(self, session: Session, turns: Sequence[Turn]) -> None:
        """Adds turns to their session, and to the file before. For the HTTP routes.

        Raises:
            GatewayError: if the session was dropped, or the file cannot be written.
                None of them is kept then.
        """
        origin = turns[0].prompt.origin
        with self._lock:
            # A client that goes on from a turn has seen it.
            turns = [*_unkept(session, origin), *turns]
            pinned = turns if origin is None else [origin, *turns]
            session.pinned += pinned
        try:
            if self._store is not None:
                await self._save(session, turns)
            with self._lock:
                _check_takes_turns(session)
                for turn in turns:
                    if turn not in session:
                        session.add(turn)
        finally:
            with self._lock:
                for turn in pinned:
                    session.pinned.remove(turn)

    async def _save(self, session: Session, turns: Sequence[Turn]) -> None:
        """Writes turns to the file; none that only a cancelled call has kept."""
        assert self._store is not None
        try:
            await self._store.save_turns(session, turns)
        except asyncio.CancelledError:
            with self._lock:
                alone = [t for t in turns if session.pinned.count(t) == 1]
                gone = [turn for turn in alone if turn not in session]
            if self._store is not None:
                self._store.delete_turns(session, gone)
            raise

    def withdraw(self, session: Session, turns: Sequence[Turn]) -> None:
        """Removes turns that no client has seen. For the HTTP routes."""
        with self._lock:
            # Others go on from those that are pinned: their clients have seen them.
            loose = [turn for turn in turns if turn not in session.pinned]
            gone = [turn for turn in loose if session.remove(turn)]
            if self._store is not None and gone:
                self._store.delete_turns(session, gone)

    def _sampling(self, session: Session, request: Request, prompt: Prompt) -> Sampling:
        """Returns how the responses to a request are drawn."""
        params = {**self._default, **request.sampling.params}
        if GRAMMARS.isdisjoint(self._forced):
            call_parser, reasoning_parser = self._parsers
            params = with_choice(
                params,
                request.setting.tools,
                request.choice,
                call_parser=call_parser,
                reasoning_parser=reasoning_parser,
                prompt=prompt.rendered,
                has_grammar=self.engine.capabilities.has_grammar,
            )
        params |= self._forced
        if self._max_tokens is not None:
            left = self._max_tokens - session.num_tokens
            left //= request.sampling.number
            asked = params.get("max_new_tokens")
            params["max_new_tokens"] = min(
                asked if isinstance(asked, int) else left, max(left, 1)
            )
        return replace(request.sampling, params=params)

    async def unname(self, session: Session, turn: Turn) -> None:
        """Forgets the name of a turn's answer, also in the file. For the HTTP routes.

        Raises:
            GatewayError: if the file cannot be written.
        """
        with self._lock:
            session.unname(turn)
        if self._store is not None:
            await self._store.save_turns(session, [turn])

    async def written(self) -> None:
        """Returns when everything so far is in the file. For the HTTP routes.

        Raises:
            GatewayError: if it could not be written.
        """
        if self._store is not None:
            await self._store.written()

    async def count(self, session: Session, request: Request) -> int:
        """Returns the number of tokens of a prompt. For the HTTP routes."""
        return (await self._prompt(session, request)).num_tokens

    async def metrics(self, accept: str) -> tuple[str, bytes]:
        """Returns metrics of this gateway and its engine. For the HTTP routes.

        Args:
            accept: formats that the client takes, as in its header.

        Raises:
            GatewayError: if the package ``prometheus_client`` is missing.
        """
        if self._families is None:
            has_stats = hasattr(self.engine, "stats")
            try:
                self._families = StatsFamilies(
                    gateway=self, engine=self.engine if has_stats else None
                )
            except ConfigurationError as error:
                raise GatewayError(str(error), status=501) from error
        return await asyncio.to_thread(write_text, self._families, accept)

    def token_text(self, token: int) -> str:
        """Returns the text of a token. For the HTTP routes."""
        if (text := self._texts.get(token)) is None:
            text = self._texts[token] = self._template.decode([token])
        return text

    async def _prompt(self, session: Session, request: Request) -> Prompt:
        """Returns a prompt; one that takes longer is made beside the event loop."""
        text, template = request.text, self._template
        if text is not None:
            if len(text) <= NEW_CHARACTERS:
                return session.text_prompt(text, template)
            return await self._apart(partial(session.text_prompt, text, template))
        asked = request.messages, known_settings(request.setting), template
        prompt = session.next_prompt(*asked)
        if prompt is not None:
            return prompt
        return await self._apart(partial(session.prompt, *asked))

    async def _apart(self, make: Callable[[], Prompt]) -> Prompt:
        """Calls a function in a thread of the gateway's own."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, make)

    def _check_limits(self, session: Session, number: int) -> None:
        turns = len(session.turns) + session.generating + number
        reached = {
            f"max_turns={self._max_turns}": turns > self._max_turns,
            f"max_tokens={self._max_tokens}": self._max_tokens is not None
            and session.num_tokens >= self._max_tokens,
            f"session_seconds={self._seconds}": self._seconds is not None
            and session.age > self._seconds,
        }
        for limit, holds in reached.items():
            if holds:
                raise GatewayError(
                    f"The session {session.name!r} has reached {limit}, and takes no "
                    f"more turns."
                )


def _prompt_threads() -> ThreadPoolExecutor:
    """Returns threads that render and tokenize; they start when they are needed."""
    return ThreadPoolExecutor(
        PROMPT_THREADS, thread_name_prefix="torchrl_sglang-prompts"
    )


def _check_group(group: Any) -> None:
    if group is None:
        return
    try:
        if isinstance(group, str):
            group.encode()
            return
    except UnicodeEncodeError:
        pass
    raise ConfigurationError(f"group={group!r} must be a text in Unicode.")


def _check_key(session: Session) -> None:
    """Raises :class:`GatewayError` if the key of a session has expired."""
    if session.expires is not None and time.time() >= session.expires:
        ended = datetime.fromtimestamp(session.expires, UTC)
        raise GatewayError(
            f"The key of the session {session.name!r} expired at {ended:%F %T} UTC, "
            f"after the gateway's key_seconds; begin another session, or give the "
            f"gateway a greater key_seconds.",
            status=401,
            code=KEY_EXPIRED,
        )


def _check_takes_turns(session: Session) -> None:
    if session.is_dropped:
        raise GatewayError(
            f"The session {session.name!r} was dropped, and takes nothing more.",
            status=410,
        )


def _to_turn(number: int, prompt: Prompt, reply: PolicyReply, request: Request) -> Turn:
    return Turn(
        number=number,
        prompt=prompt,
        completion=reply.completion,
        text=reply.text,
        reply=reply.message,
        ended=reply.ended,
        model=request.model,
        user=request.user,
        metadata=request.metadata,
        request_id=request.request_id,
        name=request.name,
        about=request.about if request.name else {},
    )


def _unkept(session: Session, turn: Turn | None) -> list[Turn]:
    """Returns the turns up to this one that their session does not have."""
    found: list[Turn] = []
    while turn is not None and turn not in session:
        found.append(turn)
        turn = turn.prompt.origin
    return found[::-1]


def _check_dialects(dialects: Sequence[Dialect]) -> tuple[Dialect, ...]:
    wrong = [each for each in dialects if not isinstance(each, Dialect)]
    if wrong or not dialects:
        raise ConfigurationError(
            f"dialects must be objects of classes of Dialect, got {dialects!r}."
        )
    paths = Counter(each.path for dialect in dialects for each in dialect.endpoints)
    if twice := [path for path, count in paths.items() if count > 1]:
        raise ConfigurationError(f"Two of dialects have {', '.join(twice)}.")
    return tuple(dialects)


def _params(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns sampling parameters under SGLang's names."""
    params = {}
    for key, value in {} if given is None else check_mapping(name, given).items():
        own = SAMPLING_ALIASES.get(key, key)
        if own not in SAMPLING_PARAMETERS:
            raise ConfigurationError(
                f"{name}: {key!r} is not a sampling parameter.{hint(str(key))}"
            )
        params[own] = value
    return params


class _Runner:
    """Serves an application in a thread of its own, once."""

    def __init__(self, gateway: Gateway, host: str, port: int) -> None:
        self._gateway = gateway
        self._host = host
        self._wanted = port
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.port = 0
        """0 while it does not listen."""
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self._end: asyncio.Event | None = None

    def start(self) -> None:
        """Starts the endpoint; returns when it listens."""
        if self._thread is not None:
            raise ConfigurationError(
                "The gateway has been started already, which it can be once; make "
                "another one."
            )
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()),
            name="torchrl_sglang-gateway",
            daemon=True,
        )
        self._thread.start()
        if not self._ready.wait(START_SECONDS) or self._error is not None:
            raise ConfigurationError(
                f"The gateway cannot listen on {self._host}:{self._wanted}: "
                f"{self._error or 'it took too long'}."
            ) from self._error

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        runner = web.AppRunner(
            make_app(self._gateway),
            # A client that hangs up frees the server.
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=0.1,
        )
        try:
            await runner.setup()
            site = web.TCPSite(runner, self._host, self._wanted)
            await site.start()
            self.port = runner.addresses[0][1]
            self._ready.set()
            await self._end.wait()
        except Exception as error:  # noqa: BLE001 - start() raises it.
            self._error = error
            self._ready.set()
        finally:
            self.port = 0
            await runner.cleanup()

    def stop(self) -> None:
        """Stops the endpoint; returns when it listens no more."""
        if self._thread is None or self._loop is None or self._end is None:
            return
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(STOP_SECONDS)
