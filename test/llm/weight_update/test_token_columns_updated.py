"""Quantities of tokens that an update comes in the middle of, on both generations."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from helpers.log_probs import TOLERANCE
from helpers.slow import older_engine_is_slow
from helpers.yes_no import YES_NO, expected

from torchrl_sglang import SGLangWeightSyncScheme
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.testing.tiny_model import make_tiny_model


@older_engine_is_slow
def test_values_are_of_the_weights_that_each_token_names(
    any_engine, tokenizer, hf_model
):
    engine, prompt = any_engine, [5, 6, 7, 8] * 8
    models = [hf_model, make_tiny_model(tokenizer, seed=21)]
    sender = SGLangWeightSyncScheme(engine).create_sender()
    known = {sender.update_weights(models[0]).version: models[0]}
    with ThreadPoolExecutor() as pool:
        running = pool.submit(
            engine.generate,
            input_ids=[prompt] * 4,
            sampling_params={"max_new_tokens": 200, "ignore_eos": True},
            return_logprobs=True,
            token_columns=[YES_NO],
            timeout=120,
        )
        while run_sync(engine.control.running_requests()) < 4:
            assert not running.done()
        known[sender.update_weights(models[1]).version] = models[1]
        completions = running.result(120)
    sender.shutdown()
    seen = set()
    for completion in completions:
        tokens = [*prompt, *completion.token_ids]
        values = torch.from_numpy(completion.columns["yes_no"].values)
        assert values.shape == (200, 2)
        for span in completion.versions:
            seen.add(span.version)
            wanted = expected(known[span.version], tokens, len(prompt))
            error = (values - wanted)[span.start : span.end].abs().max()
            assert error < TOLERANCE
    assert seen == known.keys()
