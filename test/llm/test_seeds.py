"""Seeds of samples: the same in every run, and another for every sample."""

from __future__ import annotations

import itertools
import subprocess
import sys

from torchrl_sglang.requests.seeds import SampleSeeds, sample_seed, seeds_at

PROMPT = [5, 6, 7]


def test_a_seed_is_the_same_in_another_process():
    code = (
        "from torchrl_sglang.requests.seeds import sample_seed;"
        "print(sample_seed(3, 1, 2, 0, [5, 6, 7]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert int(done.stdout) == sample_seed(3, 1, 2, 0, PROMPT)


def test_everything_that_tells_samples_apart_changes_the_seed():
    places = itertools.product(range(2), range(40), range(8), range(3))
    prompts = (PROMPT, [5, 6], [5, 6, 7, 0], [0, *PROMPT])
    seeds = [sample_seed(*place, prompt) for place in places for prompt in prompts]
    assert len(set(seeds)) == len(seeds)
    # SGLang refuses others.
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_conversation_has_the_seeds_of_its_place():
    seed_of = seeds_at(SampleSeeds(run=4), 2, 1)
    assert seed_of is not None
    assert seed_of(0, PROMPT) == sample_seed(4, 2, 1, 0, PROMPT)
