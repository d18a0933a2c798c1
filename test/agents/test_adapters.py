"""Environments of other libraries, as agents: their tools, turns and scores.

Each runs with its own package, in an environment of its own, against a gateway.
"""

from __future__ import annotations

import pytest
from helpers.agent_clients import HELLO, ROME, Program, check_rows, job_of
from helpers.scripted_server import Reply

ADAPTERS = {
    "inspect": Program(
        file="inspect_agent.py", environment="inspect_adapter", errors={}
    ),
}
LOOK = Reply(reasoning="They want to know.", text="I look.", calls=[ROME])
RIGHT, WRONG = Reply(text="It is 21 degrees."), Reply(text="It is 9 degrees.")
SESSIONS = 8
SECONDS = 300.0
"""For a job, the imports before the first one included."""


@pytest.fixture
def client(request, running_of):
    return running_of(ADAPTERS[request.param])


each_adapter = pytest.mark.parametrize("client", ADAPTERS, indirect=True)


@each_adapter
@pytest.mark.parametrize(("last", "reward"), [(RIGHT, 1.0), (WRONG, 0.0)])
def test_tools_and_a_score(client, serve, last, reward):
    with serve([LOOK, last]) as (server, gateway):
        session = gateway.session()
        report = client.run(job_of(session, [HELLO], timeout=60.0), SECONDS)
        assert report["error"] is None, client.log()
        assert report["answer"] == reward
        gateway.set_reward(session, report["answer"])
        rows = gateway.to_tensordict([session])
        assert len(rows) == 1
        check_rows(rows, server.generated, reward)
        told = session.turns[-1].prompt.messages[-1]
        assert (told["role"], told["content"]) == ("tool", "It is 21 degrees in Rome.")


@each_adapter
def test_each_of_many_has_its_own_session(client, serve):
    with serve([RIGHT] * SESSIONS) as (server, gateway):
        sessions = [gateway.session() for _ in range(SESSIONS)]
        reports = client.run(
            [job_of(session, [HELLO], timeout=60.0) for session in sessions], SECONDS
        )
        assert [report["answer"] for report in reports] == [1.0] * SESSIONS, reports
        assert [len(session.turns) for session in sessions] == [1] * SESSIONS
        assert server.script == []


@each_adapter
def test_an_error_is_one_and_the_next_one_runs(client, serve):
    with serve([LOOK, RIGHT, RIGHT], max_turns=1) as (_, gateway):
        report = client.run(job_of(gateway.session(), [HELLO], timeout=60.0), SECONDS)
        assert "max_turns=1" in report["message"], client.log()
        report = client.run(job_of(gateway.session(), [HELLO], timeout=60.0), SECONDS)
        assert report["answer"] == 1.0
