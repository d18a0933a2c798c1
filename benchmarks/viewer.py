"""What opening a run takes: the viewer, its page in a browser, and both together.

It makes a recording, starts ``torchrl-sglang view`` and opens the page in Chromium, if
there is one, which runs already. Medians.

    python benchmarks/viewer.py
    python benchmarks/viewer.py --groups 8
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "test"))

from shutil import which  # noqa: E402

from helpers.browser import NAMES, Page, open_browser  # noqa: E402
from helpers.recorded_runs import Recorded  # noqa: E402

from script import print_row  # noqa: E402

GROUP_SIZE = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=100_000)
    parser.add_argument("--groups", type=int, default=64, help="groups of a batch")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "run")
        run = Recorded(folder, size=GROUP_SIZE, groups=options.groups, texts=False)
        for _ in range(options.responses // (GROUP_SIZE * options.groups)):
            run.step()
        run.close()
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{options.responses:,} responses, {size / 1e6:.0f} MB")
        measure(folder, Path(name, "browser"), options.repeats)


@contextmanager
def viewing(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts the command, and yields its process and its address."""
    command = [sys.executable, "-m", "torchrl_sglang", "view", str(folder)]
    with subprocess.Popen(
        [*command, "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as viewer:
        assert viewer.stdout is not None
        try:
            yield viewer, viewer.stdout.readline().strip()
        finally:
            viewer.terminate()


def measure(folder: Path, profile: Path, repeats: int) -> None:
    """Opens a run, and prints what it took."""
    spent = []
    for _ in range(repeats):
        with viewing(folder) as (viewer, url):
            with urllib.request.urlopen(f"{url}data.json", timeout=600) as answer:
                data = answer.read()
            spent.append(processor_seconds(viewer.pid))
    print_row("viewer's processor, imports included", statistics.median(spent), "s")
    print_row("data of the page", len(data) / 1e6, "MB")
    if not any(map(which, NAMES)):
        return
    waited, drawn = [], []
    with open_browser(profile) as browser:
        browser.look()
        browser.call("Performance.enable")
        for _ in range(repeats):
            began = time.perf_counter()
            with viewing(folder) as (_, url):
                browser.open(url)
                waited.append(time.perf_counter() - began)
                drawn.append(task_seconds(browser))
    print_row("browser's processor", statistics.median(drawn), "s")
    print_row("from the command to the page", statistics.median(waited), "s")


def task_seconds(browser: Page) -> float:
    """Returns the processor time of the browser's page so far."""
    found = browser.call("Performance.getMetrics")["metrics"]
    return {each["name"]: each["value"] for each in found}["TaskDuration"]


def processor_seconds(pid: int) -> float:
    """Returns the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
