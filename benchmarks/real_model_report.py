"""Tables and plots of ``docs/source/results.rst``, from files of ``real_model.py``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ACCURACY = "eval_reward/right"
REWARD = "batch/reward"

KINDS = {
    "sync": "synchronous",
    "colocated": "colocated",
    "k1": "asynchronous, k = 1",
    "k2": "asynchronous, k = 2",
    "torchrl": "TorchRL's own parts",
}
COLORS = {
    "sync": "#1f77b4",
    "colocated": "#9467bd",
    "k1": "#ff7f0e",
    "k2": "#2ca02c",
    "torchrl": "#7f7f7f",
}
WEIGHTS = {"full": "all weights", "lora": "LoRA"}

COMMONEST = {"letters": 0.495, "syllogisms": 0.675}
"""Share of the held-out problems, 200 of them, whose answer is the commonest."""

WINDOW = 10
"""Steps that a plotted reward is the mean of."""

Run = Mapping[str, Any]


def write(folders: Sequence[Path], docs: Path) -> None:
    """Writes ``results_measured.txt`` and a plot for each task.

    Args:
        folders: with ``runs.json``, of one or several calls.
        docs: where the pages are.
    """
    runs: dict[str, Run] = {}
    for folder in folders:
        for found in json.loads((folder / "runs.json").read_text())["runs"]:
            if "error" not in found or found["name"] not in runs:
                runs[found["name"]] = found
    done = [run for run in runs.values() if len(run.get("rows", ())) > 1]
    done = [run for each in grouped(done).values() for run in each]
    tasks = list(dict.fromkeys(run["task"] for run in done))
    parts = [table_of_runs(done), table_of_gaps(done)]
    for task in tasks:
        of_task = [run for run in done if run["task"] == task]
        shown = [run for run in of_task if values(run, ACCURACY)]
        plot(task, shown, docs / "images" / f"results_{task}.svg")
        parts.append(figure(task))
        parts.append(table_of_samples(task, of_task))
    parts.append(list_of_errors(runs.values()))
    text = "\n".join(part for part in parts if part)
    (docs / "results_measured.txt").write_text(text, encoding="utf-8")
    print(f"{len(done)} runs of {len(runs)}: {docs / 'results_measured.txt'}")


def write_demo(folder: Path, docs: Path) -> None:
    """Writes ``results_demo.txt`` and its plot, of a run of ``make demo-real``."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    accuracy = [row[ACCURACY] for row in rows if ACCURACY in row]
    said = (
        f"Held-out accuracy went from {accuracy[0]:.2f} to {accuracy[-1]:.2f} in "
        f"{rows[-1]['step']} steps and {rows[-1]['seconds'] / 60:.0f} minutes."
    )
    samples = [
        {**old, "after": new["said"]}
        for old, new in zip(rows[0]["answers"], rows[-1]["answers"], strict=True)
    ]
    name = {"name": "make demo-real", "task": "demo", "weights": "full", "kind": "sync"}
    run = {**name, "rows": rows, "samples": samples}
    plot("demo", [run], docs / "images" / "results_demo.svg")
    parts = [f"{said}\n", figure("demo"), table_of_samples("demo", [run])]
    (docs / "results_demo.txt").write_text("\n".join(parts), encoding="utf-8")
    print(said)


def grouped(runs: Iterable[Run]) -> dict[tuple[str, str, str], list[Run]]:
    """Returns runs that differ in their seed alone, together."""
    found: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in runs:
        found[run["task"], run["weights"], run["kind"]].append(run)
    order = [*KINDS]
    return dict(sorted(found.items(), key=lambda x: (*x[0][:2], order.index(x[0][2]))))


def values(run: Run, name: str) -> list[float]:
    """Returns what a run's steps have of a metric."""
    return [row[name] for row in run["rows"] if row.get(name) is not None]


def spread(numbers: Sequence[float], form: str = "{:.3f}") -> str:
    """Returns a mean, with the least and greatest of several.

    Examples:
        >>> spread([0.5]), spread([0.25, 0.75])
        ('0.500', '0.500 (0.250 to 0.750)')
    """
    if not numbers:
        return "-"
    said = form.format(fmean(numbers))
    if len(numbers) > 1:
        said += f" ({form.format(min(numbers))} to {form.format(max(numbers))})"
    return said


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of reStructuredText."""
    lines = [f".. list-table:: {title}", "   :class: stack figures"]
    lines += ["   :header-rows: 1", ""]
    for row in (header, *rows):
        marks = ["   * - ", *["     - "] * (len(row) - 1)]
        lines += [
            f"{mark}{cell}".rstrip() for mark, cell in zip(marks, row, strict=True)
        ]
    return "\n".join([*lines, ""])


def table_of_runs(runs: Sequence[Run]) -> str:
    """Returns what was learned, and how fast."""
    rows = []
    for (task, weights, kind), each in grouped(runs).items():
        accuracy = [values(run, ACCURACY) for run in each]
        last = [run["rows"][-1] for run in each]
        phases = [
            fmean(values(run, f"time/{name}") or [0.0])
            for run in each
            for name in ("collect", "train", "update")
        ]
        collect, train, update = (fmean(phases[n::3]) for n in range(3))
        per_step = fmean(row["seconds"] / row["step"] for row in last)
        rows.append(
            (
                task,
                f"{WEIGHTS[weights]}, {KINDS[kind]}",
                str(len(each)),
                spread([found[0] for found in accuracy if found]),
                spread([found[-1] for found in accuracy if found]),
                f"{fmean(row['step'] for row in last):.0f}",
                f"{fmean(row['seconds'] for row in last):.0f}",
                f"{60 / per_step:.1f}",
                f"{collect:.2f} + {train:.2f} + {update:.2f}",
            )
        )
    header = (
        "task", "run", "seeds", "held-out before", "after", "steps", "seconds",
        "steps a minute", "seconds of a step: waiting + training + weights",
    )  # fmt: skip
    return table("What was learned, and how fast", header, rows)


def table_of_gaps(runs: Sequence[Run]) -> str:
    """Returns how far trainer and server are from each other."""
    rows = []
    for (task, weights, kind), each in grouped(runs).items():
        names = (
            "gap/mean", "gap/max", "rollout_corr/kl",
            "rollout_corr/rollout_is_mean", "batch/age",
        )  # fmt: skip
        found = [[x for run in each for x in values(run, name)] for name in names]
        if not found[0] and not found[2]:
            continue
        mean, most, *rest = found
        rows.append(
            (
                f"{task}, {WEIGHTS[weights]}, {KINDS[kind]}",
                f"{fmean(mean):.1e}" if mean else "-",
                f"{max(most):.1e}" if most else "-",
                *(f"{fmean(x):.3g}" if x else "-" for x in rest),
            )
        )
    header = (
        "run", "mean gap of a token's log-prob", "greatest",
        "KL to the sampling policy", "mean weight of the correction", "mean age",
    )  # fmt: skip
    title = "Log-probs of trainer and server, and the correction of what is older"
    return table(title, header, rows) if rows else ""


def figure(task: str) -> str:
    """Returns the place of a plot."""
    return (
        f".. figure:: images/results_{task}.svg\n"
        f"   :alt: Held-out accuracy and reward of {task} over steps and seconds\n\n"
        f"   {task}: held-out accuracy and reward, over steps and over seconds of "
        f"training.\n"
    )


def table_of_samples(task: str, runs: Sequence[Run]) -> str:
    """Returns answers before and after."""
    run = next((run for run in runs if run.get("samples")), None)
    if run is None:
        return ""

    def code(text: str) -> str:
        # Within a literal there are no backquotes and no line ends.
        short = " ".join(text.replace("`", "'").split())[:160]
        return f"``{short}``" if short else "(nothing)"

    rows = [
        tuple(code(sample[name]) for name in ("question", "right", "said", "after"))
        for sample in run["samples"]
    ]
    header = ("question", "right answer", "greedy before", "after")
    return table(f"{run['name']}: answers to held-out problems", header, rows)


def list_of_errors(runs: Iterable[Run]) -> str:
    """Returns what did not run, and what TorchRL's weight update came to."""
    lines = []
    for run in runs:
        if "error" in run:
            last = run["error"].strip().splitlines()[-1][:300].replace("`", "'").strip()
            lines.append(f"- {run['name']} did not come to its end: ``{last}``")
        if "update" in run:
            said = " ".join(run["update"].split())[:300].replace("`", "'").strip()
            lines.append(f"- {run['name']}, a weight update: ``{said}``")
    return "\n".join([*lines, ""]) if lines else ""


def plot(task: str, runs: Sequence[Run], path: Path) -> None:
    """Plots held-out accuracy and reward over steps and over seconds."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = task
    page = Figure(figsize=(9, 6), layout="constrained")
    axes = page.subplots(2, 2, sharey="row")
    seen = set()
    for run in runs:
        kind, lora = run["kind"], run["weights"] == "lora"
        name = f"{WEIGHTS[run['weights']]}, {KINDS[kind]}"
        style = {
            "color": COLORS[kind],
            "linestyle": "--" if lora else "-",
            "linewidth": 1.0,
            "label": None if name in seen else name,
        }
        seen.add(name)
        for column, clock in enumerate(("step", "seconds")):
            held_out = [r for r in run["rows"] if r.get(ACCURACY) is not None]
            axes[0, column].plot(
                [r[clock] for r in held_out], [r[ACCURACY] for r in held_out], **style
            )
            rows = [r for r in run["rows"] if r["step"] and r.get(REWARD) is not None]
            smooth = [
                fmean(r[REWARD] for r in rows[max(n - WINDOW + 1, 0) : n + 1])
                for n in range(len(rows))
            ]
            axes[1, column].plot([r[clock] for r in rows][::2], smooth[::2], **style)
    if task in COMMONEST:
        for each in axes[0]:
            name = "always the commonest answer"
            each.axhline(COMMONEST[task], color="k", linestyle=":", label=name)
    axes[0, 0].set_ylabel("held-out accuracy, greedy")
    axes[1, 0].set_ylabel(f"reward, mean of {WINDOW} steps")
    axes[1, 0].set_xlabel("steps")
    axes[1, 1].set_xlabel("seconds of training")
    axes[0, 0].legend(fontsize="small")
    for each in axes.flat:
        each.grid(alpha=0.3)
    page.savefig(path, metadata={"Date": None})
