"""Two runs with ``deterministic=True`` are equal, though other groups finish first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from helpers.gpu import NEEDS_GPU

from torchrl_sglang import GRPO, AsyncSGLang

pytestmark = [
    *NEEDS_GPU,
    # TorchRL's own, about what is deprecated in torch.
    pytest.mark.filterwarnings("ignore"),
]

PROMPTS = [{"query": f"Say {number}.", "number": number} for number in range(5)]
STEPS = 3
SECONDS = 0.05


def reward(conversation: Any, task: Any) -> float:
    return float(sum(conversation.turns[-1].token_ids) % 5)


def keep(returns: list[float]) -> bool:
    """Rejects some groups, by what they say."""
    return len(set(returns)) > 1 and sum(returns) % 4 > 0


def train(
    engine: AsyncSGLang, folder: Any, delays: list[float], **arguments: Any
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Returns the rows of all batches, and the weights at the end."""
    finished: list[tuple[int, int]] = []

    async def step(conversation: Any, task: Any) -> str | None:
        if len(conversation.turns) == 2:
            finished.append((task["number"], conversation.sample))
            return None
        await asyncio.sleep(SECONDS * delays[task["number"]])
        return "And then?"

    run = GRPO(
        engine.model_path,
        prompts=PROMPTS,
        rewards=reward,
        step=step,
        keep_group=keep,
        engine=engine,
        group_size=4,
        groups_per_batch=3,
        minibatches=2,
        steps=STEPS,
        lr=1e-3,
        seed=7,
        logger=None,
        show_samples=None,
        output=folder,
        deterministic=True,
        **arguments,
    )
    rows: list[dict[str, Any]] = []
    with run:
        run.begin()
        for batch in run.batches():
            run.step += 1
            rows += [
                {
                    "number": int(row["number"]),
                    "tokens": row["tokens", "full"].tolist(),
                    "log_probs": row["log_probs", "response"].tolist(),
                    "advantage": row["advantage"].flatten().tolist(),
                }
                for row in batch.reshape(-1).unbind(0)
            ]
            run.learner.train(batch, run.collector.policy_version)
            run.update_weights()
        weights = {
            name: value.detach().cpu().clone()
            for name, value in run.model.state_dict().items()
        }
    rows.append({"finished": finished})
    return rows, weights


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50}],
    ids=["temperature-1", "top-p"],
)
def test_two_runs_are_equal_bit_for_bit(deterministic_engine, tmp_path, sampling):
    engine = deterministic_engine
    kwargs = {"max_new_tokens": 24, "ignore_eos": True, **sampling}
    first, weights = train(
        engine,
        tmp_path / "first",
        [0.0, 1.0, 2.0, 3.0, 4.0],
        generate_kwargs=kwargs,
    )
    # Others finish first, and far fewer are generated at a time.
    second, others = train(
        engine,
        tmp_path / "second",
        [4.0, 3.0, 2.0, 1.0, 0.0],
        generate_kwargs=kwargs,
        collector={"max_in_flight": 5},
    )
    assert first.pop() != second.pop()
    assert len(first) == STEPS * 3 * 4 * 2
    for place, (one, other) in enumerate(zip(first, second, strict=True)):
        differ = [name for name in one if one[name] != other[name]]
        assert not differ, f"row {place} of {len(first)}: {differ}"
    # Samples of a group, and visits of a prompt, differ.
    ends = [tuple(row["tokens"]) for row in first]
    assert len(set(ends)) == len(ends)
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name


def test_a_run_with_another_seed_is_another(deterministic_engine):
    def say(seed: int) -> list[int]:
        (answer,) = deterministic_engine.generate(
            input_ids=[5, 6, 7, 8],
            sampling_params={
                "max_new_tokens": 32,
                "ignore_eos": True,
                "sampling_seed": seed,
            },
        )
        return answer.token_ids

    assert say(1) == say(1)
    assert say(1) != say(2)


def test_a_response_does_not_depend_on_the_batch(deterministic_engine):
    generator = torch.Generator().manual_seed(0)
    crowd = [
        torch.randint(5, 90, (3 + 7 * n,), generator=generator).tolist()
        for n in range(24)
    ]

    def answers(prompts: list[list[int]], first: int) -> list[Any]:
        requests = [
            {"max_new_tokens": 48, "ignore_eos": True, "sampling_seed": first + n}
            for n in range(len(prompts))
        ]
        found = deterministic_engine.generate(
            input_ids=prompts, sampling_params=requests, return_logprobs=True
        )
        return [(each.token_ids, list(each.log_probs)) for each in found]

    alone = [answers([prompt], n)[0] for n, prompt in enumerate(crowd[:4])]
    deterministic_engine.flush_cache()
    together = answers(crowd, 0)
    assert together[:4] == alone
