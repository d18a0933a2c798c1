"""Tools of MCP servers, by the official client and server, in a collector."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
import requests
from helpers.agent_clients import CLIENTS, ENVIRONMENTS
from helpers.chat_families import TEMPLATES
from helpers.scripted_server import Reply, ScriptedServer, write_call
from helpers.waiting import wait_until, wait_until_gone

from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    CollectorTimeouts,
    SGLangWrapper,
)
from torchrl_sglang.backends.launch.ports import find_free_port
from torchrl_sglang.collectors.groups.mcp_tools import McpServer
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.trainers.report import flatten

SERVER = str(CLIENTS / "mcp_server.py")
WEATHER = write_call("get_weather", {"city": "Rome"})
ROME = "It is 21 degrees in Rome."


@pytest.fixture(scope="module")
def python():
    """The interpreter with the package, which this process imports, too."""
    folder = ENVIRONMENTS / "mcp"
    if not (folder / "bin/python").exists():
        pytest.skip(f"{folder} is not there; `make test-agents` makes it.")
    (packages,) = folder.glob("lib/python*/site-packages")
    # At the end: what is installed here comes first.
    sys.path.append(str(packages))
    yield str(folder / "bin/python")
    sys.path.remove(str(packages))


@pytest.fixture
def stdio(python, tmp_path):
    """A server that is started, and the file with its process id."""
    file = tmp_path / "pid"
    return McpServer(
        command=[python, SERVER], environment={"PID_FILE": str(file)}
    ), file


@contextmanager
def serving(python, port):
    process = subprocess.Popen([python, SERVER, str(port)])
    try:
        url = f"http://127.0.0.1:{port}/mcp"
        wait_until(lambda: answers(url), seconds=60.0)
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url):
    try:
        return requests.get(url, timeout=5).status_code
    except requests.ConnectionError:
        return False


@pytest.fixture
def collect(model_folder, model_tokenizer):
    """Opens a collector whose model writes replies."""

    @contextmanager
    def collect(replies, tools, **options):
        script = [Reply(text=each) for each in replies]
        kept = []

        def reward(conversation, task):
            kept.append(conversation)
            return 1.0

        template = (TEMPLATES / "qwen3.jinja").read_text()
        with (
            ScriptedServer(model_folder, model_tokenizer, script) as server,
            AsyncSGLang.connect(server.url) as engine,
        ):
            policy = SGLangWrapper(
                engine, chat_template=template, generate_kwargs={"max_new_tokens": 512}
            )
            with AsyncLLMCollector(
                policy=policy,
                prompts=[{"query": "go"}],
                rewards=reward,
                tools=tools,
                groups_per_batch=1,
                total_groups=1,
                **options,
            ) as collector:
                yield collector, kept

    return collect


def results(collector, kept):
    list(collector)
    (conversation,) = kept
    return [m["content"] for m in conversation.messages if m["role"] == "tool"]


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one number.
        b: the other.
    """
    return a + b


def test_over_http_beside_a_function(collect, python):
    calls = [WEATHER, write_call("add", {"a": 1, "b": 2}), "done"]
    with (
        serving(python, find_free_port()) as url,
        collect(calls, [add, url]) as (collector, kept),
    ):
        assert results(collector, kept) == [ROME, "3"]
        prompt = kept[0].turns[0].prompt.text
        assert "Returns the weather of a city." in prompt
        assert '"required": ["city"]' in prompt


def test_by_stdio_with_names_of_a_mapping_until_the_collector_ends(collect, stdio):
    server, file = stdio
    calls = [write_call("rome_get_weather", {"city": "Rome"}), "done"]
    with collect(calls, {"rome": server}) as (collector, kept):
        assert results(collector, kept) == [ROME]
        pid = int(file.read_text())
    wait_until_gone([pid])


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (write_call("get_weather", {"city": "Atlantis"}), "no such city"),
        (write_call("get_weather", {"town": "Rome"}), "city"),
        (write_call("get_snow", {}), "no tool 'get_snow'"),
        (write_call("die", {}), "ToolError"),
        (write_call("hang", {}), "hang took longer than 10 s"),
    ],
    ids=["failure", "arguments", "no tool", "death", "hang"],
)
def test_a_failure_is_told_to_the_model_and_the_next_call_works(
    collect, stdio, call, reason
):
    server, _ = stdio
    timeouts = CollectorTimeouts(step=10.0 if "hang" in call else 60.0)
    with collect([call, WEATHER, "done"], [server], timeouts=timeouts) as opened:
        failure, weather = results(*opened)
    assert failure.startswith("Error: ")
    assert reason in failure
    assert weather == ROME


def test_a_result_that_the_client_refuses_leaves_the_connection(collect, stdio):
    server, _ = stdio
    process = write_call("get_process", {})
    calls = [process, write_call("measure", {}), process, "done"]
    with collect(calls, [server]) as opened:
        first, failure, second = results(*opened)
    assert failure.startswith("Error: ")
    assert "Invalid structured content" in failure
    assert first == second


@contextmanager
def silent():
    """Yields the URL of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/mcp"


def test_a_connection_that_never_begins_has_a_timeout(collect, python, tmp_path):
    file = tmp_path / "pid"
    write_pid = f"echo $$ > {file}; exec sleep 1000"
    with silent() as url:
        for place in ({"url": url}, {"command": ["sh", "-c", write_pid]}):
            server = McpServer(connect_timeout=2.0, **place)
            with (
                pytest.raises(ConfigurationError, match="it does not answer"),
                collect([], [server]),
            ):
                pass
    wait_until_gone([int(file.read_text())])
    with pytest.raises(ConfigurationError, match="connect_timeout"):
        McpServer(url=url, connect_timeout=0)


def test_a_tool_that_the_server_removes_is_an_error(collect, stdio):
    server, _ = stdio
    calls = [write_call("forget", {}), WEATHER, "done"]
    with collect(calls, [server]) as opened:
        _, failure = results(*opened)
    assert failure.startswith("Error: ")
    assert "get_weather" in failure


def test_a_server_that_is_started_again_is_connected_again(collect, python):
    port = find_free_port()
    with serving(python, port) as url:
        opened = collect([WEATHER, "done"], [url])
        collector, kept = opened.__enter__()
    with serving(python, port):
        assert results(collector, kept)[-1] == ROME
        opened.__exit__(None, None, None)


def test_servers_that_cannot_be_used_are_refused(collect, python, stdio):
    server, file = stdio
    url = f"http://127.0.0.1:{find_free_port()}/mcp"
    program, failing = (
        McpServer(command=["no-such-program"]),
        McpServer(command=["false"]),
    )
    for tools, reason in (
        ([url], url),
        ([program], "no-such-program"),
        ([failing], "false"),
        ([server, server], "two of the name 'get_weather'"),
    ):
        with (
            pytest.raises(ConfigurationError, match=reason),
            collect([], tools),
        ):
            pass
    wait_until_gone([int(file.read_text())])


def test_keys_of_a_server_are_in_no_log():
    servers = [
        McpServer(url="http://127.0.0.1/mcp", headers={"Authorization": "secret"}),
        McpServer(command=["server"], environment={"KEY": "secret"}),
    ]
    assert "secret" not in str(flatten({"tools": servers}))
    for arguments in (
        {},
        {"url": "http://a/mcp", "command": ["a"]},
        {"command": "a b"},
    ):
        with pytest.raises(ConfigurationError, match="has a url, or a command"):
            McpServer(**arguments)
