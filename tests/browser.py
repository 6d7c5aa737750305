"""Headless Chromium for tests of the page, driven by Selenium, where both are installed."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def why_no_browser() -> str:
    """Why tests that need a browser cannot run here; empty if they can."""
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        return "no chromium and chromedriver (Debian: apt-get install chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    return ""


class Browser:
    """One page in a browser.

    Attributes:
        driver: Selenium's.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def show(self, url: str, width: int = 1280, height: int = 800, *, dark: bool = False) -> None:
        """Open a page in a window of this size, with the reader's choice of colours.

        The driver can return before a page that it shows again is loaded: this waits until it is.
        """
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [colours]})
        self.run("window.isOld = true")
        self.driver.get(url)
        self.wait(lambda: self.run("return !window.isOld && document.readyState === 'complete'"))

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns in the page."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """What an element says; empty if it is not there."""
        found = self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        return str(found)

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def type(self, selector: str, text: str) -> None:
        self.driver.find_element("css selector", selector).send_keys(text)

    def wait(self, condition: Callable[[], Any], seconds: float = 60) -> Any:
        """What a condition gives once it is true."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, seconds, 0.1).until(lambda _: condition())

    def complaints(self) -> list[str]:
        """Warnings and errors in the console since the last call: of scripts, the policy, loads."""
        log = self.driver.get_log("browser")
        return [entry["message"] for entry in log if entry["level"] in ("WARNING", "SEVERE")]

    def origins(self) -> set[str]:
        """Origins that the browser has sent requests to for the page since the last call."""
        found = set()
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = urlsplit(message["params"]["request"]["url"])
                # Chromium asks itself for its own pages: chrome:, chrome-untrusted:.
                if url.scheme.partition("-")[0] not in ("data", "blob", "chrome"):
                    found.add(f"{url.scheme}://{url.netloc}")
        return found


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser with an empty profile of its own."""
    from selenium import webdriver

    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = webdriver.ChromeService(str(shutil.which("chromedriver")))
        driver = webdriver.Chrome(options, service)
        try:
            yield Browser(driver)
        finally:
            driver.quit()
