"""What people see, in a real browser: the runs, the note, the curves, the figures.

With SCREENSHOTS=FOLDER set, what was seen is kept there as pictures, light and dark.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


PATIENCE_SECONDS = 120


class Site(NamedTuple):
    """Where the comparison is to be seen."""

    url: str
    experiment: str
    parent: str
    children: tuple[str, ...]
    files: Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str, seconds: float = 90) -> None:
    """Wait until a server answers."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)
        else:
            return


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[Site]:
    """Compare two presets, then serve what came of it as `make ui` does."""
    from mlflow.tracking import MlflowClient

    folder = tmp_path_factory.mktemp("ui")
    uri = f"sqlite:///{folder}/mlflow.db"
    settings = {
        "presets": "adamw,gradient_checkpointing", "repeats": 1, "workload": "laptop",
        "model": tiny_model, "seq_len": 16, "samples": 64, "epochs": 100,
        "max_steps": 300, "device": "cpu",
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    environment = {"MLFLOW_TRACKING_URI": uri, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "pipeline", "compare", *words]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=250)
    client = MlflowClient(uri)
    runs = client.search_runs(["0"])
    [parent] = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = tuple(run.info.run_id for run in runs if run is not parent)
    files = Path(client.download_artifacts(parent.info.run_id, "", str(folder)))
    port = free_port()
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(port)),
            *("--backend-store-uri", uri, "--no-serve-artifacts", "--workers", "1"),
        ],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        answers(f"http://127.0.0.1:{port}/health")
        yield Site(f"http://127.0.0.1:{port}", "0", parent.info.run_id, children, files)
    finally:
        server.terminate()
        server.wait(timeout=30)


@pytest.fixture(params=["light", "dark"], scope="module")
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a headless browser in each theme, with its log and its requests recorded."""
    if not (CHROMIUM and DRIVER):
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1400,1000"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(90)
    theme = [{"name": "prefers-color-scheme", "value": request.param}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": theme})
    driver.theme = request.param  # type: ignore[attr-defined]
    yield driver
    driver.quit()


def wait_for(found: Callable[[], Any], what: str) -> Any:
    """Return the first result that is true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (result := found()):
        assert time.monotonic() < deadline, f"never seen: {what}"
        time.sleep(0.3)
    return result


def says(browser: Any, *words: str) -> bool:
    script = "return document.body ? document.body.innerText : ''"
    shown = str(browser.execute_script(script))
    return all(word in shown for word in words)


def show(browser: Any, url: str, *words: str) -> None:
    """Open a page and wait until it says these words."""
    browser.get(url)
    wait_for(lambda: says(browser, *words), f"{words} on {url}")


def keep(browser: Any, name: str) -> None:
    """Take a screenshot, where somebody wants to look at it."""
    folder = os.environ.get("SCREENSHOTS")
    if folder:
        time.sleep(2)
        browser.save_screenshot(str(Path(folder) / f"{name}-{browser.theme}.png"))


def requests(browser: Any) -> list[str]:
    """Return the addresses that the browser asked for since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
    return [str(event["params"]["request"]["url"]) for event in sent]


def page(site: Site, rest: str) -> str:
    return f"{site.url}/#/experiments/{site.experiment}/runs{rest}"


def test_run_list_shows_the_comparison_and_its_children(browser: Any, site: Site) -> None:
    url = page(site, "?workflowType=machine_learning")
    show(browser, url, "compare adamw,gradient_checkpointing on laptop")
    expander = "button[data-component-id*='runnamecellrenderer']"
    wait_for(lambda: browser.find_elements("css selector", expander), "the parent's [+]")
    browser.find_elements("css selector", expander)[0].click()
    wait_for(
        lambda: says(browser, "\ngradient_checkpointing\n", "\nadamw\n"), "the children's names"
    )
    keep(browser, "runs")


def test_run_page_shows_the_note_with_its_table(browser: Any, site: Site) -> None:
    url = page(site, f"/{site.parent}?workflowType=machine_learning")
    show(browser, url, "than adamw.", "peak MiB")
    assert browser.find_elements("css selector", "table td")
    keep(browser, "comparison")


def test_run_page_of_a_training_says_peak_and_rate_at_once(browser: Any, site: Site) -> None:
    url = page(site, f"/{site.children[0]}?workflowType=machine_learning")
    show(browser, url, "Peak memory", "on laptop completed")
    keep(browser, "training")


def test_memory_curve_has_a_chart(browser: Any, site: Site) -> None:
    url = page(site, f"/{site.children[0]}/model-metrics?workflowType=machine_learning")
    show(browser, url, "memory", "step")
    wait_for(lambda: browser.find_elements("css selector", ".js-plotly-plot"), "a chart")
    keep(browser, "curves")


def test_system_metrics_are_there_for_a_short_run(browser: Any, site: Site) -> None:
    url = page(site, f"/{site.children[0]}/system-metrics?workflowType=machine_learning")
    show(browser, url, "cpu_utilization_percentage")


def test_figure_opens_in_the_artifact_viewer(browser: Any, site: Site) -> None:
    show(browser, page(site, f"/{site.parent}/artifacts/comparison.png"), "comparison.png")
    script = (
        "return [...document.images].some(i => i.naturalWidth > 1000)"
        " || [...document.querySelectorAll('*')].some("
        "e => getComputedStyle(e).backgroundImage.includes('blob:'))"
    )
    wait_for(lambda: browser.execute_script(script), "the picture")
    keep(browser, "figure")


def test_page_from_disk_renders_without_errors_and_without_a_network(
    browser: Any, site: Site
) -> None:
    requests(browser)
    browser.get_log("browser")  # both are of the pages before
    show(browser, (site.files / "comparison.html").as_uri(), "peak MiB", "final loss")
    charts = wait_for(
        lambda: browser.find_elements("css selector", ".js-plotly-plot .main-svg"), "its charts"
    )
    assert len(charts) >= 3
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    asked = [url for url in requests(browser) if not url.startswith(("file:", "data:", "blob:"))]
    assert asked == []
    keep(browser, "page")
