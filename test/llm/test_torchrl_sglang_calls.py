"""The calls of TorchRL's own classes for SGLang, and of its engine for vLLM.

TorchRL has an ``AsyncSGLang``, an ``SGLangWeightSyncScheme`` and a sender, too. What
its users write runs here, or is refused with what to write instead. The signatures are
read from the installed TorchRL, so a call that it gains is missed here.
"""

from __future__ import annotations

import asyncio
import datetime
import inspect
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from helpers.log_probs import TOLERANCE, response_difference
from torchrl._utils import logger as torchrl_logger
from torchrl.modules.llm.backends.sglang.base import RLSGLangEngine as TheirEngine
from torchrl.modules.llm.backends.sglang.sglang_server import AsyncSGLang as TheirServer
from torchrl.weight_update.llm.sglang_nccl import (
    SGLangWeightSender as TheirSender,
)
from torchrl.weight_update.llm.sglang_nccl import (
    SGLangWeightSyncScheme as TheirScheme,
)
from torchrl.weight_update.llm.sglang_nccl import (
    _init_custom_process_group,
)

from torchrl_sglang import (
    AsyncSGLang,
    SGLangWeightSender,
    SGLangWeightSyncScheme,
    get_model_metadata,
)
from torchrl_sglang.backends.launch.server_command import (
    ServerFlag,
    check_names,
    to_flags,
)
from torchrl_sglang.backends.torchrl_calls import (
    IGNORED_VARIABLES,
    WEIGHT_UPDATE_GROUP,
    warn_of_ignored_variables,
)
from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    UnsupportedByServerError,
    WeightSyncStateError,
)
from torchrl_sglang.support.event_loop import run_sync

URL = "http://127.0.0.1:9"
SHORT = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0.0}


def public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


@pytest.mark.parametrize("flush", [None, True, False])
def test_the_scheme_has_the_attributes_of_theirs(flush):
    scheme = SGLangWeightSyncScheme(server_url=URL, flush_cache_on_update=flush)
    assert scheme.flush_cache_on_update is flush
    assert scheme.flush_cache is (flush is not False)


def test_their_variables_that_have_no_effect_here(fake, monkeypatch, caplog):
    """Those that the installed TorchRL reads are all known."""
    modules = map(inspect.getmodule, (TheirServer, TheirScheme))
    text = "".join(map(inspect.getsource, modules))
    read = set(re.findall(r"TORCHRL_SGLANG_[A-Z_]+", text))
    assert read == set(IGNORED_VARIABLES)
    for name in read:
        monkeypatch.setenv(name, "1")
    warn_of_ignored_variables.cache_clear()
    torchrl_logger.addHandler(caplog.handler)
    try:
        for _ in range(2):
            AsyncSGLang.connect(fake.url).shutdown()
    finally:
        torchrl_logger.removeHandler(caplog.handler)
    for name, instead in IGNORED_VARIABLES.items():
        assert caplog.text.count(f"{name}=1 is set") == 1
        assert f"give {instead}." in caplog.text


def test_every_method_of_theirs_is_there():
    assert public(TheirEngine) | public(TheirServer) <= set(dir(AsyncSGLang))
    assert public(TheirSender) <= set(dir(SGLangWeightSender))
    assert public(TheirScheme) <= set(dir(SGLangWeightSyncScheme))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGLangWeightSyncScheme.__init__, TheirScheme.__init__),
        (AsyncSGLang.connect, TheirServer.connect),
        (AsyncSGLang.from_pretrained, TheirServer.from_pretrained),
        (AsyncSGLang.generate, TheirServer.generate),
        (AsyncSGLang.generate_batch, TheirServer.generate_batch),
        (AsyncSGLang.init_weight_update_group, TheirServer.init_weight_update_group),
        (
            AsyncSGLang.update_weights_from_distributed,
            TheirServer.update_weights_from_distributed,
        ),
        (SGLangWeightSender.update_weights, TheirSender.update_weights),
        (
            SGLangWeightSender.init_all_workers_group,
            TheirSender.init_all_workers_group,
        ),
    ],
)
def test_every_argument_of_theirs_is_taken(ours, theirs):
    ours, theirs = inspect.signature(ours), inspect.signature(theirs)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in ours.parameters.values())
    missing = set(theirs.parameters) - set(ours.parameters) - {"kwargs"}
    assert takes_all or not missing


def test_positional_arguments():
    """In order, up to the last one that TorchRL passes by position."""

    def positional(function):
        parameters = list(inspect.signature(function).parameters.values())
        return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    # In the place of an address a model is taken, too.
    assert positional(SGLangWeightSyncScheme)[2:] == positional(TheirScheme)[2:4]
    ours = positional(AsyncSGLang.from_pretrained)
    assert ours[1:] == positional(TheirServer.from_pretrained)[1:]
    assert positional(AsyncSGLang.generate) == positional(TheirServer.generate)


def test_a_scheme_without_a_server():
    scheme = SGLangWeightSyncScheme(
        server_url=URL,
        master_address="localhost",
        master_port=29500,
        num_gpus=2,
        strategy="state_dict",
        pause_mode=None,
        flush_cache_on_update=False,
    )
    assert scheme.server_url == URL
    assert (scheme.num_gpus, scheme.world_size) == (2, 3)
    assert scheme.strategy_name == "state_dict"
    assert scheme.pause_mode == "continue"
    assert scheme.flush_cache is False
    by_position = SGLangWeightSyncScheme(URL, "10.0.0.1", 29500, 1)
    assert by_position.master_address == "10.0.0.1"
    assert (by_position.master_port, by_position.num_gpus) == (29500, 1)
    nothing = SGLangWeightSyncScheme()
    assert (nothing.server_url, nothing.num_gpus, nothing.world_size) == (None,) * 3
    assert nothing.flush_cache
    with pytest.raises(ConfigurationError, match="flush_cache_on_update must be"):
        SGLangWeightSyncScheme(flush_cache_on_update="yes")


def test_a_scheme_with_an_engine(engine):
    scheme = SGLangWeightSyncScheme(engine)
    assert scheme.server_url == engine.server_url
    assert (scheme.num_gpus, scheme.world_size) == (1, 2)
    assert scheme.create_sender().flush_cache() is True


def test_connect(engine):
    with AsyncSGLang.connect(server_url=engine.server_url) as other:
        assert other.server_url == engine.server_url
    with pytest.raises(ConfigurationError, match=r"Give url once.*server_url="):
        AsyncSGLang.connect(URL, server_url=URL)
    for arguments in ({"server_url": URL}, {"model_path": "m", "tp_size": 2}):
        with pytest.raises(ConfigurationError, match=r"from_pretrained.*connect"):
            AsyncSGLang(**arguments)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (("m",), {"model_name": "m"}, "Give model once: model='m', model_name='m'"),
        ((), {}, "Give the model"),
        (("m",), {"timeout": "3"}, "timeout must be a positive, finite"),
        (("/no/where", 2), {"tensor_parallel_size": 4}, "both set SGLang's 'tp_size'"),
    ],
)
def test_from_pretrained(args, kwargs, words):
    with pytest.raises(ConfigurationError, match=words):
        AsyncSGLang.from_pretrained(*args, device="cpu", **kwargs)


def test_a_switch_that_is_off_asks_for_nothing():
    """Their recipe's configuration holds switches that this SGLang has not."""
    flags = {"tp_size": ServerFlag(flag="--tp-size")}
    asked = {"tp_size": 1, "disable_piecewise_cuda_graph": False}
    check_names(asked, flags)
    assert to_flags(asked, flags) == ["--tp-size", "1"]
    for value in (True, None, 0):
        with pytest.raises(ConfigurationError, match="'disable_piecewise_cuda_graph'"):
            check_names({"disable_piecewise_cuda_graph": value}, flags)


def test_generate(engine):
    """Sampling parameters by position, by keyword, and under TorchRL's names."""
    ids = [[5, 6, 7], [8, 9]]
    expected = [a.token_ids for a in engine.generate(None, SHORT, input_ids=ids)]
    forms = (
        engine.generate(input_ids=ids, **SHORT),
        engine.generate(
            None,
            {"max_tokens": 4, "ignore_eos": True},
            input_ids=ids,
            temperature=0.0,
            return_text=True,
        ),
        engine.generate(
            None,
            [{"max_new_tokens": 4}] * 2,
            input_ids=ids,
            ignore_eos=True,
            temperature=0.0,
        ),
        asyncio.run(engine.agenerate(None, SHORT, input_ids=ids)),
        [a for _, a in sorted(engine.generate_iter(input_ids=ids, **SHORT))],
    )
    for answers in forms:
        assert [answer.token_ids for answer in answers] == expected
    texts = engine.generate_batch(["A", "hi"], SHORT)
    again = engine.generate_batch(["A", "hi"], **SHORT)
    assert [answer.text for answer in texts] == [answer.text for answer in again]
    assert [len(answer.token_ids) for answer in texts] == [4, 4]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"max_tokens": 4, "max_new_tokens": 4}, "'max_new_tokens' is given twice"),
        ({"sampling_params": {"top_p": 1.0}, "top_p": 0.5}, "'top_p' is given in sam"),
        ({"sampling_params": 5, "top_p": 0.5}, "sampling_params must be a mapping"),
        ({"return_logprob": True}, "Did you mean 'return_logprobs'"),
        ({"n": 2}, "repeat the prompt"),
        ({"prompts": "A"}, "Cannot provide both"),
    ],
)
def test_generate_refuses(engine, kwargs, words):
    with pytest.raises(ConfigurationError, match=words):
        engine.generate(**{"input_ids": [5, 6], **kwargs})
    with pytest.raises(ConfigurationError, match="Must provide either"):
        engine.generate()


def test_what_servers_do(engine):
    """The names of vLLM's engine."""
    assert engine.reset_prefix_cache() is True
    assert engine.get_num_unfinished_requests() == [0]
    assert engine.get_num_unfinished_requests(0) == 0
    assert 0.0 <= engine.get_cache_usage(0) <= 1.0
    assert engine.get_cache_usage() == [engine.get_cache_usage(0)]
    for index in (1, -1, "0"):
        with pytest.raises(ConfigurationError, match="actor_index"):
            engine.get_cache_usage(index)


def test_a_trainer_that_runs_its_own_collectives(restored_engine, hf_model):
    """The trainer's half is theirs, in another thread; the engine's half is ours."""
    engine, port = restored_engine, restored_engine.get_master_port()
    name = "model.norm.weight"
    dtype, shape = get_model_metadata(hf_model)[name]
    tensor = torch.full(shape, 0.5, dtype=dtype)
    before = int(engine.weight_version) if engine.weight_version.isdigit() else 0
    with ThreadPoolExecutor(1) as trainer:
        joining = trainer.submit(
            _init_custom_process_group,
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=1 + engine.get_world_size(),
            rank=0,
            group_name=WEIGHT_UPDATE_GROUP,
            timeout=datetime.timedelta(seconds=60),
        )
        engine.init_weight_update_group("127.0.0.1", port, timeout=60)
        group = joining.result(60)
        sending = trainer.submit(dist.broadcast, tensor, src=0, group=group)
        version = engine.update_weights_from_distributed(
            name, dtype, tuple(shape), timeout=60
        )
        sending.result(60)
    assert version == engine.weight_version
    assert int(version) > before
    (answer,) = engine.generate(input_ids=[5, 6, 7], return_logprobs=True, **SHORT)
    # The restored weights are this model's.
    norm = hf_model.get_parameter(name)
    kept = norm.detach().clone()
    with torch.no_grad():
        norm.copy_(tensor)
        assert response_difference(answer, [5, 6, 7], hf_model) < TOLERANCE
        norm.copy_(kept)
    dist.destroy_process_group(group)
    run_sync(engine.control.destroy_weights_update_group(WEIGHT_UPDATE_GROUP))


@pytest.mark.slow
def test_a_tensor_is_refused_while_requests_run(engine):
    with pytest.raises(ConfigurationError, match="needs the master_port"):
        engine.init_weight_update_group()
    with pytest.raises(UnsupportedByServerError, match=r"write SGLangWeightSyncScheme"):
        engine.update_weights(iter([]))
    # As long as fits into the context.
    long = {"max_new_tokens": None, "ignore_eos": True}
    answers = engine.generate_iter(input_ids=[[5]] * 128, sampling_params=long)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, answers)
        while not engine.get_num_unfinished_requests(0):
            assert not first.done()
        with pytest.raises(WeightSyncStateError, match=r"(?s)pauses none .*SGLang"):
            engine.update_weights_from_distributed("a", torch.float32, (1,))
        engine.abort()
        with pytest.raises(GenerationAbortedError):
            first.result(60)
    assert len(engine.generate(input_ids=[5], **SHORT)) == 1
