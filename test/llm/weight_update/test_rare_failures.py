"""What a sender does where something else fails, or ends, in the middle of it."""

from __future__ import annotations

import copy
import threading
import time
from contextlib import ExitStack

import pytest
import torch
from aiohttp import web
from helpers.engines import fleet_of
from helpers.fake_launcher import FakeLauncher, make_engine
from helpers.fake_server import FakeServer
from helpers.waiting import wait_until
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.errors import (
    ConfigurationError,
    ServerUnavailableError,
    WeightMismatchError,
    WeightSyncStateError,
    WeightTransferError,
)

TENSORS = "/update_weights_from_tensor"
RESUME = "/continue_generation"
ASKED = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": 2},
    "timeout": 10,
}


class ToldCollector:
    """Counts updates, and keeps what it is told of them."""

    def __init__(self) -> None:
        self.policy_version = 0
        self.told: list[tuple[str, object]] = []

    def increment_version(self) -> None:
        self.policy_version += 1

    def _served_next(self, version: str) -> None:
        self.told.append(("next", version))

    def _update_failed(self, generated: bool) -> None:
        self.told.append(("failed", generated))

    def _served_again(self, version: str) -> None:
        self.told.append(("again", version))


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def launched(stack, tiny_model_path):
    """Starts an engine whose fake servers are started again; returns its launcher."""

    def start(count: int, **options):
        launcher = FakeLauncher(tiny_model_path, count, **options)
        stack.callback(launcher.close)
        return launcher, stack.enter_context(make_engine(launcher))

    return start


@pytest.fixture
def connected(stack, tiny_model_path):
    def connect(**options):
        server = stack.enter_context(FakeServer(tiny_model_path, **options))
        return server, stack.enter_context(AsyncSGLang.connect(server.url))

    return connect


@pytest.fixture
def make_sender(stack, hf_model):
    def make(engine, model=hf_model, transport="cuda_ipc", **options):
        scheme = SGLangWeightSyncScheme(engine, model, transport=transport, **options)
        stack.callback(scheme.shutdown)
        return scheme.create_sender()

    return make


def lose(launcher, engine) -> None:
    launcher.handles[-1].vanish()
    wait_until(lambda: engine.awaits_weights)


# All servers were started again.


def adapted_copy(model):
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=2, init_lora_weights=False)
    return get_peft_model(copy.deepcopy(model), settings)


GIVEN = {
    "a module": lambda model: model,
    "an exporter": lambda model: model.named_parameters,
    "a function": lambda model: (
        lambda: ((name, value.detach() * 1) for name, value in model.named_parameters())
    ),
    "a state dict": lambda model: model.state_dict(),
    "a TensorDict": TensorDict.from_module,
    "an adapter to be merged": adapted_copy,
    "an adapter in half precision": lambda model: adapted_copy(model).bfloat16(),
}
"""What a sender is given -> how it is made of a model."""


def optimize(parameter) -> None:
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()


CHANGES = {
    "none": lambda parameter: None,
    "a forward pass's gradient": lambda parameter: setattr(
        parameter, "grad", torch.ones_like(parameter)
    ),
    "an optimizer": optimize,
    ".data": lambda parameter: parameter.data.add_(0.1),
    "one element": lambda parameter: parameter.data.view(-1)[-1:].mul_(1.1),
    "NumPy": lambda parameter: parameter.detach().view(torch.uint8).numpy().fill(1),
    "another order": lambda parameter: parameter.data.copy_(parameter.data.flip(0)),
    "another memory": lambda parameter: setattr(
        parameter, "data", parameter.data * 1.5
    ),
}
"""What happens to a parameter -> how."""


def last_parameter(given):
    """Returns a matrix that is trained, whatever the weights are given as."""
    if not isinstance(given, torch.nn.Module):
        given = getattr(given, "__self__", given)
    if isinstance(given, torch.nn.Module) and not isinstance(given, TensorDict):
        trained = [each for each in given.parameters() if each.requires_grad]
        return [each for each in trained if each.dim() == 2][-1]
    return None


@pytest.mark.parametrize(
    ("given", "change"),
    [
        *(("a module", change) for change in CHANGES),
        *(
            pytest.param(given, "none", marks=pytest.mark.slow)
            for given in [*GIVEN][1:]
        ),
        *zip([*GIVEN][1:], ["an optimizer", ".data", *[*CHANGES][4:]], strict=False),
    ],
)
def test_weights_that_are_sent_again(launched, make_sender, hf_model, given, change):
    """Those of a later step are a new version: tokens of both are told apart."""
    launcher, engine = launched(1)
    weights = GIVEN[given](hf_model)
    sender, collector = make_sender(engine, weights), ToldCollector()
    sender.register_collector(collector)
    sender.update_weights()
    changed = last_parameter(weights)
    CHANGES[change](last_parameter(hf_model) if changed is None else changed)
    trained = change not in ("none", "a forward pass's gradient")
    engine.add_servers(1)
    if trained:
        with pytest.raises(WeightSyncStateError, match="trained since"):
            sender.update_new_servers()
    else:
        assert sender.update_new_servers().version == "1"
    for handle in launcher.handles:
        handle.vanish()
    wait_until(lambda: engine.awaits_weights)
    assert sender.refresh().version == "2"
    assert collector.policy_version == 1 + trained
    last = ("next", "2") if trained else ("again", "2")
    assert collector.told == [("next", "1"), last]
    assert engine.generate(**ASKED)[0].weight_version == "2"


def test_weights_of_inference_mode_are_counted(launched, make_sender, tiny_model_path):
    _, engine = launched(1)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(tiny_model_path)
        )
    assert next(model.parameters()).is_inference()
    sender, collector = make_sender(engine, model), ToldCollector()
    sender.register_collector(collector)
    assert sender.update_weights() is sender.last_report
    assert engine.weight_version == sender.last_report.version
    assert collector.policy_version == 1


def test_a_checkpoint_is_not_followed_by_the_model(launched, make_sender):
    launcher, engine = launched(1)
    sender = make_sender(engine)
    sender.update_weights()
    sender.recover()
    lose(launcher, engine)
    assert sender.refresh() is None


def test_a_server_that_returns_after_the_others(launched, make_sender):
    launcher, engine = launched(2)
    sender, second = make_sender(engine), threading.Event()
    sender.update_weights()
    starts = iter((lambda: None, lambda: second.wait(30)))
    launcher.at_start = lambda server: next(starts)()
    for handle in launcher.handles[:2]:
        handle.vanish()
    wait_until(lambda: engine.awaits_weights)
    sender.refresh()
    second.set()
    wait_until(lambda: len(engine.control.urls) == 2)
    assert sender.update_new_servers().version == "2"
    assert [each.state for each in engine.stats().servers] == ["serving"] * 2


def test_nobody_is_left_to_compare_with(launched, make_sender):
    launcher, engine = launched(1)
    sender = make_sender(engine)
    sender.update_weights()
    engine.add_servers(1)
    new, old = launcher.handles[1].server, launcher.handles[0]
    load, end = new.routes[TENSORS], new.routes["/end_weight_update"]
    new.routes[TENSORS] = lambda content: old.vanish() or load(content)
    new.routes["/end_weight_update"] = lambda content: (
        fleet_of(engine).notice_deaths() or end(content)
    )
    launcher.at_start = lambda server: time.sleep(2)
    before = sender.stats().failures
    with pytest.raises(WeightTransferError, match="No server is left that .* compared"):
        sender.update_new_servers()
    assert sender.stats().failures == before + 1


def test_a_server_whose_process_has_ended_is_not_resumed(launched, make_sender):
    """It answers a moment longer, as a child of the process that was killed does."""
    launcher, engine = launched(1)
    sender, (handle,) = make_sender(engine, restart_timeout=0), launcher.handles
    resume = handle.server.routes[RESUME]

    def end(content):
        handle.server.routes[RESUME] = resume
        handle.state = "dead"
        return web.Response(status=500)

    handle.server.routes[RESUME] = end
    with pytest.raises(WeightTransferError, match="hold the new weights"):
        sender.update_weights()


def test_a_receiver_is_made_by_torchrls_name(connected):
    server, engine = connected()
    scheme = SGLangWeightSyncScheme(server.url)
    receiver = scheme.create_receiver(vllm_engine=engine)
    assert receiver.weight_versions() == ["default"]
    assert scheme.create_receiver(engine).weight_versions() == ["default"]
    with pytest.raises(ConfigurationError, match="two names of one argument"):
        scheme.create_receiver(engine, vllm_engine=AsyncSGLang.connect(server.url))


# Of several calls.


def test_an_update_that_is_refused_beside_another(connected, make_sender):
    server, engine = connected()
    sender, collector = make_sender(engine), ToldCollector()
    sender.register_collector(collector)
    asked, refused, load = threading.Event(), threading.Event(), server.routes[TENSORS]

    def wait(content):
        asked.set()
        refused.wait(30)
        return load(content)

    server.routes[TENSORS] = wait
    first = threading.Thread(target=sender.update_weights)
    first.start()
    assert asked.wait(30)
    with pytest.raises(WeightSyncStateError, match="in progress"):
        sender.update_weights()
    refused.set()
    first.join(30)
    assert collector.told == [("next", "1")]
    assert collector.policy_version == 1


def test_another_sender_closes_its_session_just_then(connected, make_sender):
    server, engine = connected()
    sender = make_sender(engine, control_timeout=0.5)
    end, server.in_session = server.routes["/end_weight_update"], True

    def ended_before(content):
        server.in_session = False
        server.routes["/end_weight_update"] = end
        return end(content)

    server.routes["/end_weight_update"] = ended_before
    assert sender.update_weights().version == "1"
    assert engine.generate(**ASKED)[0].weight_version == "1"


def test_one_tensor_does_not_mend_a_mix(connected):
    server, engine = connected()
    route = "/update_weights_from_distributed"
    server.routes[route] = server.routes[TENSORS]
    with (
        server.misbehaving("error_500", route),
        pytest.raises(WeightTransferError, match="mix of old and new"),
    ):
        engine.update_weights_from_distributed("model.norm.weight", torch.float32, [64])
    with pytest.raises(
        WeightSyncStateError, match=r"'lm_head.weight' alone .* recover"
    ):
        engine.update_weights_from_distributed("lm_head.weight", torch.float32, [4])
    with pytest.raises(WeightSyncStateError, match="inconsistent"):
        engine.generate(**ASKED)


def test_recovery_has_the_timeout_of_control_calls(connected, make_sender):
    server, engine = connected()
    sender, begun = make_sender(engine, control_timeout=0.5), time.monotonic()
    with (
        server.misbehaving("hang", "/pause_generation"),
        pytest.raises(WeightTransferError),
    ):
        sender.recover()
    assert time.monotonic() - begun < 30


def test_updates_from_files_that_fail_leave_no_pile(connected, make_sender, tmp_path):
    server, engine = connected()
    sender = make_sender(engine, transport="disk", directory=tmp_path)
    for _ in range(4):
        with (
            server.misbehaving("error_500", "/update_weights_from_disk"),
            pytest.raises(WeightTransferError),
        ):
            sender.update_weights()
    assert len(list(tmp_path.glob("v*"))) == 2


# Verification.


@pytest.fixture
def verified(monkeypatch):
    """Lets functions stand for the comparisons of updates, one after the other."""

    def comparisons(*checks):
        left = iter(checks)
        monkeypatch.setattr(
            "torchrl_sglang.weight_update.sender.watch",
            lambda engine, weights, given, *, version: (weights, next(left)),
        )

    return comparisons


def differs() -> None:
    raise WeightMismatchError("It holds something else.")


def test_a_server_that_ends_while_it_is_compared(launched, make_sender, verified):
    launcher, engine = launched(2)

    def ends() -> None:
        launcher.handles[-1].vanish()
        raise ServerUnavailableError("It is gone.", transient=True)

    verified(ends, lambda: None)
    sender = make_sender(engine, verify=True, restart_timeout=30)
    assert sender.update_weights().version == "2"
    assert [each.state for each in engine.stats().servers] == ["serving"] * 2


def test_a_server_that_cannot_be_compared(connected, make_sender, verified):
    server, engine = connected()

    def refuses() -> None:
        raise ServerUnavailableError("It fails.", transient=True)

    verified(refuses)
    with pytest.raises(WeightTransferError, match="could not be asked whether"):
        make_sender(engine, verify=True).update_weights()
    assert server.paused
    with pytest.raises(WeightSyncStateError, match="inconsistent"):
        engine.generate(**ASKED)


def test_requests_that_wait_for_other_weights_go_on_waiting(
    connected, make_sender, verified
):
    """A request that came during the update is sent to paused servers only."""
    server, engine = connected()
    asked, load, held = threading.Event(), server.routes[TENSORS], []

    def slowly(content):
        asked.set()
        time.sleep(1.0)
        return load(content)

    def ask() -> None:
        asked.wait(30)
        held.append(engine.generate(**ASKED))

    server.routes[TENSORS] = slowly
    verified(differs)
    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(WeightMismatchError):
        make_sender(engine, verify=True).update_weights()
    asking.join(30)
    order = [path for _, path, _ in server.requests]
    last_pause = len(order) - order[::-1].index("/pause_generation")
    assert "/generate" in order[last_pause:]
    assert "/generate" not in order[:last_pause]


# Adapters.

LORA_SERVER = {
    "enable_lora": True,
    "server_args": {
        "max_lora_rank": 16,
        "lora_target_modules": ["all"],
        "max_loras_per_batch": 8,
    },
}


def adapted(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def test_an_adapter_that_differs_is_replaced_by_the_next(
    connected, make_sender, verified, hf_model
):
    _, engine = connected(**LORA_SERVER)
    sender = make_sender(engine, adapted(hf_model), transport="lora")
    verified(differs, lambda: None)
    with pytest.raises(WeightMismatchError):
        sender.update_weights(verify=True)
    with pytest.raises(WeightSyncStateError, match="inconsistent"):
        engine.generate(**ASKED)
    assert sender.update_weights(verify=True).version == "2"
    assert engine.generate(**ASKED)[0].adapter is not None


def test_an_adapter_of_another_model(connected, make_sender, tiny_model_path):
    _, engine = connected(**LORA_SERVER)
    config = AutoConfig.from_pretrained(tiny_model_path)
    config.hidden_size *= 2
    config.head_dim = config.hidden_size // config.num_attention_heads
    other = adapted(AutoModelForCausalLM.from_config(config))
    with pytest.raises(WeightMismatchError, match="does not fit the served model"):
        make_sender(engine, other, transport="lora").update_weights()


def test_an_adapter_that_a_server_is_still_given(launched, make_sender, hf_model):
    """It holds the base that it is trained over, so the next one is sent as ever."""
    launcher, engine = launched(2, **LORA_SERVER)
    sender, given = make_sender(engine, adapted(hf_model), "auto"), threading.Event()
    assert sender.update_weights().transport == "lora"
    route = "/load_lora_adapter_from_tensors"

    def at_start(server):
        load = server.routes[route]
        server.routes[route] = lambda content: given.wait(10) and load(content)

    launcher.at_start = at_start
    launcher.handles[-1].vanish()
    wait_until(lambda: len(launcher.handles) == 3 and len(engine.control.urls) == 2)
    wait_until(lambda: "adapters" in engine.stats().servers[1].reason)
    assert engine.base_problem is None
    given.set()
    assert sender.update_weights().transport == "lora"
