"""Takes the live page's pictures in docs/images/, of a real cluster under load: `make page-images`."""

import argparse
import random
import signal
import threading
import time
from pathlib import Path

from PIL import Image

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.browser import Browser
from tests.cluster.conftest import ServedCluster

DIRECTORY = Path(__file__).parents[2] / "docs/images"
MAX_BYTES = 200_000
QUESTION = "Name three things that a good map of a city shows."
TOPICS = ("rivers", "bridges", "old clocks", "bread", "lighthouses", "the moon", "trains", "libraries")
SYSTEM = "You are a patient teacher who answers in plain words and short sentences. " * 6
ANSWERED = "document.getElementById('chat-status').innerText"


def chat_until(served: ServedCluster, stopping: threading.Event, seed: int) -> None:
    """Run a client whose questions share a long prefix."""
    rng = random.Random(seed)
    while not stopping.wait(rng.random() * 4):
        question = " ".join(f"Tell me about {rng.choice(TOPICS)}." for _ in range(rng.choice((1, 2, 12))))
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        for _ in served.client.chat(messages, max_tokens=rng.choice((8, 24, 60)), ignore_eos=True):
            pass


def take(browser: Browser) -> None:
    browser.evaluate(f"document.getElementById('chat-input').value = {QUESTION!r}")
    browser.evaluate("document.getElementById('chat-max').value = 70")
    browser.evaluate("document.getElementById('chat-temperature').value = 0")
    browser.evaluate("document.getElementById('chat-send').click()")
    browser.until(ANSWERED, 120.0, lambda text: "TTFT" in text)
    browser.evaluate("document.activeElement.blur()")
    browser.until("document.querySelectorAll('#topology .busy').length", 60.0)
    save(browser, "live-page-light.png")
    browser.prefer("dark")
    save(browser, "live-page-dark.png")
    browser.prefer("light")
    browser.resize(360, 780, scale=1.5, is_phone=True)
    browser.evaluate("window.scrollTo(0, 0)")
    save(browser, "live-page-phone.png")


def save(browser: Browser, name: str) -> None:
    # Lets the page draw its next frame.
    time.sleep(1.5)
    path = DIRECTORY / name
    browser.screenshot(path)
    # The page has few colors: a palette halves the size.
    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    assert size < MAX_BYTES, f"{path} has {size} bytes"
    print(f"{path}: {size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--seconds", type=float, default=240.0, help="of load before the pictures are taken")
    parser.add_argument("--clients", type=int, default=5)
    arguments = parser.parse_args()
    config = ClusterConfig(
        model=arguments.model, num_prefill=2, num_decode=2, num_pages=600, num_threads=1, grpc_port=0, http_port=0
    )
    stopping = threading.Event()
    served = ServedCluster(config)
    threads = [threading.Thread(target=chat_until, args=(served, stopping, seed)) for seed in range(arguments.clients)]
    try:
        served.wait_ready()
        for thread in threads:
            thread.start()
        with Browser() as browser:
            browser.resize(1440, 1000)
            browser.prefer("light")
            origin = f"http://{served.cluster.addresses.http}"
            browser.open(f"{origin}/")
            time.sleep(arguments.seconds / 2)
            served.kill("decode-1", signal.SIGKILL)
            time.sleep(arguments.seconds / 2)
            take(browser)
    finally:
        stopping.set()
        for thread in threads:
            if thread.is_alive():
                thread.join()
        served.close()


if __name__ == "__main__":
    main()
