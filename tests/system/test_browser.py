"""The page in Chromium: it draws, its slider and its themes work, and it asks nobody anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedveil import algorithms
from fedveil.reporting.load import load_story
from fedveil.reporting.page import page
from tests.system.browser import PROGRAM, Tab, browser
from tests.unit.reporting.made import a_recipe, write_comparison, write_run
from tests.unit.reporting.test_report import HOSTILE

pytest.importorskip("websockets", reason="websockets is not installed")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no chromium")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hostile run and a comparison, told."""
    base = tmp_path_factory.mktemp("pages")
    run = write_run(base / "run", classes=[HOSTILE, "b", HOSTILE], plane=True, rounds=30)
    members = [("clip", a_recipe(), {}), (HOSTILE, algorithms.fedavg(), {})]
    many = write_comparison(base / "many", members, rounds=30, seeds=2)
    (base / "run.html").write_text(page(load_story([run])), encoding="utf-8")
    (base / "many.html").write_text(page(load_story([many])), encoding="utf-8")
    return base


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


@pytest.fixture(scope="module")
def opened(tab: Tab, pages: Path) -> Tab:
    """The run's page, loaded once for the tests that leave it as it was."""
    tab.events.clear()
    tab.prefer("light")
    tab.window(1280, 900)
    tab.open(pages / "run.html")
    return tab


def dots(tab: Tab) -> str:
    return str(tab.run("JSON.stringify(Array.from(document.querySelectorAll("
                       "'figure:has(.slider) .scatterlayer path.point'))"
                       ".map(p => p.getAttribute('transform')))"))  # fmt: skip


def background(tab: Tab) -> str:
    return str(tab.run("getComputedStyle(document.body).backgroundColor"))


def ink(tab: Tab) -> str:
    return str(tab.run("document.querySelector('.chart .xtick text').style.fill"))


def check(tab: Tab) -> None:
    """All charts are drawn, no script or image came from data, nothing was complained or asked."""
    empty = tab.run(
        "Array.from(document.querySelectorAll('.chart')).filter(c => !c.querySelector("
        "'.scatterlayer path, .heatmaplayer image')).map(c => c.getAttribute('aria-label'))"
    )
    assert empty == []
    assert tab.run("document.scripts.length") == 4  # Plotly twice: as text, and run
    assert tab.run("document.querySelectorAll('img').length") == 0
    assert tab.complaints() == []
    assert any(e.get("method") == "Network.requestWillBeSent" for e in tab.events)


def test_a_run_is_drawn_without_a_complaint_or_a_request(opened: Tab) -> None:
    check(opened)


def test_the_slider_moves_the_dots_by_key(opened: Tab) -> None:
    tab = opened
    before, said = dots(tab), tab.run("document.querySelector('.slider output').value")
    assert before != "[]"
    tab.run("document.querySelector('.slider input').focus()")
    for kind in ("keyDown", "keyUp"):
        tab.send("Input.dispatchKeyEvent", type=kind, key="End", code="End",
                 windowsVirtualKeyCode=35)  # fmt: skip
    tab.until("document.querySelector('.slider output').value.startsWith('Round 30:')")
    assert dots(tab) != before
    assert tab.run("document.querySelector('.slider output').value") != said
    told = tab.run("document.querySelector('.slider input').getAttribute('aria-valuetext')")
    assert told == "round 30"


def test_the_theme_follows_the_system_and_the_switch(opened: Tab) -> None:
    tab = opened
    light = background(tab), ink(tab)
    tab.prefer("dark")
    tab.until(f"getComputedStyle(document.body).backgroundColor !== '{light[0]}'")
    dark = background(tab), ink(tab)
    assert dark[1] != light[1]
    tab.run("document.querySelector('input[value=light]').click()")
    assert (background(tab), ink(tab)) == light
    tab.prefer("light")
    tab.run("document.querySelector('input[value=dark]').click()")
    assert (background(tab), ink(tab)) == dark
    tab.run("document.querySelector('input[value=system]').click()")
    assert (background(tab), ink(tab)) == light


INK = """(() => {
  const light = (rgb) => rgb.map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const parsed = (css) => css.match(/[0-9]+/g).slice(0, 3).map(Number);
  const map = document.querySelector('#confusion .chart');
  const image = map.querySelector('.heatmaplayer image');
  const frame = image.getBoundingClientRect();
  const picture = new Image();
  picture.src = image.getAttribute('href') || image.getAttribute('xlink:href');
  return picture.decode().then(() => {
    const canvas = document.createElement('canvas');
    [canvas.width, canvas.height] = [picture.width, picture.height];
    const pen = canvas.getContext('2d', { willReadFrequently: true });
    pen.drawImage(picture, 0, 0);
    return [...map.querySelectorAll('.textpoint text')].map((text) => {
      const place = text.getBoundingClientRect();
      const at = [(place.left + place.width / 2 - frame.left) / frame.width * picture.width,
        (place.top + place.height / 2 - frame.top) / frame.height * picture.height];
      const ground = light([...pen.getImageData(...at.map(Math.floor), 1, 1).data].slice(0, 3));
      const ink = light(parsed(text.style.fill));
      return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    });
  });
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_numbers_in_a_heat_map_are_readable_on_their_cells(opened: Tab, scheme: str) -> None:
    before = ink(opened)
    opened.prefer(scheme)
    if scheme == "dark":
        opened.until(f"document.querySelector('.chart .xtick text').style.fill !== '{before}'")
    opened.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))")
    found = opened.run(INK)
    opened.prefer("light")
    opened.until(f"document.querySelector('.chart .xtick text').style.fill === '{before}'")
    assert len(found) >= 3
    assert min(found) >= 4.5


def test_it_prints(opened: Tab) -> None:
    tab = opened
    assert tab.printed().startswith(b"%PDF")
    assert tab.run("document.documentElement.dataset.printing") is None
    assert tab.complaints() == []


def test_on_a_phone_nothing_is_wider_than_the_window(tab: Tab, pages: Path) -> None:
    tab.events.clear()
    tab.window(390, 844, phone=True)
    tab.open(pages / "many.html")
    check(tab)
    assert tab.run("document.documentElement.scrollWidth") <= 390
    assert tab.run("document.querySelector('nav details').open") is False
    tab.run("document.querySelector('.slider select').value = '1'")
    tab.run("document.querySelector('.slider select').dispatchEvent(new Event('input'))")
    assert tab.complaints() == []


def test_a_planted_script_would_not_run(tab: Tab, pages: Path, tmp_path: Path) -> None:
    """The policy holds even where escaping would fail."""
    text = (pages / "run.html").read_text(encoding="utf-8")
    planted = tmp_path / "planted.html"
    planted.write_text(
        text.replace('<main id="main">', '<main id="main"><script>window.got = 1</script>'),
        encoding="utf-8",
    )
    tab.open(planted)
    assert tab.run("window.got") is None
    tab.events.clear()
