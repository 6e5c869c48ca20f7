"""How long does the page's server take to answer, for one request after another and for many at once?

    python translate.py --serve --port 8000                   # in another terminal
    python -m benchmarks.serving --port 8000 --requests 200

Each request is a sentence of the sample's test split. Prints the median and the 95th percentile in milliseconds, and how many
requests were answered in a second.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException

import numpy as np

from benchmarks.measuring import ROOT
from engine.config import flag, parse_flags
from engine.errors import UserError, run_script
from text.cleaning import held_out_rows
from text.rows import find_text


@dataclass
class Config:
    port: int = flag(8000, "of the server", "Options", least=1, most=65535)
    requests: int = flag(200, "requests, first one after another, then all at once", "Options", least=1, most=1000)


def answer(port: int, text: str) -> float:
    """Ask for one translation; → seconds. Raises `UserError` for any answer but a translation."""
    begun = time.perf_counter()
    try:
        connection = HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request("POST", "/translate", json.dumps({"text": text}), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answered = json.loads(response.read())
    except (OSError, HTTPException, ValueError) as error:  # nobody, or another program
        raise UserError(f"no answer on port {port} ({error}); start python translate.py --serve first") from None
    if response.status != 200 or not answered["translation"]:
        raise UserError(f"the server answered {response.status}: {answered.get('detail')}")
    return time.perf_counter() - begun


def main(config: Config) -> None:
    """Both ways, in turn."""
    rows = held_out_rows(find_text(str(ROOT / "sample"), "zh", "en"))["test"]
    texts = [rows[number % len(rows)][0] for number in range(config.requests)]
    answer(config.port, texts[0])  # the first one is slow
    for name, workers in (("one at a time", 1), ("all at once", config.requests)):
        with ThreadPoolExecutor(workers) as pool:
            begun = time.perf_counter()
            seconds = list(pool.map(partial(answer, config.port), texts))
            rate = len(texts) / (time.perf_counter() - begun)
        median, late = np.percentile(seconds, [50, 95]) * 1000
        times = f"median {median:,.0f} ms, p95 {late:,.0f} ms, {rate:,.0f} a second"
        print(f"{name:<14} {len(seconds)} answered, none lost; {times}")


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "latency of translate.py --serve")))
