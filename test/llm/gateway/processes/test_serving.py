"""What clients and users see of a gateway with two processes: what one process shows.

One pair of processes serves all tests of this file, in front of a server that computes
nothing. ``test_exact.py`` has the same for tokens, log-probs and versions.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import cloudpickle
import openai
import pytest
import requests
from helpers.collecting import wait_until
from helpers.fake_server import FakeServer
from yarl import URL

from torchrl_sglang import AsyncSGLang, Gateway
from torchrl_sglang.errors import ConfigurationError, GatewayError
from torchrl_sglang.gateway.dialects.base import Failure
from torchrl_sglang.gateway.dialects.openai import Completions
from torchrl_sglang.gateway.dialects.registry import DIALECTS
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.store import to_row

HELLO = [{"role": "user", "content": "hello"}]
ADD = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": ADD}]
TURNS = 6


class Ours(Completions):
    """A dialect of this file, whose errors are marked."""

    def error(self, failure: Failure) -> dict[str, Any]:
        """Returns OpenAI's error with a mark."""
        return {**super().error(failure), "ours": True}


@dataclass(frozen=True, kw_only=True)
class Served:
    """A gateway and what is behind it."""

    fake: FakeServer
    engine: AsyncSGLang
    gateway: Gateway
    path: Path


def make_options(path: Path) -> dict[str, Any]:
    return {
        # A function of this file cannot be sent, and need not be.
        "trained": lambda turn: turn.model != "untrained",
        "dialects": [Ours(), *DIALECTS[1:]],
        "max_turns": TURNS,
        "discount": 0.5,
        "path": path,
    }


@pytest.fixture(scope="module")
def served(
    tiny_model_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("processes") / "s"
    # Other processes cannot import a module of pytest's; a script's classes travel so.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with FakeServer(tiny_model_path) as fake, AsyncSGLang.connect(fake.url) as engine:
        with Gateway(engine, **make_options(path)) as gateway:
            # Read back, and given to a process with its turn.
            session = gateway.session("earlier")
            assert post(session).status_code == 200
        options = {**make_options(path), "num_processes": 2}
        with Gateway(engine, **options) as gateway:
            yield Served(fake=fake, engine=engine, gateway=gateway, path=path)


@pytest.fixture
def gateway(served: Served) -> Gateway:
    return served.gateway


def post(
    session: Session,
    path: str = "/v1/chat/completions",
    *,
    base: str = "",
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    **body: Any,
) -> requests.Response:
    bearer = {"Authorization": f"Bearer {session.key if key is None else key}"}
    given = {"model": "m", "max_tokens": 4, "messages": HELLO, **body}
    return requests.post(
        (base or session.url) + path,
        json=given,
        headers={**bearer, **(headers or {})},
        timeout=60,
    )


def port(url: str) -> int | None:
    return URL(url).port


def going_on(answer: requests.Response, *before: Any) -> list[Any]:
    said = answer.json()["choices"][0]["message"]
    return [*(before or HELLO), said, {"role": "user", "content": "more"}]


def test_sessions_are_spread_and_stay(gateway: Gateway) -> None:
    sessions = [gateway.session() for _ in range(4)]
    ports = [port(session.url) for session in sessions]
    assert len(set(ports)) == 2
    assert port(gateway.url) not in ports
    assert sorted(map(ports.count, set(ports))) in ([2, 2], [1, 3])
    for session in sessions:
        assert gateway.session(session.name) is session
        assert port(session.base_url) == ports[sessions.index(session)]
        # Given once, however often it is told where it is.
        url = session.url
        gateway._set_up_all([session])
        assert session.url == url
        gateway.drop(session)


def talk(gateway: Gateway) -> list[Session]:
    """Returns sessions in which clients of three dialects have done various things."""
    chat, other = gateway.session(), gateway.session()
    first = post(chat)
    said = going_on(first)
    post(chat, messages=said, tools=TOOLS, logprobs=True, top_logprobs=2)
    post(chat, messages=said, n=2, metadata={"a": "b"}, user="u")
    post(chat, messages=HELLO, model="untrained")
    client = openai.OpenAI(base_url=other.base_url, api_key=other.key, max_retries=0)
    stream = client.chat.completions.create(
        model="m", messages=HELLO, max_tokens=9, stream=True
    )
    list(stream)
    client.completions.create(model="m", prompt="once", max_tokens=5)
    answered = client.responses.create(model="m", input="hi", max_output_tokens=3)
    client.responses.create(
        model="m",
        input="and",
        previous_response_id=answered.id,
        max_output_tokens=3,
        include=["message.output_text.logprobs"],
    )
    assert client.responses.retrieve(answered.id).output_text == answered.output_text
    client.responses.delete(answered.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answered.id)
    claude = anthropic.Anthropic(base_url=other.url, api_key=other.key, max_retries=0)
    claude.messages.create(model="m", max_tokens=3, messages=HELLO, system="Be kind.")
    assert claude.messages.count_tokens(model="m", messages=HELLO).input_tokens > 3
    gateway.set_reward(chat, 1.0, turn=0)
    gateway.set_reward(chat, 0.25, agent="untrained")
    gateway.set_reward(other, -1.0)
    return [chat, other]


def recorded(session: Session) -> list[Any]:
    """Returns what is recorded, without times and random names."""
    found: list[Any] = []
    for turn in session.turns:
        number, content, *values = to_row(turn)
        known = json.loads(content)
        for name in (
            "created",
            "request_id",
            "name",
            *("answer_name", "request_digest"),
        ):
            known.pop(name, None)
        # Whether an answer shares them with the one before is a matter of the second.
        about = {*known.pop("about", ()), *known.pop("about_shared", ())}
        known["told"] = sorted(about - {"created_at"})
        known |= {"number": number, "tools": list(turn.tools), "values": values}
        found.append(known)
    for path in session.trajectories():
        parts = (path.token_ids, path.messages, path.trained, path.rewards)
        found.append([*parts, path.returns])
    return found


def test_all_is_recorded_as_by_one_process(served: Served, tmp_path: Path) -> None:
    before = served.gateway.stats()
    found = talk(served.gateway)
    after = served.gateway.stats()
    with Gateway(served.engine, **make_options(tmp_path / "s")) as alone:
        expected = talk(alone)
        counts = alone.stats()
    for one, other in zip(found, expected, strict=True):
        for known, wanted in zip(recorded(one), recorded(other), strict=True):
            assert known == wanted
    for name in ("turns", "tokens"):
        assert after[name] - before[name] == counts[name]
    new = {
        reason: count - before["branches"].get(reason, 0)
        for reason, count in after["branches"].items()
    }
    assert {reason: count for reason, count in new.items() if count} == counts[
        "branches"
    ]
    assert after["generating"] == 0
    rows = served.gateway.to_tensordict(found)
    assert rows.shape == alone.to_tensordict(expected).shape


def test_turns_are_the_owners_and_in_the_file_before_they_are_answered(
    served: Served,
) -> None:
    session = served.gateway.session()
    said = HELLO
    for number in range(3):
        answer = post(session, messages=said)
        assert [turn.number for turn in session.turns] == list(range(number + 1))
        said = going_on(answer, *said)
        # The gateway has the file for itself: its own connection looks.
        store = served.gateway._store
        count = store._writer.submit(
            store._file.execute(
                "select count(*) from turns where session = ?", (session.key,)
            ).fetchone
        ).result()
        assert count == (number + 1,)


def test_a_session_of_the_file_goes_on(gateway: Gateway) -> None:
    session = gateway.find(name="earlier")
    (first,) = session.turns
    said = [*HELLO, first.reply, {"role": "user", "content": "more"}]
    assert post(session, messages=said).status_code == 200
    assert session.turns[1].prompt.origin is first


def test_the_gateways_own_address_hands_requests_on(gateway: Gateway) -> None:
    session = gateway.session()
    other = next(
        each
        for each in iter(gateway.session, None)
        if port(each.url) != port(session.url)
    )
    elsewhere = other.url.partition("/sessions")[0]
    for count, base in enumerate((gateway.url, elsewhere), 1):
        # Only its key names the session.
        assert post(session, base=base).status_code == 200
        assert len(session.turns) == count
    path = f"{gateway.url}/sessions/{session.name}"
    client = openai.OpenAI(base_url=f"{path}/v1", api_key=session.key, max_retries=0)
    stream = client.chat.completions.create(
        model="m", messages=HELLO, max_tokens=4, stream=True
    )
    assert "".join(each.choices[0].delta.content or "" for each in stream)
    assert len(session.turns) == 3
    assert client.models.list().data[0].id == gateway.models[0]
    refused = post(session, base=path, messages="none")
    assert (refused.status_code, refused.json()["ours"]) == (400, True)
    # Other keys, and other people's, open what they open in one process.
    assert post(session, key=other.key).status_code == 403
    assert post(session, base=elsewhere, key="sk-none").status_code == 401
    assert post(session, base=path, key=gateway.api_key).status_code == 200
    new = f"{elsewhere}/sessions/made-by-asking"
    assert post(session, base=new, key=gateway.api_key).status_code == 200
    assert len(gateway.find(name="made-by-asking").turns) == 1
    assert post(session, base=f"{elsewhere}/sessions/none", key="").status_code == 404
    missing = requests.get(f"{elsewhere}/nothing", timeout=60)
    assert missing.status_code == 404
    assert "POST /sessions" in missing.json()["error"]["message"]
    foreign = post(session, key="", headers={"Origin": "http://evil.example.org"})
    assert foreign.status_code == 403


def test_sessions_are_made_rewarded_shown_and_dropped_over_http(
    gateway: Gateway,
) -> None:
    own = {"Authorization": f"Bearer {gateway.api_key}"}
    bases = [gateway.url, gateway.session("any").url.partition("/sessions")[0]]
    for number, base in enumerate(bases):
        name = f"over-http-{number}"
        made = requests.post(
            f"{base}/sessions", json={"name": name}, headers=own, timeout=60
        ).json()
        session = gateway.find(name=name)
        assert made["url"] == session.url
        bearer = {"Authorization": f"Bearer {made['key']}"}
        assert post(session).status_code == 200
        reward = {"reward": 2.0, "turn": 0}
        requests.post(
            f"{made['url']}/reward", json=reward, headers=bearer, timeout=60
        ).raise_for_status()
        assert session.turns[0].reward == 2.0
        for place in (made["url"], f"{gateway.url}/sessions/{name}"):
            shown = requests.get(place, headers=bearer, timeout=60).json()
            assert shown["trajectories"][0]["reward"] == 2.0
        gone = requests.delete(made["url"], headers=bearer, timeout=60)
        assert gone.status_code == 200
        assert post(session).status_code == 410
        assert session.is_dropped
        with pytest.raises(GatewayError, match="was dropped"):
            gateway.find(name=name)
        # Its name is another session's now, which the old key does not open.
        again = gateway.session(name)
        assert post(again, key=session.key).status_code == 410
        assert post(again).status_code == 200
    assert requests.get(f"{bases[1]}/health", timeout=60).json() == {"status": "ok"}


def test_turns_of_clients_that_hang_up_are_not_kept(served: Served) -> None:
    gateway, fake = served.gateway, served.fake
    session = gateway.session()
    count = len(fake.payloads())
    with fake.misbehaving("hang"):
        for base in (session.url, f"{gateway.url}/sessions/{session.name}"):
            aborted = len(fake.payloads("/abort_request"))
            with pytest.raises(requests.Timeout):
                requests.post(
                    f"{base}/v1/chat/completions",
                    json={"model": "m", "messages": HELLO},
                    timeout=0.5,
                )
            count += 1
            fake.wait_for("/generate", count)
            wait_until(lambda: gateway.stats()["generating"] == 0)
            fake.wait_for("/abort_request", aborted + 1)
        fake.recover()
    assert not session.turns
    assert post(session).status_code == 200


def test_a_repeated_request_gets_its_answer_once(gateway: Gateway) -> None:
    session = gateway.session()
    named = {"Idempotency-Key": "once"}
    answers = [post(session, headers=named).json() for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert len(session.turns) == 1


def test_limits_hold(gateway: Gateway) -> None:
    session = gateway.session()
    for _ in range(TURNS):
        assert post(session).status_code == 200
    refused = post(session)
    assert refused.status_code == 403
    assert f"max_turns={TURNS}" in refused.json()["error"]["message"]
    assert len(session.turns) == TURNS


def test_a_session_that_is_dropped_takes_no_turn_that_is_generated(
    served: Served,
) -> None:
    session = served.gateway.session()
    count = len(served.fake.payloads())
    with served.fake.misbehaving("hang"), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, session)
        served.fake.wait_for("/generate", count + 1)
        served.gateway.drop(session)
        served.fake.recover()
        assert asked.result().status_code in (410, 503)
    assert not session.turns


def test_errors_of_the_engine_keep_their_status(served: Served) -> None:
    session = served.gateway.session()
    with served.fake.misbehaving("error_500"):
        assert post(session).status_code == 503
    refused = post(session, max_tokens=5, temperature="hot")
    assert (refused.status_code, refused.json()["ours"]) == (400, True)
    long = [{"role": "user", "content": "x" * 5_000}]
    too_long = post(session, messages=long)
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    with pytest.raises(ConfigurationError, match="agent='none'"):
        served.gateway.set_reward(session, 1.0, agent="none")


def test_a_file_that_cannot_be_written(served: Served) -> None:
    """SQLite says that the disk is full."""
    gateway = served.gateway
    session, store = gateway.session(), gateway._store
    large = [{"role": "user", "content": "x" * 1_500}]

    def limit(pages: int) -> None:
        store._writer.submit(
            store._file.execute, f"pragma max_page_count = {pages}"
        ).result()

    limit(1)
    try:
        while (refused := post(session, messages=large)).status_code == 200:
            # There were free pages.
            session = gateway.session()
        assert refused.status_code == 503
        assert "cannot be written" in refused.json()["error"]["message"]
        count = len(served.fake.payloads())
        assert gateway.stats()["generating"] == 0
    finally:
        limit(1 << 30)
    assert not session.turns
    assert post(session, messages=large).status_code == 200
    assert len(served.fake.payloads()) == count + 1
    assert len(session.turns) == 1


def test_many_at_once(gateway: Gateway) -> None:
    sessions = [gateway.session() for _ in range(24)]

    def run(session: Session) -> None:
        said = HELLO
        for _ in range(3):
            said = going_on(post(session, messages=said), *said)

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(run, sessions))
    for session in sessions:
        assert len(session.turns) == 3
        assert len(session.trajectories()) == 1


def test_agents_run_in_sessions_of_all_processes(gateway: Gateway) -> None:
    async def agent(task: str, *, base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(
            base_url=base_url, api_key=api_key, max_retries=0
        ) as client:
            said = [{"role": "user", "content": task}]
            await client.chat.completions.create(model="m", messages=said, max_tokens=3)
        return float(len(task))

    groups = asyncio.run(gateway.run_agents(agent, ["a", "bb"], group_size=3))
    assert [[each.reward for each in group] for group in groups] == [
        [1.0] * 3,
        [2.0] * 3,
    ]
    sessions = [each for group in groups for each in group]
    assert len({port(each.url) for each in sessions}) == 2
    rows = gateway.to_tensordict(sessions)
    assert rows["next", "reward"].flatten().tolist() == [1.0] * 3 + [2.0] * 3


def test_metrics_are_the_owners(gateway: Gateway) -> None:
    base = gateway.session().url.partition("/sessions")[0]
    found = requests.get(f"{base}/metrics", timeout=60)
    assert found.status_code == 200
    assert f"sessions {len(gateway.sessions)}" in found.text


def test_a_compressed_request_is_handed_on(gateway: Gateway) -> None:
    session = gateway.session()

    async def ask() -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession(auto_decompress=True) as client,
            client.post(
                f"{gateway.url}/sessions/{session.name}/v1/chat/completions",
                json={"model": "m", "messages": HELLO, "max_tokens": 4},
                headers={"Accept-Encoding": "gzip"},
                compress="gzip",
            ) as answer,
        ):
            return answer.status, await answer.json()

    status, content = asyncio.run(ask())
    assert status == 200
    assert content["usage"]["completion_tokens"] == 4
