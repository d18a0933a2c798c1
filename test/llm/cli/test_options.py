"""What is read from a command line, and what is said about a mistake."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.fake_server import FakeServer

from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.backends.launch.ray_launcher import RayLauncher
from torchrl_sglang.backends.launch.server_command import find_flags
from torchrl_sglang.backends.launch.vllm_arguments import ARGUMENTS
from torchrl_sglang.cli import main, parse
from torchrl_sglang.cli.gateway import GATEWAY_KEY_VARIABLE, connect
from torchrl_sglang.cli.options import (
    ADMIN_KEY_VARIABLE,
    KEY_VARIABLE,
    engine_arguments,
    read_key,
    split,
    start_arguments,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import nearest
from torchrl_sglang.support.event_loop import run_sync

OWN = {"--json": False, "--port": True, "--num-replicas": True, "-h": False}


@pytest.mark.parametrize(
    ("words", "own", "engine"),
    [
        ("m", "m", ""),
        ("m --json --tp-size 2", "m --json", "--tp-size 2"),
        ("m --tp-size 2 --json", "m --json", "--tp-size 2"),
        ("--json m --tp-size 2", "--json m", "--tp-size 2"),
        ("m --tp-size=2 --port 7", "m --port 7", "--tp-size=2"),
        ("--port=7 m", "--port=7 m", ""),
        ("--port 7 m --a --b", "--port 7 m", "--a --b"),
        ("m --graph-bs 1 2 4 --json", "m --json", "--graph-bs 1 2 4"),
        ("m --limit -1", "m", "--limit -1"),
        # A value that looks like an option, where an own option is due one.
        ("m --port --json", "m --port --json", ""),
        ("--tp-size 2 m", "", "--tp-size 2 m"),
        ("m --a -x", "m -x", "--a"),
        ("m -h --a", "m -h", "--a"),
    ],
)
def test_split(words, own, engine):
    assert split(words.split(), OWN) == (own.split(), engine.split())


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("", {}),
        ("--tp-size 2", {"tp_size": 2}),
        ("--tp_size=2", {"tp_size": 2}),
        ("--mem-fraction-static 0.8", {"mem_fraction_static": 0.8}),
        ("--disable-radix-cache", {"disable_radix_cache": True}),
        ("--enable-prefix-caching false", {"enable_prefix_caching": False}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--no-repeat 3", {"no_repeat": 3}),
        ("--cuda-graph-bs 1 2", {"cuda_graph_bs": [1, 2]}),
        ("--grammar-backend none", {"grammar_backend": "none"}),
        ("--revision 1.10", {"revision": "1.10"}),
        ("--name 007", {"name": "007"}),
        ("--limit -1", {"limit": -1}),
        ('--override {"a":1}', {"override": {"a": 1}}),
        ("--template {{x}}", {"template": "{{x}}"}),
        ("--empty=", {"empty": ""}),
    ],
)
def test_engine_arguments(words, arguments):
    found = engine_arguments(words.split(), OWN)
    assert found == arguments
    assert [*map(type, found.values())] == [*map(type, arguments.values())]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tp-size 2 --tp_size 4", "given twice"),
        ("--num-replica 2", "did you mean --num-replicas?"),
        ("--num_replcas 2", "did you mean --num-replicas?"),
        ("--api-key k", "--api-key-file FILE, or set TORCHRL_SGLANG_API_KEY"),
        ("--api_key=k", "read by every user"),
        ("--admin-api-key k", "read by every user"),
    ],
)
def test_engine_arguments_that_are_wrong(words, message):
    with pytest.raises(ConfigurationError) as caught:
        engine_arguments(words.split(), OWN)
    assert message in str(caught.value)
    assert " k" not in str(caught.value).replace(" key", "")


@pytest.mark.parametrize(
    "command", [("serve", "m"), ("gateway", "m"), ("bench", "all")]
)
def test_every_argument_of_sglang_can_be_given(command):
    """No name of SGLang's or vLLM's is taken for a mistake in one of ours."""
    own = parse(command).own_options
    flags = find_flags(str(cpu.engine_python()), cpu.engine_environment())
    assert flags is not None
    for name in {*flags, *ARGUMENTS} - {"api_key", "admin_api_key"}:
        flag = "--" + name.replace("_", "-")
        if flag not in own and "password" not in name:
            assert engine_arguments([flag], own)


def test_own_options_are_options_of_from_pretrained(monkeypatch, tmp_path):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert start_arguments(parse(["serve", "m"])) == {"num_replicas": 1}
    key = tmp_path / "key"
    key.write_text("secret\n")
    words = (
        "serve m --num-replicas 2 --device cpu --cuda-devices 2,GPU-5f --python p "
        "--start-timeout 9 --tp-size 2 --router-policy none --max-restarts 0"
    )
    found = parse([*words.split(), "--api-key-file", str(key)])
    assert start_arguments(found) == {
        "num_replicas": 2,
        "device": "cpu",
        "cuda_devices": [2, "GPU-5f"],
        "python": "p",
        "start_timeout": 9.0,
        "api_key": "secret",
        "router_policy": None,
        "tp_size": 2,
        "max_restarts": 0,
    }


@pytest.mark.parametrize("by_file", [True, False])
@pytest.mark.parametrize("command", ["serve m", "gateway m", "bench latency"])
def test_keys_of_servers_to_start(command, by_file, tmp_path, monkeypatch):
    words = command.split()
    variables = {"api-key": KEY_VARIABLE, "admin-api-key": ADMIN_KEY_VARIABLE}
    for name, variable in variables.items():
        monkeypatch.setenv(variable, "other" if by_file else name)
        (tmp_path / name).write_text(f"{name}\n")
        words += [f"--{name}-file", str(tmp_path / name)] if by_file else []
    found = start_arguments(parse(words))
    assert found["api_key"] == "api-key"
    assert found["admin_api_key"] == "admin-api-key"


def test_a_gateway_has_the_key_for_control_calls(tiny_model_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "k")
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "a")
    with (
        FakeServer(tiny_model_path, api_key="k", admin_api_key="a") as server,
        connect(parse(["gateway", "--url", server.url])) as engine,
    ):
        run_sync(engine.control.pause("retract", timeout=60.0))
        assert server.paused


def test_a_strategy_is_for_ray():
    words = ["serve", "m", "--ray-strategy", "SPREAD"]
    found = start_arguments(parse([*words, "--launcher", "ray"]))
    assert found["launcher"] == RayLauncher(strategy="SPREAD")
    assert "ray_strategy" not in found
    assert start_arguments(parse(["serve", "m", "--launcher=ray"]))["launcher"] == "ray"
    with pytest.raises(ConfigurationError, match="--launcher ray"):
        start_arguments(parse(words))


def test_the_key_comes_from_the_file_or_else_from_the_environment(tmp_path):
    file = tmp_path / "key"
    file.write_text("of the file\n")
    assert read_key(None, {}) is None
    assert read_key(None, {KEY_VARIABLE: ""}) is None
    assert read_key(None, {KEY_VARIABLE: "k"}) == "k"
    assert read_key(str(file), {KEY_VARIABLE: "k"}) == "of the file"
    file.write_text("\n")
    for name in (file, tmp_path / "none", tmp_path):
        with pytest.raises(ConfigurationError, match="key"):
            read_key(str(name), {KEY_VARIABLE: "k"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sevre m", "did you mean serve?"),
        ("quux", "invalid choice: 'quux'"),
        ("--jason", "did you mean"),
        ("serve", "required: MODEL."),
        ("serve --tp-size 2 m", "Write it before the options of the server"),
        ("serve m --device cdua", "did you mean cuda?"),
        ("serve m --port x", "invalid int value"),
        ("serve m --cuda-devices ,", "names no GPU"),
        ("serve m n", "unrecognized arguments: n."),
        ("serve m -x", "unrecognized arguments: -x"),
        ("gateway m --max-turns 0", "'0' is not a positive integer"),
        ("gateway m n", "unrecognized arguments: n."),
        ("doctor --modle m", "did you mean --model?"),
        ("doctor --mod=m", "did you mean --model?"),
        ("plan --modle m --gpus 8", "did you mean --model instead of --modle?"),
        ("bench", "required: MEASUREMENT"),
        ("bench thruput", "did you mean throughput?"),
        ("bench all --repeats 0", "'0' is not a positive integer"),
    ],
)
def test_mistakes_are_answered_with_what_is_right(words, message, capsys):
    if words == "--jason":
        message = "required: COMMAND"
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve m --num-replica 2", "--num-replicas"),
        ("serve m --api-key k", "--api-key-file"),
        ("serve m --device cpu --contxt-length 9", "context_length"),
        ("serve /nowhere/at/all --device cpu", "There is no model folder"),
        ("serve m --device cpu --host 0.0.0.0", "api_key"),
        ("gateway", "Give either MODEL"),
        ("gateway m --url http://127.0.0.1:1", "Give either MODEL"),
        ("gateway --url http://127.0.0.1:1 --device cpu", "--device is for"),
        ("gateway --url http://127.0.0.1:1 --tp-size 2", "--tp-size is for"),
        ("gateway --url http://127.0.0.1:1 --tool-parser q", "--tool-parser is for"),
        ("gateway m --tool-cal-parser q", "did you mean --tool-call-parser?"),
        ("gateway m --api-key k", "--api-key-file"),
        ("gateway m --admin-api-key k", "--admin-api-key-file"),
        ("gateway m --admin-api-key-file /nowhere", "The key cannot be read"),
        ("gateway m --host 0.0.0.0", "--gateway-key-file"),
        ("gateway m --gateway-key-file /nowhere", "The key cannot be read"),
        ("gateway m --chat-template /nowhere", "The chat template cannot be read"),
        ("bench weights --url http://127.0.0.1:1", "--replace-weights"),
        ("bench latency --url http://127.0.0.1:1 --device cpu", "--device is for"),
        ("bench latency --url http://127.0.0.1:1 --tp-size 2", "--tp-size is for"),
    ],
)
def test_a_wrong_argument_is_one_sentence(words, message, capsys, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.delenv(GATEWAY_KEY_VARIABLE, raising=False)
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert main([*words.split(), "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_nobody_there_is_a_failure(capsys):
    assert main(["bench", "latency", "--url", "http://127.0.0.1:1"]) == 1
    assert "Check that the server is running" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["serve"], ["gateway"], ["doctor"], ["bench"]])
@pytest.mark.parametrize("started_by", ["torchrl-sglang", "python -m torchrl_sglang"])
def test_help_is_there_at_once(command, started_by):
    code = (
        "import sys\n"
        "from torchrl_sglang.cli import main\n"
        f"sys.argv = ['/bin/{started_by}', *{command}, '--help']\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    assert not {'torch', 'aiohttp', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert f"usage: {' '.join([started_by, *command])}" in done.stdout


def test_no_command_shows_the_commands(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "bench" in capsys.readouterr().err


def test_nearest():
    names = ["throughput", "latency"]
    assert nearest("latncy", names) == "latency"
    assert nearest("t", names) == "throughput"
    assert nearest("", names) is None
    assert nearest("xyz", names) is None
