"""The wrapper on a real engine, against Hugging Face on the same model."""

from __future__ import annotations

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Text, Tokens

from torchrl_sglang import SGLangWeightSyncScheme, SGLangWrapper
from torchrl_sglang.errors import (
    ConfigurationError,
    SGLangError,
    UnsupportedByServerError,
)
from torchrl_sglang.testing.tiny_model import make_tiny_model

TOLERANCE = 1e-4
TEXTS = ["hi", "what is 2+2?", "x"]
NEW_TOKENS = 6
GREEDY = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0}


def make_input(mode: str, tokenizer) -> TensorDict:
    if mode == "tokens":
        ids = [torch.tensor(tokenizer.encode(text)) for text in TEXTS]
        return lazy_stack([TensorDict(tokens=Tokens(prompt=row)) for row in ids])
    chats = History.from_chats([[{"role": "user", "content": text}] for text in TEXTS])
    size = len(TEXTS)
    return TensorDict(
        history=ChatHistory(prompt=chats, batch_size=size), batch_size=size
    )


def rows(td, *key) -> list[torch.Tensor]:
    return list(td.get(key, as_list=True))


def test_sampled_log_probs_are_the_models_own(engine, tokenizer, score):
    """Whatever the temperature."""
    wrapper = SGLangWrapper(
        engine,
        input_mode="tokens",
        generate_kwargs={"max_new_tokens": 12, "temperature": 2.0},
        return_generation_info=True,
    )
    out = wrapper(make_input("tokens", tokenizer))
    for full, log_probs in zip(
        rows(out, "tokens", "full"),
        rows(out, "log_probs", "response"),
        strict=True,
    ):
        reference = score(full)[-len(log_probs) :]
        torch.testing.assert_close(log_probs, reference, atol=TOLERANCE, rtol=0)
    assert set(out["generation_info"].logprobs_mode) == {"model"}
    drawn = wrapper.get_new_version(logprobs_mode="sampling")
    with pytest.raises(UnsupportedByServerError, match="SGLANG_RETURN_ORIGINAL_LOG"):
        drawn(make_input("tokens", tokenizer))
    with pytest.raises(ConfigurationError, match="logprobs_mode='raw'"):
        wrapper.get_new_version(logprobs_mode="raw")


def test_samples_of_a_group_differ(engine, tokenizer):
    kwargs = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 1.5}
    wrapper = SGLangWrapper(
        engine, input_mode="tokens", num_samples=4, generate_kwargs=kwargs
    )
    out = wrapper(make_input("tokens", tokenizer))
    for group in out.unbind(0):
        answers = {tuple(row.tolist()) for row in rows(group, "tokens", "response")}
        assert len(answers) == 4


def test_padded_tokens_are_not_sent(engine, tokenizer, score):
    """Only what the mask covers, or else leading padding, is taken out."""
    ids = tokenizer.encode("abc")
    pad = tokenizer.pad_token_id
    masked = TensorDict(
        tokens=Tokens(full=torch.tensor([[pad, *ids, pad]]), batch_size=(1,)),
        attention_mask=torch.tensor([[0, 1, 1, 1, 0]]),
        batch_size=(1,),
    )
    wrapper = SGLangWrapper(engine, input_mode="tokens", generate=False)
    out = wrapper(masked)
    assert rows(out, "tokens", "full")[0].tolist() == ids
    bare = TensorDict(
        tokens=Tokens(full=torch.tensor([[pad, *ids, pad]]), batch_size=(1,)),
        batch_size=(1,),
    )
    out = wrapper(bare)
    assert rows(out, "tokens", "full")[0].tolist() == [*ids, pad]
    torch.testing.assert_close(
        rows(out, "log_probs", "full")[0], score([*ids, pad]), atol=TOLERANCE, rtol=0
    )


def test_turn_end_stays_out_of_the_history(engine, tokenizer):
    """The template writes the end of turn, so the content must not hold it too."""
    end = tokenizer.eos_token_id
    wrapper = SGLangWrapper(
        engine,
        generate_kwargs={"max_new_tokens": 4, "logit_bias": {end: 100.0}},
    )
    out = wrapper(make_input("history", tokenizer))
    assert out["text"].response == [tokenizer.eos_token] * len(TEXTS)
    for index, full in enumerate(rows(out, "tokens", "full")):
        history = out["history"].full[index]
        assert history.content[-1] == ""
        again = history.apply_chat_template(
            tokenizer=tokenizer, add_generation_prompt=False, tokenize=True
        )
        again = again[0] if isinstance(again, list) else again.reshape(-1)
        # The template adds a line break behind the end of turn.
        assert again.tolist()[: len(full)] == full.tolist()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_new_tokens": 1},  # As long as it may be, so the server says "length".
        {"max_new_tokens": 4, "stop_sequences": ["<|im_end|>"], "ignore_eos": True},
    ],
)
def test_every_way_to_end_a_turn(engine, tokenizer, kwargs):
    assert tokenizer.eos_token_id == 2
    wrapper = SGLangWrapper(
        engine,
        return_generation_info=True,
        generate_kwargs={**kwargs, "logit_bias": {2: 100.0}},
    )
    out = wrapper(make_input("history", tokenizer))
    assert out["text"].response == [tokenizer.eos_token] * len(TEXTS)
    assert [full.content[-1] for full in out["history"].full.unbind(0)] == [""] * 3
    assert out["generation_info"].finish_reason == ["stop"] * len(TEXTS)
    assert not out["generation_info"].truncated.any()


def test_samples_share_no_history(engine, tokenizer):
    wrapper = SGLangWrapper(engine, num_samples=2, generate_kwargs=GREEDY)
    td = make_input("history", tokenizer)
    out = wrapper(td)
    message = History(role="user", content="more", batch_size=())
    out[0, 0]["history"].prompt.append(message)
    assert len(out[0, 0]["history"].prompt.content) == 2
    assert len(out[0, 1]["history"].prompt.content) == 1
    assert len(td["history"].prompt[0].content) == 1


def test_overrides_of_one_call(engine, tokenizer):
    wrapper = SGLangWrapper(
        engine,
        input_mode="tokens",
        generate_kwargs={"max_new_tokens": 3, "ignore_eos": True},
    )
    out = wrapper(make_input("tokens", tokenizer), max_new_tokens=5)
    assert [len(row) for row in rows(out, "tokens", "response")] == [5, 5, 5]
    out = wrapper(make_input("tokens", tokenizer))
    assert [len(row) for row in rows(out, "tokens", "response")] == [3, 3, 3]
    # A call wins over the defaults, whatever name either of them uses.
    fixed = wrapper.get_new_version(
        generate_kwargs={"do_sample": False, "stop_sequences": ["a"], "seed": 1}
    )
    merged = fixed._merge({"temperature": 0.7, "stop": ["b"], "sampling_seed": 2})
    assert merged.temperature == 0.7
    assert merged.engine["stop"] == ["b"]
    assert merged.engine["sampling_seed"] == 2
    assert fixed.sampling_params.temperature == 0.0


def test_new_version_keeps_other_arguments(engine, tokenizer):
    wrapper = SGLangWrapper(
        engine,
        input_mode="text",
        pad_output=True,
        generate_kwargs={"max_new_tokens": 3, "min_p": 0.25, "top_k": 20},
        tokens_key="ids",
        logprobs_mode="behaviour",
    )
    scoring = wrapper.get_new_version(generate=False)
    # It scores with the model's own distribution, and says so.
    assert scoring.logprobs_mode == "model"
    with pytest.raises(ConfigurationError, match="'behaviour' is of tokens that are"):
        wrapper.get_new_version(generate=False, logprobs_mode="behaviour")
    assert scoring.in_keys == [("text", "full")]
    assert scoring.pad_output
    assert scoring.tokens_key == "ids"
    assert scoring.sampling_params.engine["min_p"] == 0.25
    assert wrapper.get_new_version(pad_output=False).pad_output is False
    group = SGLangWrapper(engine, generate_kwargs={"n": 4})
    assert group.get_new_version(num_samples=2).num_samples == 2
    assert group.get_new_version(generate=False, inplace=True).inplace is True


def test_an_address_is_resolved_once(engine):
    """A new version must not connect, or worse start a server, once more."""
    wrapper = SGLangWrapper(engine.server_url)
    assert wrapper.model.server_url == engine.server_url
    assert wrapper.get_new_version(generate=False).model is wrapper.model


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))]
)
@pytest.mark.parametrize("batching", [False, True])
def test_copies_work(engine, tokenizer, clone, batching):
    wrapper = SGLangWrapper(
        engine, input_mode="tokens", generate_kwargs=GREEDY, batching=batching
    )

    class Collector:
        pass

    collector = Collector()
    wrapper.register_collector(collector)
    twin = clone(wrapper)
    assert twin.collector is None
    assert twin.get_batching_state()["batching_enabled"] is batching
    out = twin(make_input("tokens", tokenizer))
    reference = wrapper(make_input("tokens", tokenizer))
    for one, other in zip(
        rows(out, "tokens", "full"), rows(reference, "tokens", "full"), strict=True
    ):
        assert one.tolist() == other.tolist()


def test_the_callers_tokenizer_is_not_modified(engine, tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    wrapper = SGLangWrapper(engine, tokenizer=bare, input_mode="text", pad_output=True)
    assert bare.pad_token is None
    assert wrapper.padding_value == bare.eos_token_id


def test_log_prob(engine, tokenizer, score):
    wrapper = SGLangWrapper(engine, input_mode="tokens", generate=False)
    sequences = [torch.tensor(tokenizer.encode(text)) for text in TEXTS]
    td = lazy_stack([TensorDict(tokens=Tokens(full=ids)) for ids in sequences])
    found = wrapper.log_prob(td, as_list=True)
    for ids, log_probs in zip(sequences, found, strict=True):
        torch.testing.assert_close(log_probs, score(ids), atol=TOLERANCE, rtol=0)
    assert "log_probs" not in td.keys()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_new_tokens": "64"}, ["max_new_tokens='64'", "str", "must be int"]),
        ({"max_new_tokens": 64.0}, ["max_new_tokens=64.0", "float", "must be int"]),
        ({"top_k": 2.5}, ["top_k=2.5", "must be int"]),
        ({"min_p": 2}, ["min_p=2", "out of range"]),
        ({"stop": 5}, ["stop=5"]),
        ({"stop_token_ids": [10**6]}, ["outside the vocabulary"]),
        ({"seed": 2**63}, ["seed=", "out of range"]),
        ({"regex": "a+"}, ["grammar"]),
        ({"max_completion_length": 64}, ["Did you mean 'max_new_tokens'?"]),
        ({"max_completion_tokens": 64}, ["Did you mean 'max_new_tokens'?"]),
        ({"response_length": 64}, ["Did you mean 'max_new_tokens'?"]),
        ({"max_length": 64}, ["Did you mean 'max_new_tokens'?"]),
        ({"stop_strings": ["a"]}, ["Did you mean 'stop'?"]),
        ({"num_generations": 8}, ["num_samples"]),
    ],
)
def test_invalid_sampling_parameters_are_refused_at_construction(
    fake_engine, given, words
):
    with pytest.raises(SGLangError) as caught:
        SGLangWrapper(fake_engine, generate_kwargs=given)
    assert all(word in str(caught.value) for word in words)
    if "not a generation argument" not in str(caught.value):
        # Scoring samples nothing.
        SGLangWrapper(fake_engine, generate_kwargs=given, generate=False)


@pytest.mark.parametrize(
    ("mode", "container"),
    [("history", "ChatHistory"), ("text", "Text"), ("tokens", "Tokens")],
)
def test_a_missing_input_names_its_container(fake_engine, mode, container):
    wrapper = SGLangWrapper(fake_engine, input_mode=mode)
    with pytest.raises(ConfigurationError, match=rf"\['query'\].*{container}\(prompt"):
        wrapper(TensorDict(query=["a"], batch_size=1))


def test_wrong_inputs(engine, tokenizer):
    wrapper = SGLangWrapper(engine, input_mode="tokens", generate_kwargs=GREEDY)
    good = make_input("tokens", tokenizer)
    with pytest.raises(ConfigurationError, match="outside the vocabulary"):
        wrapper(
            TensorDict(
                tokens=Tokens(prompt=torch.tensor([[5, 99999]]), batch_size=1),
                batch_size=1,
            )
        )
    with pytest.raises(ConfigurationError, match="no room"):
        wrapper(
            TensorDict(
                tokens=Tokens(prompt=torch.full((1, 5000), 5), batch_size=1),
                batch_size=1,
            )
        )
    with pytest.raises(ConfigurationError, match="is empty"):
        SGLangWrapper(engine, input_mode="text")(
            TensorDict(text=Text(prompt=[""], batch_size=1), batch_size=1)
        )
    out = wrapper(good)
    assert not math.isnan(rows(out, "log_probs", "response")[0][0].item())


def test_threads_share_batches(engine, tokenizer, score):
    """Callers that arrive together; a bad prompt fails its own caller only."""
    wrapper = SGLangWrapper(
        engine,
        input_mode="tokens",
        generate_kwargs=GREEDY,
        min_batch_size=4,
        batching_timeout=60.0,
    )
    assert wrapper.batching
    twin = pickle.loads(pickle.dumps(wrapper))
    assert twin.get_batching_state()["min_batch_size"] == 4
    assert wrapper.get_new_version(pad_output=True).get_batching_state()[
        "batching_enabled"
    ]
    inputs = [
        TensorDict(tokens=Tokens(prompt=torch.tensor(ids)))
        for ids in ([5, 6], [7], [8, 9, 10], [5, 99999])
    ]

    def call(td):
        try:
            return wrapper(td)
        except ConfigurationError as error:
            return error

    with ThreadPoolExecutor(len(inputs)) as pool:
        *good, bad = pool.map(call, inputs)
    assert isinstance(bad, ConfigurationError)
    assert "99999" in str(bad)
    for out in good:
        full = out["tokens", "full"]
        length = len(out["tokens", "prompt"])
        torch.testing.assert_close(
            out["log_probs", "response"],
            score(full.tolist())[length:],
            atol=TOLERANCE,
            rtol=0,
        )
    assert wrapper.get_batching_state()["queue_size"] == 0


@pytest.mark.parametrize("pad_output", [False, True], ids=["ragged", "padded"])
def test_generation_info(restored_engine, tokenizer, pad_output):
    """Why it ended, what was cached, and whose weights wrote each token."""
    engine = restored_engine
    end = tokenizer.eos_token_id
    wrapper = SGLangWrapper(
        engine,
        input_mode="tokens",
        pad_output=pad_output,
        return_generation_info=True,
        generate_kwargs={"max_new_tokens": 4, "ignore_eos": True},
    )
    assert wrapper.out_keys[-1] == "generation_info"
    sender = SGLangWeightSyncScheme(engine).create_sender()
    model = make_tiny_model(tokenizer, seed=21)
    version = int(sender.update_weights(model).version)
    out = wrapper(make_input("tokens", tokenizer))
    info = out["generation_info"]
    assert info.finish_reason == ["length"] * len(TEXTS)
    assert info.truncated.tolist() == [True] * len(TEXTS)
    assert info.cached_tokens.tolist() == [0] * len(TEXTS)
    for versions in rows(out, "generation_info", "weight_version"):
        assert versions.tolist() == [version] * 4
    again = wrapper(make_input("tokens", tokenizer))
    assert int(again["generation_info"].cached_tokens.max()) > 0
    assert int(sender.update_weights(model).version) == version + 1
    ended = wrapper(
        make_input("tokens", tokenizer),
        ignore_eos=False,
        logit_bias={end: 100.0},
    )["generation_info"]
    assert ended.finish_reason == ["stop"] * len(TEXTS)
    assert ended.truncated.tolist() == [False] * len(TEXTS)
    assert not wrapper.get_new_version(generate=False).return_generation_info
    with pytest.raises(ConfigurationError, match="makes no responses"):
        SGLangWrapper(engine, generate=False, return_generation_info=True)
    sender.shutdown()
