"""``Gateway``: an endpoint for agents that records their tokens."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tensordict import LazyStackedTensorDict, TensorDictBase

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.errors import ConfigurationError, GatewayError
from torchrl_sglang.gateway.agent_groups import AgentGroups
from torchrl_sglang.gateway.agents import Agent, run_agents
from torchrl_sglang.gateway.connections import ClientTimeouts
from torchrl_sglang.gateway.credit import check_discount, trained_rule
from torchrl_sglang.gateway.dialects.base import Dialect
from torchrl_sglang.gateway.dialects.registry import DIALECTS
from torchrl_sglang.gateway.export import to_rows
from torchrl_sglang.gateway.options import (
    SessionLimits,
    check_dialects,
    check_params,
)
from torchrl_sglang.gateway.policy import Policy
from torchrl_sglang.gateway.reading import RequestReader, ToolChoiceMode
from torchrl_sglang.gateway.recorded import publish_session
from torchrl_sglang.gateway.responder import Responder, prompt_threads
from torchrl_sglang.gateway.routes.app import make_app
from torchrl_sglang.gateway.runner import Runner
from torchrl_sglang.gateway.session import RewardTarget, Session
from torchrl_sglang.gateway.store import Store
from torchrl_sglang.gateway.tool_grammar import GRAMMARS
from torchrl_sglang.gateway.turns import Turn
from torchrl_sglang.observer import Publisher, Subscriber, check_recorder
from torchrl_sglang.policies.dataset import batch_to_dataset
from torchrl_sglang.requests.request import check_logprobs_mode
from torchrl_sglang.requests.token_columns import (
    TokenColumn,
    columns_of_mode,
    find_columns,
)
from torchrl_sglang.support.checks import (
    as_reward,
    check_count,
    check_flag,
    check_port,
    check_seconds,
)
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.support.passwords import hide_passwords
from torchrl_sglang.support.texts import half_character
from torchrl_sglang.support.urls import check_public_url, is_loopback
from torchrl_sglang.telemetry.prometheus import StatsFamilies, write_text
from torchrl_sglang.types import LogProbsMode

_NAME = re.compile(r"[A-Za-z0-9._-]{0,127}[A-Za-z0-9_-]")
"""Names that stand in a URL as they are: ``..`` is another folder to clients."""


class Gateway(Responder):
    """Serves OpenAI's and Anthropic's protocols, and records every token.

    An agent's client gets a session's ``base_url`` (OpenAI) or ``url`` (Anthropic) and
    its ``key``. Later the session is read as TensorDicts with the tokens, log-probs and
    weight versions of the engine.

    A turn that continues an earlier turn of its session begins with that turn's tokens;
    only the new messages are tokenized. If the chat template now renders the earlier
    turns differently, or the client has edited them, the turn begins a branch.

    Streams have reasoning and content as they are generated, and tool calls at the end.
    The record is the same with and without a stream.

    Args:
        engine: generates.

    Keyword Args:
        tokenizer: defaults to the engine's.
        chat_template: a Jinja template. Defaults to the tokenizer's.
        tool_call_parser: SGLang's name of the model's format of tool calls, such as
            ``"qwen25"``. Defaults to None: tool calls stay text.
        reasoning_parser: the same for reasoning, such as ``"qwen3"``. Defaults to None.
        host: address to listen on. Defaults to ``"127.0.0.1"``, where the path of a
            session is sufficient for programs of this machine, not for web pages of
            other hosts; on any other address each request needs a key, and the gateway
            ``api_key``.
        port: defaults to 0, a free port.
        public_url: address of this gateway for agents on other machines and in
            containers, such as a TLS proxy's: ``"https://gateway.example.org/path"``.
            URLs of sessions begin with it, each request needs a key, and the gateway
            ``api_key``. Defaults to None: the address that it listens on.
        api_key: opens all sessions, and makes new ones over HTTP. Defaults to a random
            key.
        key_seconds: validity of a session's key, in seconds since the session's start.
            Later requests are answered 401 with the code ``"key_expired"``; the record
            stays readable with ``api_key``. Defaults to None, no limit.
        default_sampling_params: for requests without these, under SGLang's names.
            Defaults to temperature 1, without top-p or top-k.
        forced_sampling_params: for all requests, instead of theirs. Defaults to none.
        request_timeout: of a response, in seconds. Defaults to 600.
        keep_alive_seconds: interval of keep-alive events in a stream without content.
            Defaults to 10.
        max_sessions: most sessions at once. Defaults to 10,000.
        max_turns: most turns of a session. Defaults to 1,000.
        max_tokens: most generated tokens of a session; each of several concurrent
            requests may generate all that are left. Defaults to None, no limit.
        session_seconds: time in which a session takes turns. Defaults to None, no
            limit.
        dialects: protocols of clients, see :class:`.Dialect`. Defaults to OpenAI's
            completions and Responses and Anthropic's messages.
        tool_choice: treatment of a request's choice of tools, or of one call at a time.
            ``"grammar"``: a grammar enforces it, on servers with a grammar backend and
            for known formats of calls. ``"auto"``: the model decides, and the field is
            ignored. Defaults to ``"grammar"``.
        ignored_params: names of clients' fields without effect here, such as
            ``["seed"]``; otherwise an unsupported field is refused. A field without
            effect is logged once, and named in the answer's header
            ``x-torchrl-sglang-ignored``. Defaults to none.
        token_columns: further reported quantities of each token, for records and rows:
            names of :class:`.TokenColumn` rows, or rows. Defaults to none.
        logprobs_mode: recorded log-probs, as for :class:`.SGLangWrapper`. Clients set
            top-p themselves: ``"behaviour"`` records the sampled distribution, and
            needs a ``top_k``, such as ``default_sampling_params={"top_k": 4096}``.
            Defaults to ``"model"``.
        trained: trained turns: a function of a :class:`.Turn` that returns a bool, or a
            regular expression for the whole ``model`` of a request, such as
            ``"(?!.*haiku).*"`` for all but titles. Other turns are recorded; in rows
            they are masked, and a path without a trained turn after them is no row.
            Defaults to None: all turns.
        discount: in [0, 1], of a reward for each turn before its own; see
            :meth:`to_tensordict`. Defaults to 1.
        sessionless: answer requests without a session, too: of these nothing is
            recorded. On ``host="127.0.0.1"`` they need no key, unless ``api_key`` is
            given. Defaults to False.
        path: an SQLite file of the sessions, for one gateway at a time; the sessions in
            it are read. A turn is in it before the client has the answer. While it
            cannot be written, clients are answered 503, and nothing is generated.
            Defaults to None: in memory only.
        recorder: a :class:`.RunRecorder`, which records each session when it is
            dropped, or at the end, for ``torchrl-sglang view``. A collector's recorder
            records the sessions of its agents. Defaults to None.

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
        sessionless: bool = False,
        path: str | Path | None = None,
        recorder: Subscriber | None = None,
    ) -> None:
        if isinstance(engine, (str, os.PathLike)):
            raise ConfigurationError(
                f"engine={hide_passwords(str(engine))!r} is not an engine; give "
                f"AsyncSGLang.connect(URL), or AsyncSGLang.from_pretrained(MODEL)."
            )
        if port:
            check_port("port", port)
        self._host = host
        self.public_url = None if public_url is None else check_public_url(public_url)
        # A proxy of this machine hands in what others ask.
        is_open = is_loopback(host) and public_url is None
        if not is_open and not api_key:
            raise ConfigurationError(
                f"host={host!r} and public_url={public_url!r} can be reached from "
                f"other machines; give an api_key."
            )
        self._max_sessions = check_count("max_sessions", max_sessions)
        self._key_seconds = (
            None if key_seconds is None else check_seconds("key_seconds", key_seconds)
        )
        self.token_columns = columns_of_mode(
            check_logprobs_mode(logprobs_mode), find_columns(token_columns)
        )
        forced_params = check_params("forced_sampling_params", forced_sampling_params)
        tokenizer = engine.get_tokenizer() if tokenizer is None else tokenizer
        template = ChatTemplate(tokenizer, chat_template)
        super().__init__(
            engine,
            template=template,
            policy=Policy(
                engine=engine,
                tokenizer=tokenizer,
                template=template,
                tool_call_parser=tool_call_parser,
                reasoning_parser=reasoning_parser,
                token_columns=self.token_columns,
                logprobs_mode=logprobs_mode,
                timeout=check_seconds("request_timeout", request_timeout),
            ),
            read=RequestReader(
                ignored_params=ignored_params,
                tool_choice=tool_choice,
                variables=template.variables,
                forces_grammar=not GRAMMARS.isdisjoint(forced_params),
            ),
            default_params=check_params(
                "default_sampling_params", default_sampling_params
            ),
            forced_params=forced_params,
            limits=SessionLimits(
                max_turns=max_turns,
                max_tokens=max_tokens,
                session_seconds=session_seconds,
            ),
        )
        self.dialects = check_dialects(dialects)
        self.sessionless = check_flag("sessionless", sessionless)
        self.open = is_open and not (sessionless and api_key)
        self.api_key = api_key or secrets.token_urlsafe(32)
        self.keep_alive_seconds = check_seconds(
            "keep_alive_seconds", keep_alive_seconds
        )
        self._is_trained = trained_rule(trained)
        self._discount = check_discount(discount)
        self._publish = Publisher(check_recorder(recorder))
        self.client_timeouts = ClientTimeouts()
        """Timeouts of clients, which are read when the gateway starts."""
        self._runner = Runner(lambda: make_app(self, self.client_timeouts), host, port)
        self._file_closed = False
        self._families: StatsFamilies | None = None
        self.keeper.store = store = None if path is None else Store(path)
        for session in store.load() if store else ():
            self._set_up(session)
            self._registry.add(session)

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
        return f"Gateway({state}, sessions={len(self._registry)})"

    def start(self) -> None:
        """Listens from now on.

        Raises:
            ConfigurationError: if the address cannot be used, it has been started
                already, or the servers have no parser of that name.
        """
        run_sync(self.policy.check_parsers())
        self._threads.shutdown(wait=False)
        self._threads = prompt_threads()
        self._runner.start()
        for session in self.sessions:
            with self._lock:
                self._set_up(session)

    def _set_up(self, session: Session) -> None:
        """Applies the gateway's rules to a session. The caller has the lock."""
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
        self._publish = Publisher()
        if self.keeper.store is not None:
            self.keeper.store.close()
            self.keeper.store = None
            self._file_closed = True

    def _check_file(self) -> None:
        """Raises :class:`GatewayError` if there is a file that takes nothing."""
        if self._file_closed:
            raise GatewayError(
                "The file of sessions was closed by shutdown(), so that this would not "
                "be in it; do it before, or open the file with another gateway."
            )
        if self.keeper.store is not None:
            self.keeper.store.check()

    def session(self, name: str | None = None, *, group: str | None = None) -> Session:
        """Returns a session, a new one where there is none of that name.

        Args:
            name: of letters, digits, ``.``, ``_`` and ``-``, without ``.`` at the end.
                Defaults to a random one.
            group: sessions of a group are compared with each other. Defaults to none.

        Raises:
            ConfigurationError: if ``name`` has other characters, or more than 128, or
                ends with ``.``.
            GatewayError: if there are ``max_sessions``, or the file cannot be written.
        """
        name = secrets.token_hex(16) if name is None else name
        if group is not None and (not isinstance(group, str) or half_character(group)):
            raise ConfigurationError(f"group={group!r} must be a text in Unicode.")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"{name!r} is not a name of a session; give up to 128 letters, digits, "
                f"'.', '_' and '-', without '.' at the end."
            )
        self._check_file()
        with self._lock:
            if (session := self._registry.named(name)) is not None:
                return session
            if len(self._registry) >= self._max_sessions:
                raise GatewayError(
                    f"There are {self._max_sessions} sessions, which is max_sessions; "
                    f"drop() those that are done.",
                    status=429,
                )
            session = Session(name, key=f"sk-{secrets.token_urlsafe(32)}", group=group)
            self._set_up(session)
            self._registry.add(session)
            if self.keeper.store is not None:
                self.keeper.store.save_session(session)
        return session

    @property
    def sessions(self) -> list[Session]:
        """All sessions, in the order in which they began."""
        return self._registry.all()

    def stats(self) -> dict[str, Any]:
        """Returns totals since this gateway was made, dropped sessions included.

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
            counts = self.keeper.counts
            return {
                "sessions": len(self._registry),
                "generating": generating,
                "turns": counts.turns,
                "tokens": counts.tokens,
                "branches": dict(counts.branches),
            }

    def drop(self, session: Session) -> None:
        """Forgets a session, also in the file.

        It takes no turn from then on: requests under way are answered 410, as are later
        ones with its key or its path.
        """
        with self._lock:
            if not self._registry.remove(session):
                return
            if self.keeper.store is not None:
                self.keeper.store.delete(session)
        self._record(session)

    def _record(self, session: Session) -> None:
        """Publishes a session that takes no more turns."""
        if self._publish:
            publish_session(self._publish, session, self._template.tokenizer)

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
        if self.keeper.store is not None:
            self.keeper.store.save_reward(session, target, as_reward(reward))

    def set_metrics(self, session: Session, metrics: Mapping[str, float]) -> None:
        """Sets numbers of a session by name, for the logs of a run.

        They stand in ``("next", "metrics", NAME)`` of its rows. A later number of the
        same name replaces the earlier one.

        Args:
            session: of this gateway.
            metrics: name -> finite number.

        Raises:
            ConfigurationError: if a name is no text, or a number is not finite.
            GatewayError: if the file cannot be written, or was closed.
        """
        self._check_file()
        session.set_metrics(metrics)
        if self.keeper.store is not None:
            for name in metrics:
                target = RewardTarget("metric", name)
                self.keeper.store.save_reward(session, target, session.metrics[name])

    def discard(self, session: Session, agent: str) -> None:
        """Removes the turns of an agent, such as of an attempt that began anew.

        Turns that another agent continues stay.

        Args:
            session: of this gateway.
            agent: the ``model`` that its requests name.

        Raises:
            GatewayError: if the file cannot be written, or was closed.
        """
        self._check_file()
        turns = [turn for turn in session.turns if turn.model == agent]
        # The latest first: a turn with a continuation stays.
        self.keeper.withdraw(session, turns[::-1])
        session.agent_rewards.pop(agent, None)

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
            models = {turn.model for session in chosen for turn in session.turns}
            raise ConfigurationError(
                f"No turn of these sessions is trained by the gateway's rule; their "
                f"requests name the models {', '.join(map(repr, sorted(models)))}."
                if models
                else "No turn was recorded in these sessions."
            )
        return LazyStackedTensorDict(*rows, stack_dim=0)

    def to_dataset(self, sessions: Iterable[Session] | None = None) -> Any:
        """Returns trajectories as a `datasets.Dataset` with TRL's column names.

        Args:
            sessions: defaults to all.

        Returns:
            datasets.Dataset: the rows of :meth:`to_tensordict`, with the columns of
                :func:`.batch_to_dataset`.

        Raises:
            ConfigurationError: if there is no trajectory, or `datasets` is not
                installed.
        """
        return batch_to_dataset(self.to_tensordict(sessions))

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

    def agent_groups(self, agent: Agent, **options: Any) -> AgentGroups:
        """Returns groups of an agent, for a collector; see :class:`.AgentGroups`."""
        return AgentGroups(self, agent, **options)

    async def metrics(self, accept: str) -> tuple[str, bytes]:
        """Returns metrics of this gateway and its engine.

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
