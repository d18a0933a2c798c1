"""LoRA adapters on a real engine: each completion is computed with the right one."""

from __future__ import annotations

import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.adapters import adapter_from_model
from helpers.waiting import wait_until

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.lora.payload import prepare_adapter
from torchrl_sglang.errors import (
    ConfigurationError,
    RequestRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
    UnsupportedByServerError,
    WeightMismatchError,
)
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.types import VersionSpan

TOLERANCE = 1e-4
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
LONG = 400
"""Tokens of a request that runs meanwhile: 5 s on two quiet cores."""
SETTINGS = {"max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def older_lora_engine(tiny_model_path):
    """A server of the generation before update sessions."""
    with AsyncSGLang.from_pretrained(
        tiny_model_path,
        device="cpu",
        sglang_version="0.5.20",
        enable_lora=True,
        max_lora_rank=8,
        lora_target_modules=["all"],
    ) as engine:
        yield engine


@pytest.fixture(params=["0.5.23", pytest.param("0.5.20", marks=pytest.mark.slow)])
def any_lora_engine(request):
    newest = request.param == "0.5.23"
    return request.getfixturevalue("lora_engine" if newest else "older_lora_engine")


def load(engine, name, model, **options):
    tensors, config = adapter_from_model(model)
    return engine.load_adapter(name, tensors=tensors, config=config, **options)


def ask(engine, adapter=None, prompt=PROMPT, **settings):
    (answer,) = engine.generate(
        input_ids=prompt,
        sampling_params={**SETTINGS, **settings},
        return_logprobs=True,
        adapter=adapter,
    )
    return answer


def held(engine) -> list[str]:
    """What the servers say that they hold, under our names."""
    (names,) = run_sync(engine.control.adapters())
    return sorted(name.partition("#")[0].rstrip("~@") for name in names)


def running(engine) -> int:
    return run_sync(engine.control.running_requests())


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["v_proj"], "r": 8},
        {"target_modules": ["k_proj", "up_proj"]},
        {"target_modules": "all-linear", "r": 2, "lora_alpha": 3},
        {"target_modules": r".*\.0\..*(gate|down)_proj"},
        {"target_modules": ["q_proj", "o_proj"], "use_rslora": True},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["v_proj", "embed_tokens"]},
    ],
    ids=str,
)
def test_an_adapter_from_memory_is_pefts(lora_engine, peft_models, config):
    model = peft_models.make(1, **config)
    load(lora_engine, "style", model)
    answer = ask(lora_engine, "style")
    assert peft_models.difference(answer, PROMPT, model) < TOLERANCE
    assert (answer.adapter, answer.adapter_version) == ("style", None)
    with model.disable_adapter():
        assert peft_models.difference(answer, PROMPT, model) > 0.01


def test_prompts_are_scored_with_it(lora_engine, peft_models):
    model = peft_models.make(2)
    load(lora_engine, "style", model)
    (answer,) = lora_engine.generate(
        input_ids=PROMPT,
        sampling_params={"max_new_tokens": 0},
        return_prompt_logprobs=True,
        adapter="style",
    )
    with torch.no_grad():
        log_probs = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    expected = log_probs.gather(-1, torch.tensor(PROMPT)[1:, None])[:, 0]
    found = torch.tensor(answer.prompt_log_probs[1:])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_an_adapter_from_a_folder(lora_engine, peft_models, tmp_path):
    model = peft_models.make(3, target_modules="all-linear")
    model.save_pretrained(tmp_path)
    lora_engine.load_adapter("style", path=tmp_path)
    answer = ask(lora_engine, "style")
    assert peft_models.difference(answer, PROMPT, model) < TOLERANCE


def test_a_folder_that_the_servers_read(lora_engine, peft_models, tmp_path):
    """The verb behind a path that cannot be read here."""
    model = peft_models.make(4)
    model.save_pretrained(tmp_path)
    control = lora_engine.control
    (outcome,) = run_sync(control.load_lora_adapter("there", str(tmp_path))).values()
    assert outcome is None
    # Nobody told this engine: it asks the servers.
    answer = ask(lora_engine, "there")
    assert peft_models.difference(answer, PROMPT, model) < TOLERANCE
    (again,) = run_sync(control.load_lora_adapter("there", str(tmp_path))).values()
    assert isinstance(again, RequestRefusedError)
    assert "already loaded" in str(again)
    lora_engine.unload_adapter("there")


def test_each_prompt_selects_its_own(lora_engine, peft_models, hf_model):
    models = {"a": peft_models.make(5), "b": peft_models.make(6), "": hf_model}
    for name in ("a", "b"):
        load(lora_engine, name, models[name])
    selected = ["a", "", "b", None, "a"]
    lora_engine.default_adapter = "b"
    answers = lora_engine.generate(
        input_ids=[PROMPT] * len(selected),
        sampling_params=SETTINGS,
        return_logprobs=True,
        adapter=selected,
    )
    for name, answer in zip(selected, answers, strict=True):
        model = models["b" if name is None else name]
        assert peft_models.difference(answer, PROMPT, model) < TOLERANCE
    lora_engine.default_adapter = None
    assert ask(lora_engine).adapter is None
    stream = lora_engine.generate_iter(
        input_ids=[PROMPT] * 2, sampling_params=SETTINGS, adapter=["a", ""]
    )
    assert {index: answer.adapter for index, answer in stream} == {0: "a", 1: None}
    with pytest.raises(ConfigurationError, match="2 adapter values"):
        lora_engine.generate(input_ids=[PROMPT], adapter=["a", "b"])


def test_samples_of_long_prompts_are_computed_with_their_own(lora_engine, peft_models):
    """Prompts that a batch has several times are computed once for each adapter."""
    models = {"a": peft_models.make(7), "b": peft_models.make(8)}
    for name, model in models.items():
        load(lora_engine, name, model)
    prompt = PROMPT * 6
    selected = ["a", "b"] * 3
    answers = lora_engine.generate(
        input_ids=[prompt] * 6,
        sampling_params=SETTINGS,
        return_logprobs=True,
        adapter=selected,
    )
    for name, answer in zip(selected, answers, strict=True):
        assert peft_models.difference(answer, prompt, models[name]) < TOLERANCE
        assert answer.cached_tokens > 0


@pytest.mark.slow
def test_a_replacement_leaves_requests_under_way_alone(any_lora_engine, peft_models):
    engine = any_lora_engine
    old, new = peft_models.make(9), peft_models.make(10)
    load(engine, "policy", old, version="6", default=True)
    with ThreadPoolExecutor() as pool:
        begun = pool.submit(ask, engine, max_new_tokens=LONG)
        wait_until(lambda: running(engine) == 1)
        load(engine, "policy", new, version="7", default=True)
        after = ask(engine)
        assert not begun.done()
        assert held(engine) == ["policy@6", "policy@7"]
        before = begun.result()
    assert peft_models.difference(after, PROMPT, new) < TOLERANCE
    assert after.versions == (VersionSpan(version="7", start=0, end=8),)
    assert peft_models.difference(before, PROMPT, old) < TOLERANCE
    assert before.versions == (VersionSpan(version="6", start=0, end=LONG),)
    wait_until(lambda: held(engine) == ["policy@7"])
    engine.unload_adapter("policy")
    assert engine.default_adapter is None
    assert held(engine) == []


def test_no_prefix_of_an_older_adapter_is_reused(lora_engine, peft_models, hf_model):
    model = peft_models.make(11)
    ask(lora_engine)
    for seed in (12, 13):
        peft_models.change(model, seed)
        load(lora_engine, "policy", model)
        first, second = (ask(lora_engine, "policy") for _ in range(2))
        assert (first.cached_tokens, second.cached_tokens) == (0, len(PROMPT) - 1)
        for answer in (first, second):
            assert peft_models.difference(answer, PROMPT, model) < TOLERANCE
    base = ask(lora_engine)
    assert base.cached_tokens > 0
    assert peft_models.difference(base, PROMPT, hf_model) < TOLERANCE


@pytest.mark.slow
def test_a_replacement_while_generation_is_paused(lora_engine, peft_models):
    old, new = peft_models.make(14), peft_models.make(15)
    load(lora_engine, "policy", old)
    with ThreadPoolExecutor() as pool:
        begun = pool.submit(ask, lora_engine, "policy", max_new_tokens=LONG)
        wait_until(lambda: running(lora_engine) == 1)
        run_sync(lora_engine.control.pause("retract"))
        try:
            load(lora_engine, "policy", new, timeout=20)
        finally:
            run_sync(lora_engine.control.resume())
        assert peft_models.difference(begun.result(), PROMPT, old) < TOLERANCE
    answer = ask(lora_engine, "policy")
    assert peft_models.difference(answer, PROMPT, new) < TOLERANCE


@pytest.mark.slow
def test_an_unload_waits_for_its_requests(lora_engine, peft_models):
    model = peft_models.make(16)
    load(lora_engine, "policy", model)
    with ThreadPoolExecutor() as pool:
        begun = pool.submit(ask, lora_engine, "policy", max_new_tokens=1000)
        wait_until(lambda: running(lora_engine) == 1)
        with pytest.raises(ServerTimeoutError, match="1 requests used .*'policy'"):
            lora_engine.unload_adapter("policy", timeout=0.1)
        with pytest.raises(ConfigurationError, match="no LoRA adapter 'policy'"):
            ask(lora_engine, "policy")
        assert peft_models.difference(begun.result(), PROMPT, model) < TOLERANCE
    wait_until(lambda: held(lora_engine) == [])


def test_an_unknown_adapter_is_refused_before_anything_is_sent(
    lora_engine, peft_models
):
    load(lora_engine, "style", peft_models.make(17))
    before = lora_engine.stats().completed
    with pytest.raises(ConfigurationError, match="'stile'.*loaded: 'style'"):
        lora_engine.generate(input_ids=[PROMPT] * 2, adapter=["style", "stile"])
    with pytest.raises(ConfigurationError, match="'stile'"):
        lora_engine.default_adapter = "stile"
    with pytest.raises(ConfigurationError, match="'stile'"):
        lora_engine.unload_adapter("stile")
    assert lora_engine.stats().completed == before


def test_openai_requests_carry_the_adapter(lora_engine, peft_models):
    load(lora_engine, "style", peft_models.make(18))
    chat = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 12,
        "temperature": 0,
    }

    def text(**content) -> str:
        answer = lora_engine.chat_completion({**chat, **content})
        return answer["choices"][0]["message"]["content"]

    base, styled = text(), text(lora_path="style")
    assert base != styled
    lora_engine.default_adapter = "style"
    assert text() == styled
    assert text(lora_path="") == base
    with pytest.raises(ConfigurationError, match="'stile'"):
        text(lora_path="stile")


def test_pinned_adapters_are_limited(lora_engine, peft_models):
    models = [peft_models.make(seed) for seed in (19, 20, 21)]
    for name, model in zip("ab", models, strict=False):
        assert load(lora_engine, name, model, pinned=True).pinned
    with pytest.raises(ConfigurationError, match="pin all slots.*max_loras_per_batch"):
        load(lora_engine, "c", models[2], pinned=True)
    load(lora_engine, "c", models[2])
    for name, model in zip("abc", models, strict=True):
        answer = ask(lora_engine, name)
        assert peft_models.difference(answer, PROMPT, model) < TOLERANCE


def test_no_room_is_said_before_an_adapter_is_lost(lora_engine, peft_models):
    model = peft_models.make(22)
    for name in "abc":
        load(lora_engine, name, model)
    other = peft_models.make(23)
    for name in "ad":
        with pytest.raises(ConfigurationError, match="max_loaded_loras=4"):
            load(lora_engine, name, other)
    for name in "abc":
        answer = ask(lora_engine, name)
        assert peft_models.difference(answer, PROMPT, model) < TOLERANCE
    lora_engine.unload_adapter("b")
    load(lora_engine, "a", other)
    answer = ask(lora_engine, "a")
    assert peft_models.difference(answer, PROMPT, other) < TOLERANCE


def test_many_replacements_do_not_wait_for_the_room(lora_engine, peft_models):
    model = peft_models.make(24)
    for version in range(10):
        peft_models.change(model, version)
        load(lora_engine, "policy", model, version=str(version), timeout=10)
        answer = ask(lora_engine, "policy")
        assert peft_models.difference(answer, PROMPT, model) < TOLERANCE
        assert answer.versions[0].version == str(version)


def test_pinned_replacements_do_not_wait_for_the_room(lora_engine, peft_models):
    model = peft_models.make(35)
    for version in range(5):
        peft_models.change(model, version)
        load(lora_engine, "policy", model, pinned=True, timeout=10)
        answer = ask(lora_engine, "policy")
        assert peft_models.difference(answer, PROMPT, model) < TOLERANCE


def test_adapters_that_do_not_fit_are_refused_and_the_server_lives(
    lora_engine, peft_models
):
    tensors, config = adapter_from_model(peft_models.make(25))
    one = next(iter(tensors))

    def refused(error, match, tensors=tensors, **changes):
        with pytest.raises(error, match=match):
            lora_engine.load_adapter(
                "bad", tensors=tensors, config={**config, **changes}
            )

    refused(ConfigurationError, "max_lora_rank=16", r=16)
    refused(WeightMismatchError, r"\(4, 64\).*r=2", r=2)
    refused(ConfigurationError, "r=None", r=None)
    refused(ConfigurationError, "lora_alpha=nan", lora_alpha=float("nan"))
    refused(ConfigurationError, "no DoRA", use_dora=True)
    refused(ConfigurationError, "modules_to_save", modules_to_save=["lm_head"])
    refused(ConfigurationError, "biases", bias="all")
    refused(ConfigurationError, "IA3", peft_type="IA3")
    refused(ConfigurationError, "rank_pattern", rank_pattern={"q_proj": 2})
    refused(WeightMismatchError, "no tensor", tensors={})
    missing = {name: value for name, value in tensors.items() if name != one}
    refused(WeightMismatchError, "has no lora_A", tensors=missing)
    wide = {**tensors, one: torch.zeros(4, 999)}
    refused(WeightMismatchError, "999", tensors=wide)
    other = {name.replace("q_proj", "x_proj"): value for name, value in tensors.items()}
    refused(WeightMismatchError, "has no module .*x_proj", tensors=other)
    deep = {name.replace("s.1.", "s.7."): value for name, value in tensors.items()}
    refused(WeightMismatchError, "layers.7", tensors=deep)
    refused(
        WeightMismatchError,
        "does not belong to a LoRA",
        tensors={"model.norm.weight": wide[one]},
    )
    refused(ConfigurationError, "mapping", tensors=[1])
    with pytest.raises(ConfigurationError, match="config="):
        lora_engine.load_adapter("bad", tensors=tensors)
    with pytest.raises(ConfigurationError, match="either"):
        lora_engine.load_adapter("bad")
    with pytest.raises(ConfigurationError, match="leave config"):
        lora_engine.load_adapter("bad", path=".", config=config)
    with pytest.raises(ConfigurationError, match="is not a name"):
        lora_engine.load_adapter("a@1", tensors=tensors, config=config)
    with pytest.raises(ConfigurationError, match="version="):
        lora_engine.load_adapter("a", tensors=tensors, config=config, version="1#2")
    with pytest.raises(ConfigurationError, match="version=5"):
        lora_engine.load_adapter("a", tensors=tensors, config=config, version=5)
    for budget in ("3", -1, 0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="timeout must be a positive"):
            lora_engine.load_adapter(
                "a", tensors=tensors, config=config, timeout=budget
            )
        with pytest.raises(ConfigurationError, match="timeout must be a positive"):
            lora_engine.unload_adapter("a", timeout=budget)
    assert held(lora_engine) == []
    assert ask(lora_engine).adapter is None


def test_folders_that_are_no_adapters(lora_engine, tmp_path):
    with pytest.raises(ConfigurationError, match=r"no adapter_config\.json"):
        lora_engine.load_adapter("bad", path=tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="no adapter_model"):
        lora_engine.load_adapter("bad", path=tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        lora_engine.load_adapter("bad", path=tmp_path)
    # Neither this machine nor the servers have it.
    with pytest.raises(ConfigurationError, match="was refused.*max_lora_rank=8"):
        lora_engine.load_adapter("bad", path=tmp_path / "elsewhere")
    assert held(lora_engine) == []


def test_refusals_of_the_server_alone_are_errors(lora_engine, peft_models, tmp_path):
    peft_models.make(26, r=16).save_pretrained(tmp_path)
    control = lora_engine.control
    (outcome,) = run_sync(control.load_lora_adapter("big", str(tmp_path))).values()
    assert isinstance(outcome, RequestRefusedError)
    assert "rank 16 is incompatible" in str(outcome)
    (outcome,) = run_sync(control.unload_lora_adapter("big")).values()
    assert "does not exist" in str(outcome)


def test_copies_of_the_engine_find_what_was_published(lora_engine, peft_models):
    copy = pickle.loads(pickle.dumps(lora_engine))
    model = peft_models.make(27)
    load(lora_engine, "policy", model, version="1", default=True)
    with AsyncSGLang.connect(lora_engine.server_url) as other:
        for engine in (copy, other):
            answer = ask(engine)
            assert peft_models.difference(answer, PROMPT, model) < TOLERANCE
            assert answer.versions == (VersionSpan(version="1", start=0, end=8),)
        peft_models.change(model, 28)
        load(lora_engine, "policy", model, version="2", default=True)
        for engine in (copy, other):
            wait_until(lambda engine=engine: ask(engine).adapter_version == "2")
            answer = ask(engine)
            assert peft_models.difference(answer, PROMPT, model) < TOLERANCE
            assert ask(engine, "").adapter is None
    late = pickle.loads(pickle.dumps(lora_engine))
    assert late.default_adapter == "policy"
    assert late.adapters == lora_engine.adapters
    for engine in (copy, late):
        engine.shutdown()


def test_a_server_without_lora(engine):
    with pytest.raises(UnsupportedByServerError, match="enable_lora=True"):
        engine.load_adapter("style", tensors={}, config={})
    with pytest.raises(UnsupportedByServerError, match="enable_lora=True"):
        engine.generate(input_ids=PROMPT, adapter="style")
    with pytest.raises(UnsupportedByServerError, match="enable_lora=True"):
        engine.default_adapter = "style"
    engine.default_adapter = None
    (answer,) = engine.generate(input_ids=PROMPT, adapter="")
    assert answer.adapter is None


def test_copies_of_the_engine_notice_that_theirs_was_dropped(
    lora_engine, peft_models, hf_model
):
    """In the midst of their work, and nobody tells them."""
    copy = pickle.loads(pickle.dumps(lora_engine))
    with AsyncSGLang.connect(lora_engine.server_url) as other:
        for seed in (36, 37):
            model = peft_models.make(seed)
            load(lora_engine, "policy", model, version=str(seed), default=True)
            for engine in (copy, other):
                wait_until(lambda e=engine, v=str(seed): ask(e).adapter_version == v)
            # The older one lingers when both are dropped.
            assert len(held(lora_engine)) == 2 - (seed == 36)
        lora_engine.unload_adapter("policy")
        assert held(lora_engine) == []
        for engine in (copy, other):
            with pytest.raises(ConfigurationError, match="'policy'"):
                ask(engine, "policy")
            answer = ask(engine)
            assert answer.adapter is None
            assert peft_models.difference(answer, PROMPT, hf_model) < TOLERANCE
            assert engine.default_adapter is None
        # And that there is one again.
        load(lora_engine, "policy", model, version="38", default=True)
        for engine in (copy, other):
            wait_until(lambda e=engine: ask(e).adapter_version == "38")
    copy.shutdown()


def test_a_request_is_sent_again_without_what_was_dropped(lora_engine, peft_models):
    """Between two looks at what is loaded, the server's refusal tells."""
    load(lora_engine, "policy", peft_models.make(38), version="1", default=True)
    with AsyncSGLang.connect(lora_engine.server_url) as other:
        for _ in range(3):
            assert ask(other).adapter_version == "1"
            lora_engine.unload_adapter("policy")
            assert ask(other).adapter is None
            load(lora_engine, "policy", peft_models.make(38), version="1", default=True)
            wait_until(lambda: ask(other).adapter_version == "1")


def test_orphaned_adapters_are_evicted(lora_engine, peft_models):
    """One that was killed has not dropped what it had replaced."""
    old, new = peft_models.make(39), peft_models.make(40)
    tensors, config = adapter_from_model(old)
    content = prepare_adapter(
        path=None,
        tensors=tensors,
        config=config,
        capabilities=lora_engine.capabilities,
        get_metadata=lora_engine.get_model_metadata,
    )
    left = [f"policy@{number}#{number:x}" for number in (187, 188, 189)]
    for name in left:
        (outcome,) = run_sync(
            lora_engine.control.load_lora_adapter(
                name, tensors=content.tensors, config=content.config
            )
        ).values()
        assert outcome is None
    with AsyncSGLang.connect(lora_engine.server_url) as trainer:
        assert ask(trainer).adapter_version == "189"
        load(trainer, "policy", new, version="190", default=True, timeout=30)
        assert peft_models.difference(ask(trainer), PROMPT, new) < TOLERANCE
        assert held(trainer) == ["policy@189", "policy@190"]
        trainer.unload_adapter("policy")
        wait_until(lambda: held(trainer) == [])


@pytest.fixture
def engine_to_kill(tiny_model_path):
    """One whose servers have the weights of their files: no sender has to come."""
    with AsyncSGLang.from_pretrained(
        tiny_model_path,
        device="cpu",
        enable_lora=True,
        max_lora_rank=8,
        lora_target_modules=["all"],
    ) as engine:
        yield engine


@pytest.mark.slow
def test_a_server_that_was_started_again_gets_its_adapters(engine_to_kill, peft_models):
    model = peft_models.make(29)
    load(engine_to_kill, "policy", model, version="5", default=True)
    (process,) = engine_to_kill.servers
    os.kill(process.pid, signal.SIGKILL)
    # Without an adapter it would answer as the base model, or refuse; it does neither.
    wait_until(lambda: engine_to_kill.stats().servers[0].state != "serving")
    wait_until(lambda: engine_to_kill.stats().servers[0].state == "serving", 300)
    answer = ask(engine_to_kill)
    assert peft_models.difference(answer, PROMPT, model) < TOLERANCE
    assert answer.versions == (VersionSpan(version="5", start=0, end=8),)


@pytest.fixture
def two(start_fakes):
    return start_fakes(2, enable_lora=True)


@pytest.fixture
def engine_of_two(two):
    with AsyncSGLang.connect(urls=[fake.url for fake in two]) as engine:
        yield engine


def names(fake) -> list[str]:
    return [name.partition("#")[0] for name in fake.adapters]


def sent_with(two) -> set[str | None]:
    sent = (payload for fake in two for payload in fake.payloads())
    return {n and n.partition("#")[0] for p in sent for n in p.get("lora_path", [None])}


def test_every_server_gets_the_adapter(engine_of_two, two, peft_models):
    load(engine_of_two, "policy", peft_models.make(30), version="1", default=True)
    assert [names(fake) for fake in two] == [["policy@1"]] * 2
    (first,), (second,) = (f.payloads("/load_lora_adapter_from_tensors") for f in two)
    assert first == second
    assert len(first["serialized_named_tensors"]) == 1
    engine_of_two.generate(input_ids=[[5]] * 6)
    assert sent_with(two) == {"policy@1"}
    engine_of_two.unload_adapter("policy")
    assert [names(fake) for fake in two] == [[], []]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("error_500", ServerUnavailableError),
        ("hang_up", ServerUnavailableError),
        ("hang", ServerTimeoutError),
    ],
)
def test_an_adapter_that_one_server_does_not_take(
    engine_of_two, two, peft_models, fault, error
):
    """Requests use the old one, and the other server drops the new one again."""
    model = peft_models.make(31)
    load(engine_of_two, "policy", model, version="1", default=True)
    with two[1].misbehaving(fault, "/load_lora_adapter_from_tensors"):
        with pytest.raises(error, match=two[1].url):
            load(engine_of_two, "policy", model, version="2", default=True, timeout=1)
    engine_of_two.generate(input_ids=[[5]] * 6)
    assert sent_with(two) == {"policy@1"}
    wait_until(lambda: names(two[0]) == ["policy@1"])
    load(engine_of_two, "policy", model, version="2", default=True)
    assert engine_of_two.adapters["policy"].version == "2"
    assert all("policy@2" in names(fake) for fake in two)


def test_a_server_that_does_not_drop_an_adapter_holds_up_nobody(
    engine_of_two, two, peft_models
):
    load(engine_of_two, "policy", peft_models.make(32))
    with two[1].misbehaving("hang", "/unload_lora_adapter"):
        engine_of_two.unload_adapter("policy", timeout=1)
        engine_of_two.generate(input_ids=[[5]] * 2, adapter="")
        load(engine_of_two, "policy", peft_models.make(32))


def test_replaced_adapters_are_dropped_at_shutdown(two, peft_models):
    with AsyncSGLang.connect(urls=[fake.url for fake in two]) as engine:
        for version in "12":
            load(engine, "policy", peft_models.make(33), version=version)
        assert names(two[0]) == ["policy~1", "policy~2"]
    assert [names(fake) for fake in two] == [["policy~2"]] * 2


def test_calls_from_many_threads_take_turns(engine_of_two, two, peft_models):
    model = peft_models.make(34)

    def publish(version: int) -> None:
        load(engine_of_two, "policy", model, version=str(version), default=True)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(publish, range(8)))
    newest = engine_of_two.adapters["policy"]
    assert all(newest.served_as in fake.adapters for fake in two)
