r"""How much of a real model's responses its earlier ones draft.

Sums are explained in epochs, with the same weights, so that nothing but sampling makes
the responses differ. What an engine with ``drafts="history"`` would have given its
servers is given to SGLang's own search, which drafts each response of the next epochs
pass by pass. A draft is accepted as far as the response goes on like it, which is as
likely as that a server accepts it. No GPU is needed.

    python benchmarks/history_share.py runs/smollm2-135m-instruct --temperatures 0 0.6 1

Printed are tokens a pass: with nothing but what SGLang finds in the responses of the
same epoch, and with the texts of epochs before.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
from typing import Any

from script import print_row, read_options
from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.generation.draft_history import DraftHistory
from torchrl_sglang.backends.launch.cpu import engine_environment, launch_command
from torchrl_sglang.cli.bench.measure import start_engine
from torchrl_sglang.types import HistoryDrafts

SUFFIX = "Explain it step by step, and give the answer at the end."

SEARCH = """
import importlib.util, json, sys

spec = importlib.util.spec_from_file_location("launch", sys.argv[1])
launch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launch)
launch.prepare_process()

from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

given = json.load(sys.stdin)
places, depth = given["places"], 18
found = []
for epoch in given["epochs"]:
    corpus = NgramCorpus(
        min_bfs_breadth=1,
        max_bfs_breadth=1,
        match_type="BFS",
        capacity=1_000_000,
        max_trie_depth=depth,
        draft_token_num=places,
        external_sam_budget=places - 1,
        external_corpus_max_tokens=10_000_000,
    )
    if epoch["texts"]:
        count = corpus.load_external_corpus_named("texts", epoch["texts"])
        corpus.commit_external_corpus_load("texts", count)
    passes = tokens = 0
    # The first token is the prefill's.
    running = [
        [prompt + response[:1], response[1:], str(number)]
        for number, (prompt, response) in enumerate(epoch["responses"])
    ]
    while running:
        corpus.synchronize()
        names = [each[2] for each in running]
        ends = [known[-depth:] for known, _, _ in running]
        drafts, mask = corpus.batch_get(names, ends, [len(k) for k, _, _ in running])
        drafts = drafts.reshape(len(running), places).tolist()
        mask = mask.reshape(len(running), places, places).tolist()
        for each, row, tree in zip(running, drafts, mask):
            known, coming, _ = each
            last, accepted = 0, 0
            for place in range(1, places):
                below = max(i for i in range(place) if tree[place][i])
                right = coming[accepted : accepted + 1] == [row[place]]
                if below == last and right:
                    last, accepted = place, accepted + 1
            taken = coming[: accepted + 1]
            each[0], each[1] = known + taken, coming[accepted + 1 :]
            passes, tokens = passes + 1, tokens + len(taken)
        corpus.batch_put([known[-depth:] for known, _, _ in running])
        running = [each for each in running if each[1]]
    found.append([tokens, passes])
print(json.dumps(found))
"""


def make_prompts(engine: AsyncSGLang, count: int) -> list[list[int]]:
    """Returns prompts, each of another sum."""
    tokenizer, source = engine.get_tokenizer(), random.Random(0)
    found = []
    for _ in range(count):
        terms = " + ".join(str(source.randint(10, 99)) for _ in range(3))
        chat = [{"role": "user", "content": f"What is {terms}? {SUFFIX}"}]
        text = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        found.append(tokenizer.encode(text, add_special_tokens=False))
    return found


def search(epochs: list[dict[str, Any]], places: int) -> list[list[int]]:
    """Returns tokens and passes of each epoch, by SGLang's search in its own Python."""
    python, launcher = launch_command()[:2]
    with tempfile.TemporaryDirectory() as folder:
        # SGLang compiles its search, and keeps it there.
        caches = {"TVM_FFI_CACHE_DIR": folder, "HOME": folder}
        done = subprocess.run(
            [python, "-c", SEARCH, launcher],
            input=json.dumps({"places": places, "epochs": epochs}),
            env={**os.environ, **engine_environment(), **caches},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Runs the epochs."""
    given = read_options(
        __doc__,
        model="tiny",
        device="cpu|cuda",
        temperatures=(0.0, 0.6, 1.0),
        prompts=16,
        samples=4,
        tokens=96,
        epochs=2,
    )
    places = HistoryDrafts().num_tokens
    print_row("temperature, epoch", "tokens", "alone", "with texts")
    with start_engine(given.model, device=given.device, dtype="auto") as engine:
        prompts = make_prompts(engine, given.prompts)
        for temperature in given.temperatures:
            history = DraftHistory(HistoryDrafts().max_tokens)
            epochs: list[dict[str, Any]] = []
            for _ in range(given.epochs):
                texts = history.take()
                asked = [each for each in prompts for _ in range(given.samples)]
                answers = engine.generate(
                    input_ids=asked,
                    sampling_params={
                        "temperature": temperature,
                        "max_new_tokens": given.tokens,
                    },
                )
                pairs = [
                    [prompt, list(answer.token_ids)]
                    for prompt, answer in zip(asked, answers, strict=True)
                ]
                epochs += [{"texts": each, "responses": pairs} for each in ([], texts)]
                for prompt, response in pairs:
                    key = json.dumps(prompt).encode()
                    history.begin(key)
                    history.end(key, prompt, response)
            found = search(epochs, places)
            for number in range(given.epochs):
                (tokens, alone), (_, passes) = found[2 * number : 2 * number + 2]
                print_row(
                    f"{temperature:g}, {number + 1}",
                    tokens,
                    tokens / alone,
                    tokens / passes,
                )


if __name__ == "__main__":
    main()
