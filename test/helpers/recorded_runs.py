"""Recordings of runs that never ran, with figures that a test knows."""

from __future__ import annotations

import random
from pathlib import Path

from msgspec.structs import replace

import torchrl_sglang
from torchrl_sglang.observer import (
    GroupEnded,
    GroupStarted,
    ResponseRecord,
    RowRecord,
    TurnRecord,
)
from torchrl_sglang.recording.format import HELD_OUT, Bounds, write_manifest
from torchrl_sglang.recording.records import row_key, summary_of, texts_of
from torchrl_sglang.recording.writer import Files
from torchrl_sglang.types import Completion

BEGAN = 1_700_000_000.0
BOUNDS = Bounds(max_bytes=2**40, sample=1.0, prompts=True, responses=True)
WORDS = ["The ", "answer ", "is ", "forty", "-two", ".", "\n", "<script>", "é", "→"]


class Words:
    """A tokenizer."""

    def decode(self, ids):
        return "".join(f"<{each}>" for each in ids)


def make_turn(
    rng,
    number,
    tokens,
    version,
    *,
    parent=None,
    branch="",
    messages=None,
    prompt_tokens=12,
):
    ids = [rng.randrange(len(WORDS)) for _ in range(tokens)]
    return TurnRecord(
        messages=messages or [{"role": "user", "content": f"What is {number} + 2?"}],
        reply={"role": "assistant", "content": "".join(WORDS[each] for each in ids)},
        completion=Completion(
            token_ids=ids,
            log_probs=[-rng.expovariate(1.5) for _ in ids],
            finish_reason="length" if tokens >= 24 else "stop",
            cached_tokens=4,
        ),
        spans=[(version, tokens // 2), (version + 1, tokens - tokens // 2)],
        prompt_tokens=prompt_tokens,
        number=number,
        parent=parent,
        branch=branch,
        start=BEGAN + number,
        end=BEGAN + number + 0.5,
    )


def make_group(
    rng, number, size, began, version, *, tokens=None, turns=1, question=None
):
    question = question or number
    responses = []
    prompt = [question, *range(11)]
    for _ in range(size):
        made, rows, ids = [], [], prompt
        for place in range(turns):
            turn = make_turn(
                rng,
                place,
                tokens or rng.randrange(4, 32),
                version,
                parent=place - 1 if place else None,
                messages=[{"role": "user", "content": f"What is {question} + 2?"}]
                if place == 0
                else [{"role": "tool", "name": "add", "content": str(question + 2)}],
                prompt_tokens=len(ids),
            )
            made.append(turn)
            ids = [*ids, *turn.completion.token_ids]
            rows.append(RowRecord(tokens=[ids], turns=[place], reward=0.0))
            # The result of the tool.
            ids = [*ids, question]
        right = float(rng.random() < min(0.1 + number / 300, 0.9))
        responses.append(
            ResponseRecord(
                turns=made,
                rows=rows,
                reward=right,
                rewards={"right": right, "short": -0.01 * made[0].prompt_tokens},
            )
        )
    group = GroupStarted(id=number, position=number - 1, start=began, version=version)
    return GroupEnded(
        group=group,
        end=began + 1.0 + rng.random(),
        versions=(version, version),
        responses=lambda: responses,
        tokens=0,
        tokenizer=Words(),
    )


class WrittenGroup:
    """A group of a recording."""

    def __init__(self, event):
        self.id, self.began = event.group.id, event.group.start
        self.ended, self.responses = event.end, event.responses()


class Recorded:
    """Writes the lines of a run, step after step.

    Args:
        folder: of the recording.
        size: responses of a group.
        groups: of a batch.
        seed: of rewards, lengths and tokens.
        texts: whether conversations are written.
        prompts: number of prompts of an epoch; None for ever new ones.
        writer: name of the recorder.
    """

    def __init__(
        self,
        folder,
        *,
        size=4,
        groups=4,
        seed=0,
        texts=True,
        writer="test",
        prompts=None,
    ):
        write_manifest(folder, BOUNDS, torchrl_sglang.__version__)
        self.folder = Path(folder)
        self.files = Files(self.folder, writer, BOUNDS.max_bytes)
        self.size, self.per_batch, self.texts = size, groups, texts
        self.prompts = prompts
        self.rng = random.Random(seed)
        self.time = BEGAN
        self.number = self.batch = 0
        self.written: list[WrittenGroup] = []
        self.event("start", pid=1)
        pieces = {str(token): text for token, text in enumerate(WORDS)}
        self.files.append("vocabulary", {"pieces": pieces})

    def event(self, kind, time=None, **values):
        time = self.time if time is None else time
        self.files.append("events", {"kind": kind, "time": time, **values})

    def step(self, *, turns=1, tokens=None):
        """A batch is collected, trained on, and weights are sent: 5 seconds."""
        began = self.time
        made = [
            self._group(self.size, began, turns=turns, tokens=tokens)
            for _ in range(self.per_batch)
        ]
        self.written += [WrittenGroup(ended) for ended in made]
        self._poll(began, 3)
        self.time = began + 2.5
        self.event("phase", name="wait", span=[began, self.time])
        self.batch += 1
        ids = [ended.group.id for ended in made]
        self.event("batch", number=self.batch, version=self.batch - 1, ids=ids)
        gaps = {
            row_key(row.tokens[0]): 0.01 * ended.group.id
            for ended in made
            for each in ended.responses()
            for row in each.rows
        }
        rows = [{"key": key, "kl": 0.001, "gap": gap} for key, gap in gaps.items()]
        self.event("scored", rows=rows)
        rows = [{"key": key, "advantage": 0.5} for key in gaps]
        self.event("trained", step=self.batch, rows=rows)
        self.event(
            "phase", self.time + 2, name="train", span=[self.time, self.time + 2]
        )
        self.time += 2.5
        phases = {"pause": 0.05, "flush": 0.02, "send": 0.4, "resume": 0.03}
        self.event(
            "update",
            version=self.batch,
            served=str(self.batch),
            transport="broadcast",
            seconds=0.5,
            bytes=2_000_000_000,
            tensors=100,
            phases=phases,
        )
        values = {
            "train/loss": 1 / self.batch,
            "train/ESS": 0.97,
            "mismatch/kl": 0.001,
            "eval/reward": min(self.batch / 40, 0.9),
        }
        self.event("metrics", step=self.batch, values=values)
        self.files.flush()

    def _group(self, size, began, *, turns=1, tokens=None, status="complete"):
        self.number += 1
        question = 1 + (self.number - 1) % self.prompts if self.prompts else None
        ended = make_group(
            self.rng,
            self.number,
            size,
            began,
            self.batch,
            tokens=tokens,
            turns=turns,
            question=question,
        )
        ended = replace(ended, status=status)
        group, responses = ended.group, ended.responses()
        self.event("began", began, id=group.id, position=group.position)
        summary = summary_of(ended, responses, BOUNDS)
        if self.texts:
            texts = texts_of(group.id, responses, BOUNDS)
            place = self.files.append("texts", texts)
            summary["texts"] = [place.file, place.offset, place.length]
        self.files.append("groups", summary)
        return ended

    def evaluate(self):
        """A held-out prompt has one response, in a second after the step."""
        ended = self._group(1, self.time, status=HELD_OUT)
        self.files.flush()
        return ended

    def _poll(self, began, running):
        for second in range(5):
            servers = [
                {
                    "url": f"http://127.0.0.1:3000{rank}",
                    "state": "serving",
                    "running": running * 4 if second < 3 - rank else 0,
                    "queued": rank,
                    "version": "1",
                    "restarts": 0,
                    "kv": 0.2 + 0.1 * second,
                }
                for rank in range(2)
            ]
            self.event(
                "engine",
                began + second,
                in_flight=8,
                queued=0,
                completed=10,
                retries=0,
                tokens_per_second=1000 + 10 * second,
                prompt_tokens=10,
                response_tokens=10,
                cache_hit_rate=0.4,
                servers=servers,
            )
            lately = {"trainer_waits": 0.5, "tokens_per_second": 900.0}
            self.event(
                "collector",
                began + second,
                groups_running=4,
                max_staleness=1,
                tokens=100,
                lately=lately,
                bottleneck="",
            )

    def close(self):
        self.files.close()


def write_run(folder, steps=10, **options):
    """Returns the groups of a whole run."""
    run = Recorded(folder, **options)
    for step in range(steps):
        run.step(turns=2 if step % 4 == 3 else 1)
    run.close()
    return run
