"""Makes the pictures of the guide on seeing a run, of runs that were recorded.

torchrl-sglang demo --output runs/demo
python docs/viewer_pictures.py run runs/demo
make demo-async
python docs/viewer_pictures.py asynchronous runs/grpo_tiny_async
python docs/viewer_pictures.py agent RUN  # the folder that plot_pydantic_ai.py prints
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "test"))

from helpers.browser import Page, open_browser  # noqa: E402

from torchrl_sglang.recording.reading import Recording  # noqa: E402
from torchrl_sglang.viewer.page import self_contained  # noqa: E402

IMAGES = ROOT / "docs" / "source" / "images"
WIDTH, HEIGHT = 1280, 1000


@contextmanager
def open_run(run: str) -> Iterator[Page]:
    """Opens the page of a run in a browser."""
    recordings = [Recording.open(run)]
    with tempfile.TemporaryDirectory() as folder, open_browser(Path(folder)) as page:
        file = Path(folder) / "run.html"
        file.write_text(self_contained(recordings, now=time.time()), encoding="utf-8")
        page.look(width=WIDTH, height=HEIGHT)
        page.open(file.as_uri())
        yield page


def draw(page: Page) -> None:
    """Has all charts of a page drawn, and goes to its beginning."""
    for chart in page.eval("[...document.querySelectorAll('.chart')].map(b => b.id)"):
        page.eval(f"document.getElementById('{chart}').scrollIntoView()")
        page.wait(f"document.getElementById('{chart}').querySelector('svg')")
    page.eval("window.scrollTo(0, 0)")


def picture_run(page: Page) -> None:
    """Takes the overview, and the tokens of the first group."""
    draw(page)
    page.screenshot(IMAGES / "viewer_overview.png", full=False)
    page.look(width=WIDTH, height=HEIGHT, dark=True)
    page.eval("document.querySelector('#table tbody tr').click()")
    page.wait("document.querySelector('.strip')")
    page.eval("document.querySelector('.strip').focus()")
    page.press("Home")
    page.eval("document.getElementById('group').scrollIntoView()")
    page.screenshot(IMAGES / "viewer_tokens.png", full=False)


def picture_asynchronous(page: Page) -> None:
    """Takes the overview: trainer and servers work at once."""
    draw(page)
    page.screenshot(IMAGES / "viewer_asynchronous.png", full=False)


def picture_agent(page: Page) -> None:
    """Takes the turns of the first session of an agent."""
    page.eval("document.querySelector('#table tbody tr').click()")
    page.wait("document.querySelector('.strip')")
    page.eval("document.querySelector('.response').scrollIntoView()")
    page.screenshot(IMAGES / "viewer_agent.png", full=False)


KINDS = {
    "run": picture_run,
    "asynchronous": picture_asynchronous,
    "agent": picture_agent,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("run", help="its folder")
    given = parser.parse_args()
    with open_run(given.run) as page:
        KINDS[given.kind](page)


if __name__ == "__main__":
    main()
