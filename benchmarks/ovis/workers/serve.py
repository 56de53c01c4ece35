# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Start and throughput of `vllm serve`, asked by vLLM's own `vllm bench serve`.

    python -m benchmarks.ovis.workers.serve OUTPUT SETTINGS

Every request has one JPEG as a data URL, and no two are the same picture.
"""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ovis.pictures import make_pictures, to_data_url
from benchmarks.ovis.records import Measurement
from benchmarks.ovis.workers import run_worker
from tools.demo import free_port

START_SECONDS = 900
WARM_UP_REQUESTS = 4

PARTS_OF_START = {
    "model loading": r"Model loading took .* and ([\d.]+) seconds",
    "multi-modal warm-up": r"Multi-modal warmup completed in ([\d.]+)s",
    "profile, cache and warm-up of the engine": r"init engine .* took ([\d.]+) s",
}
"""What the server's log says of its start, in seconds."""


@dataclass(frozen=True)
class Settings:
    """What is served and asked.

    Attributes:
        checkpoint: Folder of the model; weights are random.
        size: Width and height of every picture.
        requests: Number of requests by concurrency.
        output_tokens: Length of every answer.
        arguments: Further arguments of `vllm serve`.

    """

    checkpoint: str
    size: tuple[int, int]
    requests: dict[int, int]
    output_tokens: int
    arguments: Sequence[str] = field(default_factory=list)

    def dump(self) -> str:
        """As the argument of the worker."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> "Settings":
        """From the argument of the worker."""
        values = json.loads(text)
        values["requests"] = {int(key): n for key, n in values["requests"].items()}
        return Settings(**values)


@contextlib.contextmanager
def server(settings: Settings, log: Path) -> Iterator[tuple[str, float]]:
    """A healthy server.

    Yields:
        Its address, and the seconds until it was healthy.

    Raises:
        RuntimeError: It ended or took too long.

    """
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"),
        *(settings.checkpoint, "--host", "127.0.0.1", "--port", str(port)),
        *("--load-format", "dummy", "--max-model-len", "8192"),
        *("--served-model-name", "model", *settings.arguments),
    ]
    url = f"http://127.0.0.1:{port}"
    start = time.perf_counter()
    # A server of its own: with engines in the worker's process nothing is in parallel.
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment
        )
    try:
        while not is_healthy(url):
            if process.poll() is not None:
                raise RuntimeError("the server ended:\n" + log.read_text()[-3000:])
            if time.perf_counter() - start > START_SECONDS:
                raise RuntimeError(f"not healthy after {START_SECONDS} s")
            time.sleep(0.1)
        yield url, time.perf_counter() - start
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_healthy(url: str) -> bool:
    """Whether a server answers at this address."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def parts_of_start(log: str) -> list[Measurement]:
    """What a server's log says of its start."""
    return [
        Measurement(f"server start: {name}", "s", [float(found[-1])])
        for name, pattern in PARTS_OF_START.items()
        if (found := re.findall(pattern, log))
    ]


def write_requests(path: Path, urls: Sequence[str]) -> None:
    """Write requests, one a line, in the form of the client's custom_image data."""
    with path.open("w") as file:
        for index, url in enumerate(urls):
            line = {"prompt": f"What is this? {index}", "image_files": [url]}
            file.write(json.dumps(line) + "\n")


def ask(url: str, settings: Settings, data: Path, concurrency: int, n: int) -> Any:
    """Run the client once; returns its result."""
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    arguments = [
        *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--base-url", url, "--model", "model"),
        *("--tokenizer", settings.checkpoint),
        *("--dataset-name", "custom_image", "--dataset-path", str(data)),
        *("--custom-output-len", str(settings.output_tokens), "--ignore-eos"),
        *("--num-prompts", str(n), "--max-concurrency", str(concurrency)),
        *("--temperature", "0", "--save-detailed", "--disable-tqdm"),
        *("--disable-shuffle", "--no-oversample", "--ready-check-timeout-sec", "0"),
    ]
    result = asyncio.run(main_async(parser.parse_args(arguments)))
    if result["completed"] != n:
        errors = [error for error in result["errors"] if error]
        raise RuntimeError(
            f"{result['completed']} of {n} requests were answered: {errors[:1]}"
        )
    return result


def measure(text: str) -> list[Measurement]:
    """Start the server, then ask it at every concurrency in turn."""
    settings = Settings.load(text)
    needed = WARM_UP_REQUESTS + sum(settings.requests.values())
    urls = [to_data_url(picture) for picture in make_pictures(*settings.size, needed)]
    size = "x".join(map(str, settings.size))
    rows: list[Measurement] = []
    with tempfile.TemporaryDirectory() as folder:
        data, log = Path(folder) / "requests.jsonl", Path(folder) / "server.log"
        with server(settings, log) as (url, ready):
            rows.append(Measurement("server start: ready", "s", [ready]))
            rows += parts_of_start(log.read_text(errors="replace"))
            write_requests(data, [urls.pop() for _ in range(WARM_UP_REQUESTS)])
            ask(url, settings, data, 2, WARM_UP_REQUESTS)
            for concurrency, n in settings.requests.items():
                write_requests(data, [urls.pop() for _ in range(n)])
                result = ask(url, settings, data, concurrency, n)
                where = f"{size} JPEG, concurrency {concurrency}"
                rows += [
                    Measurement(
                        f"server throughput: {where}",
                        "requests/s",
                        [result["request_throughput"]],
                    ),
                    Measurement(
                        f"server time to first token: {where}",
                        "ms",
                        [seconds * 1e3 for seconds in result["ttfts"]],
                    ),
                ]
    return rows


if __name__ == "__main__":
    run_worker(measure)
