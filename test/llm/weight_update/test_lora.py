"""New weights as a LoRA adapter: what is trained is what generates."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from helpers.adapters import adapter_from_model
from helpers.fake_server import FakeServer
from helpers.log_probs import response_difference
from helpers.weights import open_weights
from tensordict import TensorDict, lazy_stack
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import Tokens

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme, SGLangWrapper
from torchrl_sglang.backends.lora.payload import (
    check_tensors,
    prepare_adapter,
    read_folder,
)
from torchrl_sglang.errors import (
    ConfigurationError,
    WeightMismatchError,
    WeightSyncStateError,
    WeightTransferError,
)
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.support.wrapped_names import without_wrappers
from torchrl_sglang.types import ServerArgs
from torchrl_sglang.weight_update.sources.base import unwrap
from torchrl_sglang.weight_update.sources.peft import (
    adapter_fits,
    adapter_source,
    trained_adapter,
)
from torchrl_sglang.weight_update.sources.resolve import find_source, get_model_metadata
from torchrl_sglang.weight_update.transports.lora import LoraOptions, LoraTransport
from torchrl_sglang.weight_update.verify import watch

TOLERANCE = 1e-4
PROMPT = [5, 6, 7, 8, 9, 10]
LONG = 400
"""Tokens of a request that runs meanwhile: 5 s on two quiet cores."""


@pytest.fixture
def transport(lora_engine):
    return LoraTransport(lora_engine)


def adapter_weights(model):
    return open_weights(adapter_source(unwrap(model)), {})


def ask(engine, **settings):
    (answer,) = engine.generate(
        input_ids=PROMPT,
        sampling_params={"max_new_tokens": 8, "ignore_eos": True, **settings},
        return_logprobs=True,
    )
    return answer


def test_each_step_of_training_is_what_generates(transport, lora_engine, peft_models):
    model = peft_models.make(0, target_modules="all-linear")
    optimizer = torch.optim.SGD(
        [value for value in model.parameters() if value.requires_grad], lr=0.3
    )
    base = ask(lora_engine)
    for version in ("1", "2", "3"):
        ids = torch.tensor([PROMPT])
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        transport.send(adapter_weights(model), version=version)
        answer = ask(lora_engine)
        assert peft_models.difference(answer, PROMPT, model) < TOLERANCE
        assert [span.version for span in answer.versions] == [version]
        assert answer.cached_tokens == 0
    assert lora_engine.default_adapter == "policy"
    # The base model is untouched, and one request away: a reference for nothing.
    (reference,) = lora_engine.generate(
        input_ids=PROMPT + base.token_ids,
        sampling_params={"max_new_tokens": 0},
        return_prompt_logprobs=True,
        adapter="",
    )
    scored = torch.tensor(reference.prompt_log_probs[len(PROMPT) :])
    expected = torch.tensor(base.log_probs)
    torch.testing.assert_close(scored, expected, atol=TOLERANCE, rtol=0)


def test_a_batch_that_waits_gets_the_newest(lora_engine, peft_models):
    """Versions are those of the moment in which a request is sent, and exact."""
    transport = LoraTransport(lora_engine, LoraOptions(pin_adapter=True))
    models = {version: peft_models.make(int(version)) for version in "12"}
    transport.send(adapter_weights(models["1"]), version="1")
    with ThreadPoolExecutor() as pool:
        answers = []
        begun = pool.submit(
            lambda: answers.extend(
                lora_engine.generate_iter(
                    input_ids=[PROMPT] * 12,
                    sampling_params={"max_new_tokens": 60, "ignore_eos": True},
                    return_logprobs=True,
                )
            )
        )
        while not answers and not begun.done():
            begun_now = ask(lora_engine, max_new_tokens=1)
            assert begun_now.versions[0].version == "1"
        transport.send(adapter_weights(models["2"]), version="2")
        begun.result()
    for _, answer in answers:
        (span,) = answer.versions
        assert (span.start, span.end) == (0, 60)
        model = models[span.version]
        assert peft_models.difference(answer, PROMPT, model) < TOLERANCE


def test_a_failure_changes_nothing(transport, lora_engine, peft_models):
    model = peft_models.make(3)
    weights = adapter_weights(model)
    transport.send(weights, version="1")
    for bad in ({"r": 16}, {"use_dora": True}, {"lora_alpha": None}):
        worse = replace(weights, adapter={**weights.adapter, **bad})
        with pytest.raises(WeightTransferError, match="version '2'.*from before") as e:
            transport.send(worse, version="2")
        assert e.value.untouched
    answer = ask(lora_engine)
    assert answer.versions[0].version == "1"
    assert peft_models.difference(answer, PROMPT, model) < TOLERANCE
    transport.send(weights, version="2")
    assert ask(lora_engine).versions[0].version == "2"


def test_servers_without_lora(engine):
    with pytest.raises(ConfigurationError, match="enable_lora=True"):
        LoraTransport(engine).connect()


def test_the_wrapper_carries_the_adapter(transport, lora_engine, peft_models, hf_model):
    model = peft_models.make(4)
    (base,) = run_sync(lora_engine.control.weight_versions())
    options = {
        "input_mode": "tokens",
        "generate_kwargs": {"max_new_tokens": 8, "ignore_eos": True},
        "return_generation_info": True,
    }
    by_default = SGLangWrapper(lora_engine, **options)
    of_base = SGLangWrapper(lora_engine, adapter="", **options)
    transport.send(adapter_weights(model), version="7")
    by_name = by_default.get_new_version(adapter="policy")
    for wrapper, oracle, version in (
        (by_default, model, 7),
        (by_name, model, 7),
        (of_base, hf_model, int(base) if base.isdigit() else -1),
    ):
        td = lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(PROMPT)))])
        out = wrapper(td)
        (full,) = out.get(("tokens", "full"), as_list=True)
        (found,) = out.get(("log_probs", "response"), as_list=True)
        with torch.no_grad():
            log_probs = oracle(full[None]).logits[0, :-1].log_softmax(-1)
        expected = log_probs.gather(-1, full[1:, None])[len(PROMPT) - 1 :, 0]
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        (versions,) = out.get(("generation_info", "weight_version"), as_list=True)
        assert versions.tolist() == [version] * 8
    with pytest.raises(ConfigurationError, match="'stile'"):
        by_default.get_new_version(adapter="stile")(td)


def test_what_is_read_of_a_model(peft_models, tmp_path):
    model = peft_models.make(5, target_modules=["v_proj", "q_proj"], lora_dropout=0.1)
    tensors, config = adapter_from_model(model)
    model.save_pretrained(tmp_path)
    saved, saved_config = read_folder(tmp_path)
    # What PEFT adds as it writes a file, and an order that it leaves open.
    for name in ("inference_mode", "auto_mapping"):
        saved_config[name] = config[name]
    saved_config["target_modules"].sort()
    assert {k: v for k, v in config.items() if k in saved_config} == saved_config
    assert sorted(tensors) == sorted(saved)
    for name, value in tensors.items():
        torch.testing.assert_close(value, saved[name], atol=0, rtol=0)
        assert not value.requires_grad


def test_wrappers_around_a_model(peft_models, tokenizer):
    model = peft_models.make(6)

    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

    policy = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens")
    for wrapped in (model, Wrapper(), policy):
        assert unwrap(wrapped).peft_model is model
        tensors, config = adapter_from_model(wrapped)
        assert config["r"] == 4
        assert len(tensors) == 8


def test_several_adapters(peft_models):
    from peft import LoraConfig

    model = peft_models.make(7)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["o_proj"]))
    assert adapter_from_model(model)[1]["r"] == 4
    model.set_adapter("other")
    tensors, config = adapter_from_model(model)
    assert config["r"] == 2
    assert all("o_proj.lora_" in name for name in tensors)
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ConfigurationError, match="2 active adapters"):
        adapter_from_model(model)


def test_models_without_an_adapter(hf_model):
    assert unwrap(hf_model).peft_model is None
    assert unwrap({"weight": torch.zeros(1)}).peft_model is None
    with pytest.raises(ConfigurationError, match="Qwen2ForCausalLM has no LoRA"):
        adapter_from_model(hf_model)


def train(model, steps=1):
    optimizer = torch.optim.SGD(
        [value for value in model.parameters() if value.requires_grad], lr=0.3
    )
    for _ in range(steps):
        ids = torch.tensor([PROMPT])
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_scheme_sends_the_adapter_alone(lora_engine, peft_models, tmp_path, hf_model):
    """Chosen by itself for a model that trains one; whole weights take its place."""
    model = peft_models.make(1, target_modules="all-linear")
    scheme = SGLangWeightSyncScheme(lora_engine, verify=True)
    sender = scheme.create_sender()
    sender.register_model(model)
    sender.init_all_workers_group()
    versions = []
    for _ in range(2):
        train(model)
        report = sender.update_weights()
        assert report.transport == "lora"
        assert "adapter" in report.reason
        assert report.num_bytes < sum(v.nbytes for v in model.parameters()) / 2
        answer = ask(lora_engine)
        assert peft_models.difference(answer, PROMPT, model) < TOLERANCE
        assert answer.versions[0].version == report.version
        assert report.version == lora_engine.weight_version
        versions.append(int(report.version))
    assert versions[1] == versions[0] + 1
    # From a folder, without a model.
    train(model)
    model.save_pretrained(tmp_path)
    other = SGLangWeightSyncScheme(lora_engine, transport="lora").create_sender()
    report = other.update_weights(tmp_path)
    assert peft_models.difference(ask(lora_engine), PROMPT, model) < TOLERANCE
    # Merged into the base model, it must not be applied once more.
    merging = SGLangWeightSyncScheme(lora_engine, transport="broadcast")
    after = merging.create_sender().update_weights(model)
    assert int(after.version) == int(report.version) + 1
    assert lora_engine.default_adapter is None
    answer = ask(lora_engine)
    assert peft_models.difference(answer, PROMPT, model) < TOLERANCE
    assert answer.versions[0].version == after.version
    # A model without adapters goes whole, to servers that take them, too.
    report = (
        SGLangWeightSyncScheme(lora_engine).create_sender().update_weights(hf_model)
    )
    assert report.transport == "broadcast"
    for each in (scheme, merging):
        each.shutdown()


def test_an_adapter_of_another_trainer_is_noticed(peft_models, caplog):
    """Once; what an earlier run has left, and what a user loads, is none."""
    model = peft_models.make(0, r=8)
    with ExitStack() as stack:
        server = stack.enter_context(FakeServer(peft_models.path, enable_lora=True))
        engines = [
            stack.enter_context(AsyncSGLang.connect(server.url)) for _ in range(3)
        ]
        earlier, sender, other = (
            SGLangWeightSyncScheme(engine, model).create_sender() for engine in engines
        )
        earlier.update_weights()
        tensors, config = adapter_from_model(model)
        for _ in range(2):
            sender.update_weights()
            engines[1].load_adapter(
                "style", tensors=tensors, config=config, version="77"
            )
        sender.update_weights()
        assert not other_trainers(caplog)
        version = other.update_weights().version
        assert not other_trainers(caplog)
        for _ in range(2):
            sender.update_weights()
    (text,) = other_trainers(caplog)
    assert f"weights of version {version!r}" in text


def other_trainers(caplog):
    return [each for each in caplog.messages if "another trainer" in each]


def test_all_that_is_trained_is_sent(lora_engine, peft_models):
    """Where it is more than an adapter that servers take, weights go whole."""
    more = peft_models.make(2)
    with torch.no_grad():
        for name, value in more.named_parameters():
            if "norm" in name:
                value.requires_grad_(True).mul_(1.5)
    # The servers were started for ranks up to 8.
    fitting = peft_models.make(3, r=8)
    others = [more, peft_models.make(4, r=16), peft_models.make(5, lora_bias=True)]
    sender = SGLangWeightSyncScheme(lora_engine).create_sender()
    expected = [("lora", fitting), *(("broadcast", model) for model in others)]
    for transport, model in expected:
        # An adapter goes over the checkpoint only.
        sender.recover()
        assert sender.update_weights(model).transport == transport
        assert peft_models.difference(ask(lora_engine), PROMPT, model) < TOLERANCE
    sender.recover()
    sender.shutdown()


@pytest.mark.parametrize(
    ("config", "server_args", "plain"),
    [
        ({}, {}, True),
        ({"target_modules": "all-linear"}, {"lora_target_modules": ["all"]}, True),
        ({"target_modules": ["v_proj"]}, {"lora_target_modules": ["q_proj"]}, True),
        ({"target_modules": ["o_proj"]}, {"lora_target_modules": ["q_proj"]}, False),
        ({"target_modules": r".*\.o_proj"}, {"lora_target_modules": ["o_proj"]}, True),
        ({"r": 8}, {"max_lora_rank": 8}, True),
        ({"r": 9}, {"max_lora_rank": 8}, False),
        ({"rank_pattern": {"q_proj": 2}}, {}, False),
        ({"alpha_pattern": {"q_proj": 2}}, {}, False),
        ({"lora_bias": True}, {}, False),
        ({"bias": "all"}, {}, False),
        ({"use_dora": True}, {}, False),
        ({"modules_to_save": ["lm_head"]}, {}, False),
        ({"init_lora_weights": "gaussian"}, {}, True),
        ({"init_lora_weights": "olora"}, {}, False),
    ],
    ids=str,
)
def test_whether_an_adapter_is_all(peft_models, config, server_args, plain):
    model = peft_models.make(1, **config)
    adapter = trained_adapter(unwrap(model))
    fits = adapter is not None and adapter_fits(adapter, ServerArgs(**server_args))
    assert fits is plain


def compile_layers(model) -> None:
    layers = model.get_base_model().model.layers
    for number, layer in enumerate(layers):
        layers[number] = torch.compile(layer, backend="eager")


def compile_projections(model) -> None:
    for layer in model.get_base_model().model.layers:
        attention = layer.self_attn
        attention.q_proj = torch.compile(attention.q_proj, backend="eager")


def compile_base(model) -> None:
    model.base_model.model = torch.compile(model.base_model.model, backend="eager")


def checkpoint_layers(model) -> None:
    layers = model.get_base_model().model.layers
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer)


def train_norms(model) -> None:
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.requires_grad_(True).mul_(1.5)


def rescale(model, factor=0.5) -> None:
    for part in model.modules():
        if hasattr(part, "scale_layer"):
            part.scale_layer(factor)


def set_scale_of_one(model) -> None:
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.set_scale("default", 0.25)


def disable_one(model) -> None:
    model.get_base_model().model.layers[1].self_attn.v_proj.enable_adapters(False)


def add(model, name="other", **config) -> None:
    from peft import LoraConfig

    settings = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
    model.add_adapter(name, LoraConfig(**{**settings, **config}))


def merge_another(model) -> None:
    add(model)
    model.merge_adapter(["other"])


def activate_another_in_a_layer(model) -> None:
    add(model)
    model.get_base_model().model.layers[0].self_attn.q_proj.set_adapter("other")


ALONE: dict[str, tuple[dict, object, str | None]] = {
    # what: (configuration, what happens to the model, words of the refusal)
    "plain": ({}, None, None),
    "gaussian": ({"init_lora_weights": "gaussian"}, None, None),
    "orthogonal": ({"init_lora_weights": "orthogonal"}, None, None),
    "rslora": ({"use_rslora": True}, None, None),
    "some layers": ({"layers_to_transform": [1]}, None, None),
    "merged": ({}, lambda model: model.merge_adapter(), None),
    "beside one that is not active": ({}, add, None),
    "compiled layers": ({}, compile_layers, None),
    "compiled projections": ({}, compile_projections, None),
    "a compiled base model": ({}, compile_base, None),
    "layers with activation checkpointing": ({}, checkpoint_layers, None),
    "pissa": ({"init_lora_weights": "pissa"}, None, "init_lora_weights='pissa'"),
    "pissa in steps": (
        {"init_lora_weights": "pissa_niter_4"},
        None,
        "init_lora_weights='pissa_niter_4'",
    ),
    "olora": ({"init_lora_weights": "olora"}, None, "has changed the base"),
    "pissa that is not active": (
        {},
        lambda model: add(model, init_lora_weights="pissa"),
        "init_lora_weights='pissa'",
    ),
    "trained norms": ({}, train_norms, r"trains .*norm\.weight beside the adapter"),
    "disabled": (
        {},
        lambda model: model.base_model.disable_adapter_layers(),
        "q_proj has its adapters disabled",
    ),
    "one layer disabled": ({}, disable_one, r"layers\.1\.self_attn\.v_proj has its"),
    "rescaled": ({}, rescale, "scales the adapter by 1 instead of 2"),
    "rescaled by the root of the rank": ({}, lambda m: rescale(m, 2.0), "by 4 instead"),
    "one scale": ({}, set_scale_of_one, r"layers\.0\.self_attn\.q_proj scales"),
    "another one merged": ({}, merge_another, "merged into its weights"),
    "another one in a layer": (
        {},
        activate_another_in_a_layer,
        "computes with the adapters",
    ),
}


def adapter_over_checkpoint(peft_models, model, config):
    """Returns what PEFT computes with a checkpoint and a model's adapter alone."""
    kept = {key: value for key, value in config.items() if key != "init_lora_weights"}
    alone = peft_models.make(0, **kept)
    trained = {
        without_wrappers(name): value
        for name, value in model.named_parameters()
        if ".lora_" in name
    }
    with torch.no_grad():
        for name, value in alone.named_parameters():
            if ".lora_" in name:
                value.copy_(trained[name])
    return alone


@pytest.mark.parametrize("case", ALONE)
def test_an_adapter_that_is_sent_alone_is_the_model(peft_models, hf_model, case):
    """Otherwise it is refused, and "auto" sends what the model computes with."""
    config, happens, refusal = ALONE[case]
    # With other values than PEFT's own it would not fit changed base weights.
    changes_base = refusal is not None and "init_lora_weights" in config
    model = peft_models.make(None if changes_base else 1, **config)
    if happens is not None:
        happens(model)
    alone = adapter_over_checkpoint(peft_models, model, config)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        difference = (model(ids).logits - alone(ids).logits).abs().max()
    plain = trained_adapter(unwrap(model))
    assert (plain is not None) is (refusal is None)
    if refusal is None:
        assert difference < TOLERANCE
        sent, _ = adapter_from_model(model)
        complete, _ = check_tensors(sent, {"r": 4}, get_model_metadata(hf_model))
        assert not any("_orig_mod" in name for name in complete)
        assert adapter_fits(plain, ServerArgs(lora_target_modules=["q_proj", "v_proj"]))
    else:
        assert difference > 100 * TOLERANCE
        with pytest.raises(ConfigurationError, match=refusal) as error:
            adapter_source(unwrap(model))
        assert "transport='auto' merges" in str(error.value)


def test_an_adapter_of_changed_weights_is_refused(tmp_path, peft_models):
    """Also where the model that it belongs to is not at hand."""
    peft_models.make(None, init_lora_weights="pissa").save_pretrained(tmp_path)
    tensors, config = read_folder(tmp_path)
    with (
        FakeServer(peft_models.path, enable_lora=True) as server,
        AsyncSGLang.connect(server.url) as engine,
    ):
        sender = SGLangWeightSyncScheme(engine, transport="lora").create_sender()
        by_server = replace(engine.capabilities, lora_tensors_field=None)
        for call in (
            lambda: engine.load_adapter("a", path=tmp_path),
            lambda: engine.load_adapter("a", tensors=tensors, config=config),
            lambda: sender.update_weights(tmp_path),
            lambda: prepare_adapter(
                path=tmp_path,
                tensors=None,
                config=None,
                capabilities=by_server,
                get_metadata=engine.get_model_metadata,
            ),
        ):
            with pytest.raises(ConfigurationError, match="init_lora_weights='pissa'"):
                call()
        assert server.adapters == []
        # Servers of the changed weights.
        config["init_lora_weights"] = True
        engine.load_adapter("a", tensors=tensors, config=config)


def test_two_adapters_that_are_trained(peft_models):
    from peft import LoraConfig

    model = peft_models.make(1)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["o_proj"]))
    assert trained_adapter(unwrap(model)) is not None
    for name, value in model.named_parameters():
        value.requires_grad_("lora_" in name)
    assert trained_adapter(unwrap(model)) is None


def test_verification_notices_another_adapter(lora_engine, peft_models):
    """What was sent is not what the model that was named computes."""
    model, other = (
        peft_models.make(seed, target_modules=["v_proj"]) for seed in (1, 2)
    )
    train(other, steps=3)
    weights, check = watch(
        lora_engine, adapter_weights(model), unwrap(other), version="1"
    )
    LoraTransport(lora_engine).send(weights, version="1")
    with pytest.raises(WeightMismatchError, match="does not generate with"):
        check()


def test_arguments_of_an_adapter(engine, lora_engine, hf_model):
    with pytest.raises(ConfigurationError, match="transport='lora'"):
        SGLangWeightSyncScheme(engine, transport="broadcast", adapter="x")
    sender = SGLangWeightSyncScheme(engine, transport="lora").create_sender()
    with pytest.raises(ConfigurationError, match="no LoRA adapter"):
        sender.update_weights(hf_model)


@pytest.mark.slow
def test_whole_weights_leave_no_answer_between(lora_engine, peft_models):
    """Requests in flight carry an adapter that the new weights include."""
    first, second = (
        peft_models.make(seed, target_modules=["v_proj"]) for seed in (1, 2)
    )
    scheme = SGLangWeightSyncScheme(lora_engine)
    scheme.create_sender().update_weights(first)
    merging = SGLangWeightSyncScheme(lora_engine, transport="broadcast", verify=True)
    with ThreadPoolExecutor() as pool:
        in_flight = pool.submit(ask, lora_engine, max_new_tokens=LONG)
        while not run_sync(lora_engine.control.running_requests()):
            assert not in_flight.done()
        report = merging.create_sender().update_weights(second)
        answer = in_flight.result()
    assert [span.version for span in answer.versions] == [report.version]
    assert peft_models.difference(answer, PROMPT, second) < TOLERANCE
    # Over these, an adapter alone is not what was trained.
    third = scheme.create_sender().update_weights(first)
    assert third.transport == "broadcast"
    assert peft_models.difference(ask(lora_engine), PROMPT, first) < TOLERANCE
    for each in (scheme, merging):
        each.shutdown()


def test_recovery_is_without_the_adapter(lora_engine, peft_models, hf_model):
    model = peft_models.make(3, target_modules=["v_proj"])
    sender = SGLangWeightSyncScheme(lora_engine).create_sender()
    before = sender.update_weights(model)
    report = sender.recover()
    assert int(report.version) > int(before.version)
    assert lora_engine.default_adapter is None
    answer = ask(lora_engine)
    assert answer.versions[0].version == report.version
    assert peft_models.difference(answer, PROMPT, hf_model) < TOLERANCE
    # The checkpoint is there again, so an adapter alone will do.
    again = sender.update_weights(model)
    assert again.transport == "lora"
    assert peft_models.difference(ask(lora_engine), PROMPT, model) < TOLERANCE
    # A version is given out once, also if nobody has it any more.
    lora_engine.unload_adapter("policy")
    assert int(sender.update_weights(model).version) == int(again.version) + 1


def test_an_adapter_does_not_heal(lora_engine, peft_models):
    model = peft_models.make(4, target_modules=["v_proj"])
    sender = SGLangWeightSyncScheme(lora_engine, transport="lora").create_sender()
    with lora_engine.weight_update() as update:
        update.mark_inconsistent("Half of the weights are new.")
    with pytest.raises(WeightSyncStateError, match=r"recover\(\)"):
        sender.update_weights(model)
    sender.recover()
    sender.update_weights(model)
    assert peft_models.difference(ask(lora_engine), PROMPT, model) < TOLERANCE


@pytest.mark.slow
def test_an_update_that_fails_leaves_the_adapter(lora_engine, peft_models, hf_model):
    model = peft_models.make(5, target_modules=["v_proj"])
    scheme = SGLangWeightSyncScheme(lora_engine)
    version = scheme.create_sender().update_weights(model).version
    passes = []

    def export():
        passes.append(0)
        if len(passes) == 2:
            raise OSError("The exporter is gone.")
        yield from hf_model.named_parameters()

    whole = SGLangWeightSyncScheme(lora_engine, transport="broadcast")
    with ThreadPoolExecutor() as pool:
        in_flight = pool.submit(ask, lora_engine, max_new_tokens=LONG)
        while not run_sync(lora_engine.control.running_requests()):
            assert not in_flight.done()
        with pytest.raises(WeightTransferError, match="exporter is gone") as caught:
            whole.create_sender().update_weights(export)
        assert caught.value.untouched
        answer = in_flight.result()
    for each in (answer, ask(lora_engine)):
        assert [span.version for span in each.versions] == [version]
        assert peft_models.difference(each, PROMPT, model) < TOLERANCE
    whole.shutdown()


@pytest.mark.parametrize(
    "how", ["whole weights", pytest.param("recover", marks=pytest.mark.slow)]
)
def test_whole_weights_replace_what_anybody_published(
    lora_engine, peft_models, hf_model, how
):
    """Also adapters of another engine object, of another scheme and without version."""
    first, second, whole = (
        peft_models.make(seed, target_modules=["v_proj"]) for seed in (11, 12, 13)
    )
    tensors, config = adapter_from_model(first)
    trainer = SGLangWeightSyncScheme(lora_engine, transport="broadcast", verify=True)
    with AsyncSGLang.connect(lora_engine.server_url) as other:
        other.load_adapter("style", tensors=tensors, config=config, default=True)
        named = SGLangWeightSyncScheme(other, transport="lora", adapter="second")
        published = named.create_sender().update_weights(second)
        with ThreadPoolExecutor() as pool:
            in_flight = pool.submit(ask, lora_engine, max_new_tokens=LONG)
            while not run_sync(lora_engine.control.running_requests()):
                assert not in_flight.done()
            sender = trainer.create_sender()
            if how == "recover":
                report, expected = sender.recover(), hf_model
            else:
                report, expected = sender.update_weights(whole), whole
            continued = in_flight.result()
        assert int(report.version) > int(published.version)
        # It goes on under the whole weights, without the adapter.
        last = continued.versions[-1]
        assert continued.adapter is None
        assert last.version == report.version
        found = response_difference(continued, PROMPT, expected, last.start, last.end)
        assert found < TOLERANCE
        for answer in (ask(lora_engine), ask(other)):
            assert answer.adapter is None
            assert [span.version for span in answer.versions] == [report.version]
            assert peft_models.difference(answer, PROMPT, expected) < TOLERANCE
        assert [e.default_adapter for e in (lora_engine, other)] == [None, None]
        assert [e.weight_version for e in (lora_engine, other)] == [report.version] * 2
    trainer.shutdown()


def test_verification_notices_an_adapter_over_whole_weights(
    lora_engine, peft_models, hf_model
):
    weights = open_weights(find_source(hf_model), lora_engine.get_model_metadata(), {})
    _, check = watch(lora_engine, weights, unwrap(hf_model), version="1")
    check()
    tensors, config = adapter_from_model(peft_models.make(14))
    with AsyncSGLang.connect(lora_engine.server_url) as other:
        other.load_adapter("style", tensors=tensors, config=config, default=True)
        with pytest.raises(WeightMismatchError, match="'style@#.*carry|carry 'style@#"):
            check()
        other.unload_adapter("style")
