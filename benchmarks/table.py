"""The arrangements of a GRPO run side by side, each beside the limits of its own run.

Each row is a run of `recipe.py` in a process of its own. It is kept in a file as soon
as it is there, so that rows can be measured in several calls, and a table is written
from all of them. The limit of a row is what generation and training take alone,
measured in that very run: their sum for an arrangement that does them in turn, the
longer one for one that does both at once.

    python benchmarks/table.py 0.5b
    python benchmarks/table.py 3b --trainers 2 --rows synchronous colocated
    python benchmarks/table.py runs/smollm2-135m-instruct --rows asynchronous-1
    python benchmarks/table.py tiny --device cpu --rows synchronous asynchronous-1
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from script import read_options

HERE = Path(__file__).parent
ROWS: dict[str, tuple[str, ...]] = {
    "synchronous": ("--arrangement", "apart"),
    "asynchronous-1": ("--arrangement", "apart", "--max-staleness", "1"),
    "asynchronous-2": ("--arrangement", "apart", "--max-staleness", "2"),
    "fp8-1": (
        *("--arrangement", "apart", "--max-staleness", "1"),
        *("--rollout-dtype", "fp8"),
    ),
    "colocated": ("--arrangement", "colocated"),
}
"""Name of a row -> options of `recipe.py`."""

MEANINGS = {
    "synchronous": "synchronous",
    "asynchronous-1": "asynchronous, at most 1 update behind",
    "asynchronous-2": "asynchronous, at most 2 updates behind",
    "fp8-1": "the same with 1, servers in block FP8",
    "colocated": "colocated",
}

CPU = ("--groups", "4", "--new-tokens", "64", "--mean-tokens", "32")
"""A load that a CPU can do."""

HEADER = """\
.. list-table::
   :class: stack figures
   :header-rows: 1

   * - model, trainers, hardware
     - arrangement
     - steps an hour
     - of the limit
     - generated tokens/s, of generation alone
     - trained tokens/s, of training alone
     - overlap
     - update
     - peak of a trainer
"""


def measure(name: str, model: str, options: Any) -> dict[str, Any]:
    """Runs a row; returns its figures.

    Raises:
        subprocess.SubprocessError: if it fails, or takes too long.
    """
    start = [sys.executable]
    if options.trainers > 1:
        start += ["-m", "torch.distributed.run", "--standalone"]
        start += ["--nproc-per-node", str(options.trainers)]
    with tempfile.TemporaryDirectory(prefix="torchrl_sglang_table_") as folder:
        found = Path(folder) / "row.json"
        command = [*start, str(HERE / "recipe.py"), model, *ROWS[name]]
        command += ["--device", options.device, "--json", str(found)]
        command += ["--steps", str(options.steps), "--alone", str(options.alone)]
        command += ["--max-tokens-per-pass", str(options.max_tokens_per_pass)]
        command += CPU if options.device == "cpu" else ()
        subprocess.run(command, check=True, timeout=options.seconds)
        row: dict[str, Any] = json.loads(found.read_text())
    return row


def cells(row: dict[str, Any]) -> list[str]:
    """Returns a row as the table has it.

    Examples:
        >>> alone = {"generate": 4.0, "train": 2.0, "generated_tokens": 4000}
        >>> row = {"model": "0.5b", "ranks": 1, "hardware": "H200", "alone": alone}
        >>> row |= {"row": "asynchronous-1", "batch/tokens": 4000, "responses": 4000}
        >>> row |= {"step": [5.0], "train": [2.0], "update": [0.5], "trainer_peak": 1e9}
        >>> cells(row)[2:]
        ['720', '0.80', '800, 0.80', '2,000, 1.00', '0.50', '0.50 s', '1.0 GB']
    """
    alone, step = row["alone"], row["step"][0]
    generate, train = alone["generate"], alone["train"]
    in_turn = row["row"] in {"synchronous", "colocated"}
    limit = generate + train if in_turn else max(generate, train)
    # What a batch generates, and what generation alone does in that time.
    made = row["responses"] / step
    best = alone["generated_tokens"] / generate
    trained, busy = row["batch/tokens"] / row["train"][0], train / row["train"][0]
    hidden = max(generate + train - step, 0.0) / min(generate, train)
    return [
        f"{row['model']}, {row['ranks']}, {row['hardware']}",
        MEANINGS[row["row"]],
        f"{3600 / step:.0f}",
        f"{limit / step:.2f}",
        f"{made:,.0f}, {made / best:.2f}",
        f"{trained:,.0f}, {busy:.2f}",
        f"{min(hidden, 1.0):.2f}",
        f"{row['update'][0]:.2f} s",
        f"{row['trainer_peak'] / 1e9:.1f} GB",
    ]


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes the table."""
    lines = [HEADER.rstrip()]
    for row in rows:
        first, *others = cells(row)
        lines += [f"   * - {first}", *(f"     - {each}" for each in others)]
    path.write_text("\n".join(lines) + "\n")


def hardware(device: str) -> str:
    """Returns what this runs on."""
    if device == "cpu":
        return "CPU"
    name = torch.cuda.get_device_name().removeprefix("NVIDIA ")
    return f"{torch.cuda.device_count()} x {name}"


def keep(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows with this one, in place of an older one of the same run."""
    same = ("model", "ranks", "hardware", "row")
    others = [each for each in rows if any(each[key] != row[key] for key in same)]
    return [*others, row]


def main() -> None:
    """Measures rows, and writes the table of all."""
    options = read_options(
        __doc__,
        model="0.5b",
        device="cuda|cpu",
        trainers=1,
        rows=tuple(ROWS),
        steps=6,
        alone=3,
        max_tokens_per_pass=16_384,
        seconds=420,
        found=str(HERE / "table.json"),
        table=str(HERE.parent / "docs" / "source" / "measured_table.txt"),
    )
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        sys.exit(f"--rows {' '.join(unknown)}: there are {', '.join(ROWS)}.")
    kept = Path(options.found)
    rows = json.loads(kept.read_text()) if kept.exists() else []
    failed = []
    for name in options.rows:
        try:
            row = measure(name, options.model, options)
        except subprocess.SubprocessError as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        about = {"model": Path(options.model).name}
        about |= {"hardware": hardware(options.device)}
        rows = keep(rows, {**row, **about, "row": name})
        kept.write_text(json.dumps(rows, indent=1) + "\n")
        write(rows, Path(options.table))
    if failed:
        sys.exit(f"Not measured: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
