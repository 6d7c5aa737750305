"""Pictures of the page for docs/page: a wide and a narrow window, in light and in dark colours.

    python -m tests.screenshots

Serves the demo model as a store, with room for a third of its experts, and asks it to go on with a
piece of code. Needs chromium, chromedriver and selenium.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from experts.manifest import read_manifest
from moe import MoE
from moe.commands.convert.convert import convert
from moe.loading.memory_plan import GIB
from moe.settings import ModelSettings
from offload.capacity import slot_bytes
from tests.browser import Browser, open_browser, why_no_browser

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "page"
SLOTS = 70
SETTINGS: dict[str, Any] = {
    "memory.kv_tokens": 8192,
    "memory.reserve_gib": 0,
    "memory.prefix_tokens": 2048,
    "prefill.wave_tokens": 512,
    "engine.max_batch_size": 8,
    "speculation.mode": "auto",
}
# The demo model continues code, better so than in the form of its chats.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPT = "def parse_arguments(argv):\n    parser = argparse.ArgumentParser()\n"
TOKENS = (60, 100, 1500)
"""Of each answer; the last one is under way in the picture."""
SEND = (
    "document.querySelector('#max-tokens').value = arguments[1];"
    "document.querySelector('#temperature').value = 0.6;"
    "document.querySelector('#input').value = arguments[0];"
    "document.querySelector('#form').requestSubmit()"
)
CHOOSE = (  # an expert of layer 1, by keys, as the map may be out of sight
    "for (const key of ['ArrowDown', ...Array(20).fill('ArrowRight')])"
    "document.querySelector('#map').dispatchEvent(new KeyboardEvent('keydown', { key }))"
)
VIEW = "document.querySelector(`.views [data-view=${arguments[0]}]`).click()"


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of the demo model, served from disk."""
    store = convert(ROOT / "examples" / "demo-model", folder / "demo-model", ModelSettings())
    (store / "chat_template.jinja").write_text(TEMPLATE)
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    plan = MoE.from_pretrained(store, nested()).memory_plan
    rest = sum(line.bytes for line in plan.lines if line.name != "experts")
    room = (rest + SLOTS * slot_bytes(read_manifest(store), 8) + 16) / GIB
    command = [sys.executable, "-m", "moe", "serve", str(store), "--port", "0"]
    for setting in (*settings, f"memory.device_gib={room}"):
        command += ["--set", setting]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"at (http://\S+)", process.stdout.readline())
            assert found, "the server did not start"
            yield found[1]
        finally:
            process.terminate()


def nested() -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in SETTINGS.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return sections


def shoot(browser: Browser, url: str, name: str, width: int, height: int, *, dark: bool) -> None:
    """One picture for a wide window; one of each view for a narrow one."""
    browser.show(url, width, height, dark=dark)
    browser.wait(lambda: browser.text("#state") == "Live")
    time.sleep(2)
    for tokens in TOKENS[:-1]:
        browser.run(SEND, PROMPT, tokens)
        browser.wait(lambda: browser.text(".message:last-child footer"))
    browser.run(SEND, PROMPT, TOKENS[-1])
    browser.run(CHOOSE)
    browser.run("document.activeElement.blur(); document.querySelector('#live').scrollTop = 0")
    time.sleep(2.5)
    for view in ("chat", "live") if width < 860 else ("",):
        if view:
            browser.run(VIEW, view)
            time.sleep(1)
        file = OUT / f"{'-'.join(filter(None, (name, view)))}.png"
        browser.driver.save_screenshot(str(file))
        picture = Image.open(file).convert("RGB")
        picture.quantize(256, kmeans=2, dither=Image.Dither.NONE).save(file, optimize=True)
        print(file.relative_to(ROOT), file.stat().st_size, flush=True)
    browser.wait(lambda: browser.text(".message:last-child footer"))
    complaints = browser.complaints()
    assert complaints == [], complaints


def main() -> int:
    if why := why_no_browser():
        print(why, file=sys.stderr)
        return 1
    OUT.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder)) as url,
        open_browser() as browser,
    ):
        for dark in (False, True):
            colours = "dark" if dark else "light"
            shoot(browser, url, f"wide-{colours}", 1600, 1000, dark=dark)
            shoot(browser, url, f"narrow-{colours}", 320, 640, dark=dark)
    return 0


if __name__ == "__main__":
    sys.exit(main())
