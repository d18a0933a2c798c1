"""A quantity of each token that one row adds, token for token wherever tokens go.

The row asks for the log-probs of two tokens at each position, whichever was sampled,
and the oracle is Hugging Face's model.
"""

from __future__ import annotations

import itertools
import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.branches import ask_twice
from helpers.log_probs import TOLERANCE
from helpers.log_probs import score as score_by
from helpers.yes_no import CHOICES, YES_NO, ask, expected
from tensordict import TensorDict, lazy_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History
from torchrl.envs.llm import ChatEnv
from torchrl.envs.transforms import StepCounter
from torchrl.modules.llm.policies import ChatHistory, Tokens

from torchrl_sglang import (
    AsyncLLMCollector,
    Gateway,
    SGLangLLMCollector,
    SGLangWrapper,
    TokenColumn,
)
from torchrl_sglang.backends.client.http import HttpResponse
from torchrl_sglang.backends.generation.reply import (
    cut_short,
    decode_reply,
    parse_completion,
)
from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    ServerUnavailableError,
    UnsupportedByServerError,
)
from torchrl_sglang.requests.plan import plan_request
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.requests.resume import join_completions
from torchrl_sglang.requests.token_values import (
    concatenate,
    to_token_values,
    unknown_values,
)
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.types import Completion, TokenLayout

LENGTH = 6
PARAMS = {"max_new_tokens": LENGTH, "ignore_eos": True}


def check_rows(batch, model):
    """Holds a batch of ragged rows to a model, and returns how many there are."""
    rows = zip(
        batch.get(("tokens", "full"), as_list=True),
        batch.get(("tokens", "response"), as_list=True),
        batch.get(("yes_no", "full"), as_list=True),
        batch.get(("yes_no", "response"), as_list=True),
        strict=True,
    )
    count = 0
    for tokens, response, full, values in rows:
        start = len(tokens) - len(response)
        assert full.shape == (len(tokens), 2)
        assert full[:start].isnan().all()
        torch.testing.assert_close(full[start:], values)
        error = (values - expected(model, tokens, start)).abs().max()
        assert error < TOLERANCE
        count += 1
    return count


def read_reply(content, plan):
    """Returns the completion in a reply, or in the last event of a lost server."""
    body = json.dumps(content).encode()
    reply = decode_reply(HttpResponse(url="http://one:1", status=200, body=body), plan)
    if reply.meta_info.finish_reason is None:
        reply = cut_short(reply, OSError("it ended"))
    return parse_completion(reply, plan, server="http://one:1")


def make_policy(engine, **arguments):
    settings = {"generate_kwargs": PARAMS, "token_columns": [YES_NO], **arguments}
    return SGLangWrapper(engine, **settings)


def chats(*questions):
    history = History.from_chats(
        [[{"role": "user", "content": question}] for question in questions]
    )
    return TensorDict(history=ChatHistory(prompt=history), batch_size=len(questions))


def test_the_wrapper(engine, hf_model):
    policy = make_policy(engine)
    assert "yes_no" in policy.out_keys
    assert check_rows(policy(chats("Hi", "a longer question")), hf_model) == 2
    several = policy.get_new_version(num_samples=3)(chats("Hi", "And you?"))
    assert several.shape == (2, 3)
    assert check_rows(several.reshape(-1), hf_model) == 6


def test_padded(engine, hf_model):
    prompts = [[5, 6, 7], [9] * 20]
    td = lazy_stack(
        [TensorDict(tokens=Tokens(prompt=torch.tensor(prompt))) for prompt in prompts]
    )
    policy = make_policy(engine, input_mode="tokens", pad_output=True, num_samples=2)
    batch = policy(td).reshape(-1)
    full, response = batch["yes_no", "full"], batch["yes_no", "response"]
    assert full.shape == (4, 20 + LENGTH, 2)
    assert response.shape == (4, LENGTH, 2)
    masks = batch["masks", "all_attention_mask"]
    for tokens, mask, values, own in zip(
        batch["tokens", "full"], masks, full, response, strict=True
    ):
        start = int(mask.sum()) - LENGTH
        assert values[~mask].eq(0).all()
        assert values[mask][:start].isnan().all()
        torch.testing.assert_close(values[mask][start:], own)
        error = (own - expected(hf_model, tokens[mask], start)).abs().max()
        assert error < TOLERANCE


@pytest.mark.parametrize("collector_class", [LLMCollector, SGLangLLMCollector])
def test_collectors_of_environments(engine, hf_model, collector_class):
    def make_env():
        env = ChatEnv(batch_size=(2,), tokenizer=engine.get_tokenizer())
        return env.append_transform(StepCounter(max_steps=2))

    class Questions:
        def __iter__(self):
            return itertools.repeat(
                TensorDict(query=["Hi", "And you?"], batch_size=2)
            ).__iter__()

    def make_from_dataloader():
        from torchrl.envs.llm.transforms import DataLoadingPrimer

        env = make_env()
        return env.append_transform(DataLoadingPrimer(Questions(), batch_size=(2,)))

    collector = collector_class(
        make_from_dataloader,
        policy=make_policy(engine),
        dialog_turns_per_batch=4,
        total_dialog_turns=4,
    )
    (batch,) = list(collector)
    assert check_rows(batch.reshape(-1), hf_model) == 4
    collector.shutdown()


def test_an_asynchronous_collector_and_a_buffer(engine, hf_model):
    buffer = ReplayBuffer(storage=LazyStackStorage(100), batch_size=4)
    collector = AsyncLLMCollector(
        policy=make_policy(engine),
        prompts=[{"query": f"question {n}"} for n in range(4)],
        rewards=lambda conversation, task: 1.0,
        step=lambda conversation, task: (
            "go on" if len(conversation.turns) == 1 else None
        ),
        group_size=2,
        groups_per_batch=2,
    )
    with collector:
        for batch in collector:
            assert check_rows(batch, hf_model) == 8
            buffer.extend(batch)
            break
    assert check_rows(buffer.sample(), hf_model) == 4


def test_the_gateway(engine, hf_model, tmp_path):
    """Branches share a turn, and a file keeps what the gateway recorded."""
    path = tmp_path / "sessions"
    with Gateway(engine, token_columns=[YES_NO], path=path) as gateway:
        ask_twice(gateway.session("a"), max_tokens=6)
        turns = gateway.session("a").turns
        batch = gateway.to_tensordict()
    assert batch.shape == (2,)
    for row in batch:
        full = row["yes_no", "full"]
        tokens = row["tokens", "full"]
        written = ~full.isnan().any(-1)
        first, last = turns[0], turns[-1]
        assert written.sum() == sum(
            len(turn.completion.token_ids)
            for turn in (first, turns[1] if row is batch[0] else last)
        )
        error = expected(hf_model, tokens, 1) - full[1:]
        assert error[written[1:]].abs().max() < TOLERANCE
        torch.testing.assert_close(
            row["yes_no", "response"],
            full[-len(row["tokens", "response"]) :],
            equal_nan=True,
        )
    with Gateway(engine, path=path) as gateway:
        again = gateway.to_tensordict()
    for one, other in zip(batch, again, strict=True):
        torch.testing.assert_close(
            one["yes_no", "full"], other["yes_no", "full"], equal_nan=True
        )


def test_an_abort(engine, hf_model):
    with ThreadPoolExecutor() as pool:
        running = pool.submit(
            engine.generate,
            input_ids=[5, 6, 7],
            sampling_params={"max_new_tokens": 400, "ignore_eos": True},
            token_columns=[YES_NO],
            request_ids=["mine"],
            return_partial=True,
        )
        while not run_sync(engine.control.running_requests()):
            assert not running.done()
        engine.abort(["mine"])
        (part,) = running.result(60)
    assert part.finish_reason == "abort"
    values = torch.from_numpy(part.columns["yes_no"].values)
    assert len(values) == len(part.token_ids) < 400
    if len(values):
        wanted = expected(hf_model, [5, 6, 7, *part.token_ids], 3)
        assert (values - wanted).abs().max() < TOLERANCE


def test_the_sampler_s_support(engine, hf_model, tmp_path):
    """Of each token, the set that Hugging Face's top-k and top-p would keep."""
    prompt, temperature, top_p, top_k = [5, 6, 7, 8], 0.7, 0.8, 40
    params = {**PARAMS, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    with pytest.raises(UnsupportedByServerError, match="top_k=-1 leaves more .* 1 to"):
        engine.generate(
            input_ids=prompt,
            sampling_params={**params, "top_k": -1},
            token_columns=["sampling_support"],
        )
    td = lazy_stack(
        [TensorDict(tokens=Tokens(prompt=torch.tensor(prompt))) for _ in range(2)]
    )
    policy = make_policy(
        engine,
        input_mode="tokens",
        generate_kwargs=params,
        token_columns=["sampling_support", YES_NO],
    )
    for padded in (False, True):
        batch = policy.get_new_version(pad_output=padded)(td.copy())
        for row in batch.unbind(0):
            tokens, support = row["tokens", "full"], row["sampling_support", "response"]
            counts = row["sampling_support", "response_counts"]
            full_counts = row["sampling_support", "full_counts"]
            assert full_counts.tolist() == [0] * len(prompt) + counts.tolist()
            total = int(counts.sum())
            assert support[total:].eq(-1).all()
            with torch.no_grad():
                logits = hf_model(tokens[None]).logits[0, len(prompt) - 1 : -1].float()
            for position, kept in enumerate(support[:total].split(counts.tolist())):
                probs, order = (
                    (logits[position] / temperature).softmax(-1).sort(descending=True)
                )
                probs, order = probs[:top_k], order[:top_k]
                # On CPU, top-p's share is one of all tokens.
                wanted = order[probs.cumsum(0) - probs <= top_p]
                assert sorted(kept.tolist()) == sorted(wanted.tolist())
                assert tokens[len(prompt) + position] in kept


def test_requests_that_a_router_would_spoil(capabilities_of_fake, fake_engine, fake):
    """What asks for a column is in the request, and no other request has it."""
    request = GenerateRequest(input_ids=[5, 6, 7], token_columns=(YES_NO,))
    plan = plan_request(request, capabilities_of_fake)
    sent = plan.payload(cache_key="1", rid="a")
    assert sent["token_ids_logprob"] == CHOICES
    assert sent["return_logprob"] is True
    other = TokenColumn(
        name="other",
        dtype="int64",
        request=lambda start: {"token_ids_logprob": [1]},
        field="x",
    )
    request = GenerateRequest(input_ids=[5], token_columns=(YES_NO, other))
    plan = plan_request(request, capabilities_of_fake)
    with pytest.raises(ConfigurationError, match=r"'other' asks for .*=\[1\], and"):
        plan.payload(cache_key="1", rid="a")
    # A reply without it is an error, and nothing is made up.
    with pytest.raises(ServerUnavailableError, match="asked for 'missing' of 2 tokens"):
        fake_engine.generate(
            input_ids=[5, 6],
            sampling_params={"max_new_tokens": 2},
            token_columns=[
                TokenColumn(
                    name="missing", dtype="int64", request=lambda start: {}, field="x"
                )
            ],
        )


@pytest.fixture
def capabilities_of_fake(fake_engine):
    return fake_engine.capabilities


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("sampling_support", "must be a list of names"),
        (["sampling_suport"], "Did you mean 'sampling_support'"),
        ([YES_NO, YES_NO], "'yes_no' twice"),
        ([3], "holds 3, which is neither"),
    ],
)
def test_wrong_columns(fake_engine, given, words):
    for call in (
        lambda: fake_engine.generate(input_ids=[5], token_columns=given),
        lambda: SGLangWrapper(fake_engine, token_columns=given),
        lambda: Gateway(fake_engine, token_columns=given),
    ):
        with pytest.raises(ConfigurationError, match=words):
            call()


def test_names_that_are_taken(fake_engine):
    settings = {"dtype": "int64", "request": lambda start: {}, "field": "x"}
    for name in ("tokens", "weight_version", "next", "session"):
        with pytest.raises(ConfigurationError, match=f"named '{name}', which is the"):
            TokenColumn(name=name, **settings)
    with pytest.raises(ConfigurationError, match="both tokens and yes_no"):
        SGLangWrapper(fake_engine, tokens_key="yes_no", token_columns=[YES_NO])
    with pytest.raises(ConfigurationError, match="small letters"):
        TokenColumn(name="My column", **settings)
    for dtype in ("uint8", "bool", "object", ">i4", "U3"):
        with pytest.raises(ConfigurationError, match=f"'{dtype}'.* holds unknown=-1"):
            TokenColumn(**{**settings, "name": "a", "dtype": dtype})
    for shape in (2, [2], (2.0,), (-1,)):
        with pytest.raises(ConfigurationError, match="a tuple of integers"):
            TokenColumn(**settings, name="a", shape=shape)
    with pytest.raises(ConfigurationError, match="needs generate=True"):
        SGLangWrapper(fake_engine, generate=False, token_columns=[YES_NO])
    policy = SGLangWrapper(fake_engine, token_columns=[YES_NO])
    assert policy.get_new_version(generate=False).token_columns == ()


def test_rows_travel(fake_engine):
    """To another process, where the shape is that of its servers."""
    by_model = TokenColumn(
        name="routes",
        dtype="int16",
        shape=shape_of,
        request=ask,
        field="routed_experts",
    )
    policy = SGLangWrapper(fake_engine, token_columns=["sampling_support", by_model])
    copy = pickle.loads(pickle.dumps(policy))
    assert copy.token_columns == policy.token_columns
    assert copy.token_layouts[1].shape == (fake_engine.capabilities.tp_size, 2)


def shape_of(capabilities):
    return capabilities.tp_size, 2


FIXED = TokenLayout(name="routes", dtype="int16", shape=(2,))
LISTS = TokenLayout(name="routes", dtype="int32", shape=None)


def part(ids, layout, rows, prompt=None):
    return Completion(
        token_ids=ids,
        finish_reason="length",
        columns={"routes": to_token_values(rows, layout)},
        prompt_columns={}
        if prompt is None
        else {"routes": to_token_values(prompt, layout)},
    )


@pytest.mark.parametrize(
    ("layout", "rows"),
    [(FIXED, [[1, 2], [3, 4], [5, 6]]), (LISTS, [[1], [], [5, 6, 7]])],
)
def test_parts_are_joined(layout, rows):
    """What a later part knows of the last token before it takes the place of that."""
    missing = unknown_values(layout, 1).tolist()
    first = part([7, 8], layout, [rows[0], *missing], prompt=[rows[2]])
    second = part([9], layout, [rows[2]], prompt=[rows[1]])
    whole = join_completions(first, second)
    assert whole.columns["routes"].tolist() == rows
    assert whole.prompt_columns["routes"].tolist() == [rows[2]]
    # A part without them, and one without tokens.
    plain = Completion(token_ids=[9], finish_reason="stop")
    whole = join_completions(first, plain)
    assert whole.columns["routes"].tolist() == [rows[0], *missing, *missing]
    whole = join_completions(
        Completion(token_ids=[], finish_reason="abort"), part([9], layout, [rows[0]])
    )
    assert whole.columns["routes"].tolist() == [rows[0]]


def test_a_server_that_was_lost(fake_engine):
    """What its last event holds is kept, as far as it has tokens."""
    event = {
        "output_ids": [7, 8],
        "meta_info": {
            "finish_reason": None,
            "completion_tokens": 2,
            "output_token_ids_logprobs": [[[-1.0, 5, None], [-2.0, 9, None]]] * 3,
        },
    }
    request = GenerateRequest(input_ids=[5, 6], token_columns=[YES_NO])
    plan = plan_request(request, fake_engine.capabilities)
    with pytest.raises(GenerationAbortedError) as caught:
        read_reply(event, plan)
    part = caught.value.partial
    assert part.columns["yes_no"].tolist() == [[-1.0, -2.0]] * 2


@pytest.mark.parametrize(
    ("layout", "rows"),
    [(FIXED, [[1, 2], [3, 4], [5, 6]]), (LISTS, [[1], [], [5, 6, 7]])],
)
def test_values_are_cut_and_kept(layout, rows):
    values = to_token_values(rows, layout)
    assert len(values) == 3
    for start, stop in itertools.combinations_with_replacement(range(4), 2):
        assert values[start:stop].tolist() == rows[start:stop]
        assert concatenate([values[:start], values[start:]]) == values
    assert pickle.loads(pickle.dumps(values)) == values
    assert values != values[:2]
    with pytest.raises(ValueError, match=r"shape|invalid literal"):
        to_token_values([["a", "b"]], layout)


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        (TokenLayout(name="a", dtype="int32"), [1.0, 2.5]),
        (TokenLayout(name="a", dtype="int8"), [1, 300]),
        (TokenLayout(name="a", dtype="int32", shape=None), [[1], [2.5]]),
        (TokenLayout(name="a", dtype="int32", shape=None), [[[1, 2]], [[3, 4]]]),
    ],
)
def test_values_that_would_be_changed(layout, rows):
    with pytest.raises(ValueError, match=r"no int(8|32) is equal to|the shape \(2,\)"):
        to_token_values(rows, layout)


LATE = TokenColumn(
    name="late",
    dtype="int16",
    request=lambda start: {"from": start},
    field="late",
    of_prompt=True,
    late=True,
)


def test_values_that_a_lost_server_had_not_reported(fake_engine):
    """The request that goes on asks for all of them, if its weights are the same."""
    request = GenerateRequest(input_ids=[5, 6], token_columns=[LATE])
    plan = plan_request(request, fake_engine.capabilities)
    event = {
        "output_ids": [7, 8],
        "meta_info": {
            "finish_reason": None,
            "completion_tokens": 2,
            "weight_version": "3",
        },
    }

    with pytest.raises(GenerationAbortedError) as caught:
        read_reply(event, plan)
    begun = caught.value.partial
    rest = plan.resume(begun)
    assert rest.payload(cache_key="1", rid="a")["from"] == 0
    for version, wanted in (("3", [3, 4, 5, -1]), ("4", [-1, 4, 5, -1])):
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": version,
            "late": [1, 2, 3, 4, 5],
        }
        end = read_reply({"output_ids": [9, 9], "meta_info": meta}, rest)
        whole = join_completions(begun, end)
        assert whole.columns["late"].tolist() == wanted
        assert whole.prompt_columns["late"].tolist() == [1, 2]


def test_values_that_a_server_computed_again(fake_engine):
    """After the update of another process, old tokens have none of new weights."""
    request = GenerateRequest(input_ids=[5, 6], token_columns=[LATE])
    spans = [
        {"version": "1", "start": 0, "end": 2},
        {"version": "2", "start": 2, "end": 4},
    ]
    meta = {
        "finish_reason": {"type": "stop"},
        "weight_versions": spans,
        "num_retractions": 1,
        "late": [1, 2, 3, 4, 5],
    }
    plan = plan_request(request, fake_engine.capabilities)
    completion = read_reply({"output_ids": [7, 8, 9, 9], "meta_info": meta}, plan)
    assert completion.columns["late"].tolist() == [-1, 4, 5, -1]


def test_scored_responses_have_them(engine, hf_model):
    """Where log-probs are computed afterwards, columns are those of the first reply."""
    (completion,) = engine.generate(
        input_ids=[5, 6, 7],
        sampling_params={**PARAMS, "frequency_penalty": 1.5},
        return_logprobs=True,
        token_columns=[YES_NO],
    )
    assert completion.columns["yes_no"].values.shape == (LENGTH, 2)
    wanted = score_by(hf_model, [5, 6, 7, *completion.token_ids])[3:]
    assert (torch.tensor(completion.log_probs) - wanted).abs().max() < TOLERANCE
