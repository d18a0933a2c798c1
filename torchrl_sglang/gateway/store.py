"""Sessions in an SQLite file, to survive the gateway."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import sqlite3
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from torchrl_sglang.chat.declarations import known_settings
from torchrl_sglang.chat.pieces import shared_ids
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.errors import ConfigurationError, GatewayError
from torchrl_sglang.gateway.branches import Branch
from torchrl_sglang.gateway.session import RewardTarget, Session
from torchrl_sglang.gateway.turns import Prompt, Turn
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.private_files import for_owner
from torchrl_sglang.types import Completion, TokenLayout, TokenValues, VersionSpan

FORMAT = 3
"""Version of the tables below, to increase with each change."""

APPLICATION = 0x54524C47
"""Marker of these files."""

# A session is identified by its key: after a drop(), its name may be reused.
_TABLES = """
create table sessions (
    key text primary key, name text, team text, reward real, created real
);
create table turns (
    session text, number integer, content text, reward real,
    prompt_ids blob, token_ids blob, log_probs blob,
    primary key (session, number)
);
create table rewards (
    session text, kind text, name text, reward real,
    primary key (session, kind, name)
);
"""

_TOKENS, _VALUES = "q", "d"
"""Types of arrays: 64-bit integers and floats."""

_BLOBS = ("token_ids", "log_probs")
_Change: TypeAlias = Sequence[tuple[str, tuple[Any, ...]]]
"""Statements of a transaction, with their values."""

_REQUEST = (
    *("model", "user", "metadata", "request_id"),
    *("answer_name", "request_digest"),
)
"""Fields of a turn's request, beside the prompt."""

_COLUMNS = ("columns", "prompt_columns")
_COMPLETION = [
    field.name for field in fields(Completion) if field.name not in (*_BLOBS, *_COLUMNS)
]


class Store:
    """Writes growing sessions to a file, and reads them back.

    A thread writes, in the order of the calls. Changes with a disk error are kept and
    written first when it recovers, except turns: no client has seen an unwritten turn.
    A turn is stored as its difference to its parent. A file belongs to a single gateway
    at a time.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path).expanduser()
        self._path = str(path)
        with self._as_configuration_errors():
            open(path, "ab", opener=for_owner).close()
            self._file = sqlite3.connect(path, check_same_thread=False, timeout=0)
            try:
                self._open()
            except BaseException:
                self._file.close()
                raise
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="gateway-store")
        self._left: deque[_Change] = deque()
        self._error: Exception | None = None

    def _open(self) -> None:
        # The lock ends with the process.
        self._file.execute("pragma locking_mode = exclusive")
        self._file.execute("pragma journal_mode = wal")
        # A crash of the machine may lose the last turns, never the file.
        self._file.execute("pragma synchronous = normal")
        with self._file:
            self._file.execute("begin exclusive")
            versions = [
                self._file.execute(f"pragma {name}").fetchone()[0]
                for name in ("application_id", "user_version")
            ]
            # A cursor in the frames of an error keeps the file locked.
            count = self._file.execute("select count(*) from sqlite_master")
            ((tables,),) = count.fetchall()
            if versions == [0, 0] and not tables:
                for statement in filter(str.strip, _TABLES.split(";")):
                    self._file.execute(statement)
                self._file.execute(f"pragma application_id = {APPLICATION}")
                self._file.execute(f"pragma user_version = {FORMAT}")
            elif versions[0] != APPLICATION:
                raise sqlite3.DatabaseError("it is a database of something else")
            elif versions[1] != FORMAT:
                raise sqlite3.DatabaseError(
                    f"its format is version {versions[1]}, and this version of the "
                    f"package reads {FORMAT}; give another path"
                )

    @contextlib.contextmanager
    def _as_configuration_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error, LookupError, TypeError, ValueError) as error:
            reason = str(error)
            if "locked" in reason:
                reason = "another gateway has it open; shut that down"
            raise ConfigurationError(
                f"{self._path!r} cannot be used as a file of sessions: {reason}."
            ) from error

    def close(self) -> None:
        """Writes pending changes, and closes the file. Safe to call twice."""
        with contextlib.suppress(RuntimeError):  # The file has been closed.
            self._writer.submit(self._flush)
        self._writer.shutdown()
        self._file.close()
        if self._left:
            torchrl_logger.error(
                f"{len(self._left)} changes are not in the file of sessions "
                f"{self._path!r}, which could not be written: {self._error}."
            )

    @property
    def has_failed(self) -> bool:
        """Whether the latest change could not be written."""
        return self._error is not None

    def check(self) -> None:
        """Checks that the file can be written."""
        if self._error is not None:
            self._writer.submit(self._flush).result()
            self._raise()

    async def written(self) -> None:
        """Waits until all changes are in the file."""
        await asyncio.wrap_future(self._writer.submit(self._flush))
        self._raise()

    def save_session(self, session: Session) -> None:
        """Writes a session without its turns, soon."""
        about = (session.name, session.group, session.reward, session.created)
        statement = "insert or replace into sessions values (?, ?, ?, ?, ?)"
        self._change((statement, (session.key, *about)))

    def save_reward(
        self, session: Session, target: RewardTarget, reward: float
    ) -> None:
        """Writes the reward of a session or of a part of it, soon."""
        key = session.key
        if target.kind == "session":
            statement = "update sessions set reward = ? where key = ?"
            self._change((statement, (reward, key)))
        elif target.kind == "turn":
            statement = "update turns set reward = ? where session = ? and number = ?"
            self._change((statement, (reward, key, int(target.name))))
        else:
            # Only for an existing session: otherwise the row would remain.
            statement = (
                "insert or replace into rewards select ?, ?, ?, ? "
                "where exists (select 1 from sessions where key = ?)"
            )
            self._change((statement, (key, *target, reward, key)))

    def delete(self, session: Session) -> None:
        """Removes a session, soon."""
        key = (session.key,)
        self._change(
            ("delete from turns where session = ?", key),
            ("delete from rewards where session = ?", key),
            ("delete from sessions where key = ?", key),
        )

    def delete_turns(self, session: Session, turns: Sequence[Turn]) -> None:
        """Removes turns, soon."""
        statement = "delete from turns where session = ? and number = ?"
        self._change(*((statement, (session.key, turn.number)) for turn in turns))

    async def save_turns(self, session: Session, turns: Sequence[Turn]) -> None:
        """Waits until turns are in the file, unless their session is deleted.

        A cancelled call may still write them.

        If that fails, none of them is in it.
        """
        try:
            write = self._writer.submit(self._write_turns, session, turns)
            await asyncio.wrap_future(write)
        except sqlite3.OperationalError as error:
            self._raise(error)

    def _change(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        def write() -> None:
            self._left.append(statements)
            self._flush()

        self._writer.submit(write)

    def _raise(self, error: Exception | None = None) -> None:
        error = error or self._error
        if error is not None:
            raise GatewayError(
                f"The file of sessions {self._path!r} cannot be written: {error}. It "
                f"is tried again with the next request.",
                status=503,
            ) from error

    def _write_turns(self, session: Session, turns: Sequence[Turn]) -> None:
        statement = (
            "insert or replace into turns select ?, ?, ?, ?, ?, ?, ? "
            "where exists (select 1 from sessions where key = ?)"
        )
        self._flush()
        if self._left and self._error is not None:
            raise self._error
        rows = [(session.key, *to_row(turn), session.key) for turn in turns]
        self._execute([(statement, row) for row in rows])

    def _flush(self) -> None:
        """Writes pending changes, up to the first failure."""
        if self._error is not None and not self._left:
            # Tests whether the file is writable again.
            self._left.append([(f"pragma user_version = {FORMAT}", ())])
        while self._left:
            try:
                self._execute(self._left[0])
            except sqlite3.OperationalError:
                return
            except Exception:  # noqa: BLE001 - It would fail again each time.
                torchrl_logger.exception("A change of a session cannot be kept.")
            self._left.popleft()

    def _execute(self, change: _Change) -> None:
        """Makes a change in a transaction."""
        try:
            with self._file:
                for statement, row in change:
                    self._file.execute(statement, row)
        except sqlite3.OperationalError as error:
            if self._error is None:
                torchrl_logger.warning(
                    f"The file of sessions {self._path!r} cannot be written: {error}. "
                    f"Clients are answered 503 until it can be."
                )
            self._error = error
            raise
        self._error = None

    def load(self) -> list[Session]:
        """Returns the sessions of the file, oldest first."""
        try:
            return self._load()
        except ConfigurationError:
            self.close()
            raise

    def _load(self) -> list[Session]:
        with self._as_configuration_errors():
            sessions = {}
            rows = self._file.execute("select * from sessions order by created, rowid")
            for key, name, group, reward, created in rows:
                session = sessions[key] = Session(name, key=key, group=group)
                session.reward = reward
                session.began(created)
            rows = self._file.execute("select * from turns order by session, number")
            for key, number, *row in rows:
                session = sessions[key]
                session.add(from_row((number, *row), session.turn))
            rows = self._file.execute("select * from rewards order by rowid")
            for key, kind, name, reward in rows:
                if kind == "agent":
                    sessions[key].agent_rewards[name] = reward
                elif kind == "metric":
                    sessions[key].metrics[name] = reward
                else:
                    sessions[key].branch_rewards[int(name)] = reward
            return list(sessions.values())


TurnRow: TypeAlias = tuple[int, str, float | None, bytes, bytes, bytes | None]
"""A turn, relative to its parent: number, JSON, reward, and arrays of prompt tokens,
response tokens and log-probs."""


def to_row(turn: Turn) -> TurnRow:
    """Returns a turn in its stored form."""
    prompt, done = turn.prompt, turn.completion
    origin = prompt.origin
    shared = origin is not None and origin.prompt.setting is prompt.setting
    content = {
        "messages": list(prompt.new_messages),
        "setting": None if shared else _settings(prompt.setting),
        "prompt_text": prompt.new_text,
        "parent": prompt.parent,
        "said": prompt.said,
        "branch": None if prompt.branch is None else _as_dict(prompt.branch),
        "completion": {name: getattr(done, name) for name in _COMPLETION},
        **{
            kind: [_from_values(values) for values in getattr(done, kind).values()]
            for kind in _COLUMNS
            if getattr(done, kind)
        },
        "text": turn.text,
        "reply": turn.reply,
        "ended": turn.ended,
        "created": turn.created,
        **{name: getattr(turn, name) for name in _REQUEST},
        **_answer(turn),
    }
    return (
        turn.number,
        json.dumps(content, default=_as_dict),
        turn.reward,
        array(_TOKENS, prompt.new_token_ids).tobytes(),
        array(_TOKENS, done.token_ids).tobytes(),
        None if done.log_probs is None else array(_VALUES, done.log_probs).tobytes(),
    )


def _answer(turn: Turn) -> dict[str, Any]:
    """Returns the name of an answer, and its fields other than its parent's."""
    if not turn.about:
        return {}
    inherited = {} if turn.prompt.origin is None else turn.prompt.origin.about
    shared = [key for key, value in turn.about.items() if inherited.get(key) is value]
    changed = {key: value for key, value in turn.about.items() if key not in shared}
    return {"name": turn.name, "about": changed, "about_shared": shared}


def _about(known: Mapping[str, Any], origin: Turn | None) -> dict[str, Any]:
    inherited = {} if origin is None else origin.about
    shared = {key: inherited[key] for key in known.get("about_shared", ())}
    return {**shared, **known.get("about", {})}


def _as_dict(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _settings(setting: PromptSettings) -> dict[str, Any]:
    return {"tools": setting.tools, "template_kwargs": setting.template_kwargs}


def from_row(row: TurnRow, find: Callable[[int], Turn]) -> Turn:
    """Returns a turn from its stored form."""
    number, content, reward, prompt_ids, token_ids, log_probs = row
    record = json.loads(content)
    origin = None if record["parent"] is None else find(record["parent"])
    stored_setting = record["setting"]
    if stored_setting is None and origin is not None:
        setting = origin.prompt.setting
    else:
        setting = known_settings(PromptSettings(**stored_setting))
    done = record["completion"]
    done["versions"] = tuple(VersionSpan(**span) for span in done["versions"])
    values = None if log_probs is None else _from_blob(_VALUES, log_probs)
    return Turn(
        number=number,
        prompt=Prompt(
            setting=setting,
            new_messages=record["messages"],
            new_token_ids=_from_blob(_TOKENS, prompt_ids),
            new_text=record["prompt_text"],
            origin=origin,
            said=record.get("said"),
            branch=Branch(**record["branch"]) if record.get("branch") else None,
        ),
        completion=Completion(
            token_ids=list(shared_ids(_from_blob(_TOKENS, token_ids))),
            log_probs=values,
            columns=_to_columns(record.get("columns", ())),
            prompt_columns=_to_columns(record.get("prompt_columns", ())),
            **done,
        ),
        text=record["text"],
        reply=record["reply"],
        ended=record["ended"],
        reward=reward,
        created=record["created"],
        # Files of earlier versions of the package lack these fields.
        **{name: record[name] for name in _REQUEST if name in record},
        name=record.get("name", ""),
        about=_about(record, origin),
    )


def _from_values(values: TokenValues) -> dict[str, Any]:
    arrays = {"values": values.values, "counts": values.counts}
    return {
        "layout": _as_dict(values.layout),
        **{
            name: base64.b64encode(array.tobytes()).decode()
            for name, array in arrays.items()
            if array is not None
        },
    }


def _to_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, TokenValues]:
    columns = {}
    for row in rows:
        shape = row["layout"]["shape"]
        layout = TokenLayout(
            **row["layout"] | {"shape": None if shape is None else tuple(shape)}
        )
        flat = np.frombuffer(base64.b64decode(row["values"]), dtype=layout.dtype)
        counts = None
        if "counts" in row:
            counts = np.frombuffer(base64.b64decode(row["counts"]), dtype=np.int64)
        columns[layout.name] = TokenValues(
            layout=layout,
            values=flat if shape is None else flat.reshape(-1, *shape),
            counts=counts,
        )
    return columns


def _from_blob(kind: str, content: bytes) -> list[Any]:
    numbers = array(kind)
    numbers.frombytes(content)
    return numbers.tolist()
