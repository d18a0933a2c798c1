"""The page in a real browser: what is drawn, told, chosen and reached by keyboard."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request

import pytest
from helpers.browser import open_browser
from helpers.recorded_runs import BEGAN, Recorded, write_run

from torchrl_sglang.recording.reading import MOST_OF_LINE, Recording
from torchrl_sglang.viewer.page import page_html, self_contained
from torchrl_sglang.viewer.serve import Viewer, ViewerServer

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("recorded") / "run", steps=15)


@pytest.fixture(scope="module")
def file(written):
    path = written.folder.with_suffix(".html")
    recordings = [Recording.open(written.folder)]
    path.write_text(self_contained(recordings, now=BEGAN + 1e6), encoding="utf-8")
    return path


@pytest.fixture
def opened(page, file):
    page.look()
    page.errors.clear()
    page.requested.clear()
    page.open(file.as_uri())
    yield page
    assert page.errors == []


def draw(page, chart):
    page.eval(f"document.getElementById('{chart}').scrollIntoView()")
    page.wait(f"document.getElementById('{chart}').querySelector('svg')")


def test_a_file_needs_no_network(opened, file):
    for chart in opened.eval("[...document.querySelectorAll('.chart')].map(b => b.id)"):
        draw(opened, chart)
    assert [url for url in opened.requested if not url.startswith("data:")] == [
        file.as_uri()
    ]


def test_figures_on_the_page_are_those_of_the_files(opened, written):
    facts = opened.eval(
        "Object.fromEntries([...document.querySelectorAll('[data-fact]')]"
        ".map(e => [e.dataset.fact, e.textContent]))"
    )
    assert facts["groups"] == str(len(written.written))
    opened.eval("document.querySelector('[data-sort=id]').click()")
    rows = opened.eval(
        "[...document.querySelectorAll('#table tbody tr')]"
        ".map(r => [r.dataset.id, r.cells[5].textContent, r.cells[9].textContent])"
    )
    newest = sorted(written.written, key=lambda group: -group.id)[:50]
    for (name, reward, tokens), group in zip(rows, newest, strict=True):
        rewards = [each.reward for each in group.responses]
        count = sum(
            len(turn.completion.token_ids)
            for each in group.responses
            for turn in each.turns
        )
        assert name == str(group.id)
        assert float(reward) == pytest.approx(sum(rewards) / len(rewards))
        assert tokens == f"{count:,}"


def test_the_curve_that_is_drawn_has_the_points_of_the_files(opened, written):
    draw(opened, "curve-length")
    opened.eval("document.querySelector('[data-curve=length] summary').click()")
    opened.wait("document.querySelector('[data-curve=length] .numbers table')")
    cells = opened.eval(
        "[...document.querySelectorAll('[data-curve=length] .numbers tbody tr')]"
        ".map(r => Number(r.cells[2].textContent))"
    )
    # What assistive technology is told of each point.
    labels = opened.eval(
        "[...document.querySelectorAll('#curve-length [aria-roledescription=point]')]"
        ".map(e => e.getAttribute('aria-label'))"
    )
    drawn = [float(re.search(r"tokens: ([\d.]+)", each)[1]) for each in labels]
    assert len(cells) == written.batch
    # Three digits are told.
    assert drawn == pytest.approx(cells, rel=5e-3)
    assert sum(cells) / len(cells) == pytest.approx(
        sum(
            len(turn.completion.token_ids)
            for group in written.written
            for each in group.responses
            for turn in each.turns
        )
        / sum(len(group.responses) for group in written.written),
        rel=1e-3,
    )


def test_hovering_tells_of_a_bar(opened):
    draw(opened, "timeline-0")
    opened.hover("#timeline-0 .mark-rect path")
    opened.wait("document.querySelector('#vg-tooltip-element.visible')")
    told = opened.eval("document.querySelector('#vg-tooltip-element').innerText")
    assert "lane" in told
    assert "state" in told
    assert re.search(r"seconds:?\s+\d", told)


def test_filters_and_search_choose_groups(opened, written):
    wrong = [
        group
        for group in written.written
        if all(each.reward == 0 for each in group.responses)
    ]
    opened.eval("document.querySelector('[data-filter=wrong]').click()")
    count = "Number(document.querySelector('[data-count]').dataset.count)"
    assert opened.eval(count) == len(wrong)
    assert opened.eval(
        "document.querySelector('[data-filter=wrong]').getAttribute('aria-pressed')"
    ) == ("true")
    opened.eval("document.querySelector('[data-filter=\"\"]').click()")
    opened.eval(
        "(() => { const box = document.querySelector('#tools input'); box.value = "
        "'is 17 +'; box.dispatchEvent(new Event('input')); })()"
    )
    opened.wait(f"{count} === 1")
    opened.wait(
        "document.querySelector('[data-searched]').textContent.includes('60 of 60')"
    )


def test_a_search_finds_responses_and_a_link_leads_to_a_group(opened, file, written):
    found = [
        group
        for group in written.written
        if any(
            "answer is" in t.reply["content"] for r in group.responses for t in r.turns
        )
    ]
    opened.open(f"{file.as_uri()}?again#text=answer+is&open=3&axis=tokens")
    count = "Number(document.querySelector('[data-count]').dataset.count)"
    opened.wait(f"{count} === {len(found)}")
    opened.wait("document.querySelector('#group h3')?.textContent === 'Group 3'")
    draw(opened, "curve-length")
    labels = opened.eval(
        "[...document.querySelectorAll('#curve-length [aria-roledescription=point]')]"
        ".map(e => e.getAttribute('aria-label'))"
    )
    place = re.search(r"response tokens: ([\d.]+)k", labels[-1])[1]
    total = sum(
        len(turn.completion.token_ids)
        for group in written.written
        for each in group.responses
        for turn in each.turns
    )
    assert 1000 * float(place) == pytest.approx(total, rel=5e-3)
    opened.eval("location.hash = '#open=5'")
    opened.wait("document.querySelector('#group h3')?.textContent === 'Group 5'")
    assert opened.eval("document.querySelector('#tools input').value") == ""


def test_a_prompt_is_followed_over_epochs(page, tmp_path):
    run = Recorded(tmp_path / "run", prompts=8)
    for _ in range(4):
        run.step()
    run.close()
    path = tmp_path / "run.html"
    recordings = [Recording.open(run.folder)]
    path.write_text(self_contained(recordings, now=BEGAN + 1e6), encoding="utf-8")
    page.look()
    page.errors.clear()
    page.open(f"{path.as_uri()}#open=11")
    page.wait("document.querySelectorAll('#same-prompt tbody tr').length === 2")
    links = "[...document.querySelectorAll('#same-prompt a')]"
    assert page.eval(f"{links}.map(e => e.textContent)") == ["3", "11"]
    page.eval(f"{links}[0].click()")
    page.wait("document.querySelector('#group h3').textContent === 'Group 3'")
    assert page.errors == []


def test_a_response_is_reached_and_read_by_keyboard_alone(opened, written):
    group = max(written.written, key=lambda each: each.id)
    opened.eval("document.querySelector('[data-sort=id]').focus()")
    opened.press("Enter")
    for _ in range(40):
        opened.press("Tab")
        if opened.eval("document.activeElement.dataset.id") is not None:
            break
    assert opened.eval("document.activeElement.dataset.id") == str(group.id)
    opened.press("ArrowDown")
    opened.press("ArrowUp")
    opened.press("Enter")
    opened.wait("document.querySelector('.strip')")
    opened.wait("document.activeElement.id === 'group'")
    for _ in range(10):
        opened.press("Tab")
        if opened.eval("document.activeElement.className") == "strip":
            break
    opened.press("Home")
    opened.press("ArrowRight")
    told = opened.eval("document.querySelector('.about').textContent")
    done = group.responses[0].turns[0].completion
    assert told.startswith(f"token 2 of {len(done.token_ids)}")
    assert f"id {done.token_ids[1]}" in told
    assert f"{done.log_probs[1]:.2f}"[:4] in told


@pytest.mark.slow
def test_of_a_very_long_response_both_ends_are_shown(page, tmp_path):
    run = Recorded(tmp_path / "long", size=1, groups=1)
    run.step(tokens=1_500_000)
    run.close()
    recording = Recording.open(run.folder)
    assert recording.groups[0].texts[2] > MOST_OF_LINE
    path = tmp_path / "long.html"
    path.write_text(self_contained([recording], now=BEGAN + 1e6), encoding="utf-8")
    page.look()
    page.errors.clear()
    page.open(path.as_uri())
    page.eval("document.querySelector('#table tbody tr').click()")
    page.wait("document.querySelector('.strip')")
    assert page.eval("document.querySelectorAll('.strip span').length") == 20_000
    page.eval("document.querySelector('.strip').focus()")
    page.press("End")
    told = page.eval("document.querySelector('.about').textContent")
    assert told.startswith("token 1500000 of 1500000;")
    notes = page.eval("document.querySelector('.response').textContent")
    assert "1,480,000 tokens in the middle are not shown" in notes
    assert page.errors == []


def test_tokens_are_coloured_by_what_is_chosen(opened):
    opened.eval("document.querySelector('#table tbody tr').click()")
    opened.wait("document.querySelector('.strip')")
    kinds = opened.eval(OPTIONS)
    # Nobody has recorded the trainer's log-probs of this run, nor entropies.
    assert kinds == ["log_prob", "version", "mask"]
    classes = {}
    for kind in kinds:
        opened.eval(
            f"(() => {{ const box = document.querySelector('#colour'); box.value = "
            f"'{kind}'; box.dispatchEvent(new Event('change')); }})()"
        )
        classes[kind] = set(
            opened.eval(
                "[...document.querySelectorAll('.strip span')].map(e => e.className)"
            )
        )
    assert classes["mask"] == {"d2"}
    assert len(classes["version"]) == 2
    assert classes["log_prob"] <= {f"q{n}" for n in range(5)}


OPTIONS = "[...document.querySelector('#colour').options].map(o => o.value)"

CONTRAST = """(() => {
  const often = {willReadFrequently: true};
  const canvas = document.createElement('canvas').getContext('2d', often);
  const rgb = (text) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (c) => {
    const [r, g, b] = c.slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const found = rgb(getComputedStyle(node).backgroundColor);
      if (found[3] === 255) return found;
    }
    return rgb('Canvas');
  };
  const low = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes]
      .some(n => n.nodeType === 3 && n.textContent.trim());
    const hidden = node.disabled || node.closest('script, style, noscript');
    if (!own || hidden || !node.getClientRects().length) continue;
    const style = getComputedStyle(node);
    const text = rgb(node.closest('svg') ? style.fill : style.color);
    const [a, b] = [light(text), light(behind(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push([node.tagName, node.textContent.slice(0, 30), ratio]);
  }
  return low;
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_text_has_contrast_and_fits(page, file, width, dark):
    page.errors.clear()
    page.look(width=width, dark=dark)
    page.open(file.as_uri())
    draw(page, "timeline-0")
    page.eval("document.querySelector('#table tbody tr').click()")
    page.wait("document.querySelector('.strip')")
    assert page.eval(CONTRAST) == []
    wide = page.eval("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide[0] <= wide[1]
    assert page.errors == []


@pytest.fixture
def served(tmp_path):
    run = Recorded(tmp_path / "live")
    # A run that goes on now.
    run.time = time.time() - 5.0
    run.step()
    viewer = Viewer([Recording.open(run.folder)])
    with ViewerServer(viewer, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield run, server.url
        server.shutdown()
        thread.join(60)
    run.close()


def test_a_live_run_is_followed(page, served):
    run, url = served
    page.look()
    page.errors.clear()
    page.open(url)
    fact = "document.querySelector('[data-fact=batches]').textContent"
    assert page.eval(fact) == "1"
    page.eval("document.querySelector('#table tbody tr').click()")
    page.wait("document.querySelector('.strip')")
    summary = "document.querySelector('[data-curve=length] summary')"
    page.eval(f"{summary}.focus(); {summary}.click()")
    rows = "document.querySelectorAll('[data-curve=length] .numbers tbody tr').length"
    page.wait(f"{rows} === 1")
    run.step()
    run.files.flush()
    page.wait(f"{fact} === '2'")
    assert page.eval("document.querySelector('.strip') !== null")
    # What was opened stays open, and has the focus.
    page.wait(f"{rows} === 2")
    assert page.eval(f"document.activeElement === {summary}")
    assert page.errors == []


@pytest.mark.slow
def test_a_run_that_goes_on_after_a_while_is_followed(page, served):
    run, url = served
    page.look()
    page.errors.clear()
    page.open(url)
    page.wait("document.querySelector('#live').textContent === ''")
    # Another recorder writes to the folder.
    later = Recorded(run.folder, writer="later")
    later.time = time.time() - 5.0
    later.step()
    later.close()
    page.wait("document.querySelector('#live').textContent === 'running'")
    assert page.errors == []


def test_only_this_machine_is_answered(served):
    _, url = served
    request = urllib.request.Request(url, headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request, timeout=60)
    with urllib.request.urlopen(f"{url}data.json", timeout=60) as answer:
        assert json.loads(answer.read())["runs"][0]["name"] == "live"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{url}group/0/none", timeout=60)


def test_a_page_without_its_viewer_says_so(page, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page_html("run", ""))
    page.look()
    page.call("Page.navigate", url=path.as_uri())
    page.wait("document.querySelector('#live').textContent.includes('did not tell')")
    page.errors.clear()
