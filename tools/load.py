# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Load on a real server, and what must hold under it.

Starts `vllm serve`, takes serial answers to a set of requests, then keeps many clients
busy: known requests whose answers must equal the serial ones, new pictures that no
cache has seen, bad requests that must be refused, and clients that leave in the middle
of an answer. Ends with a report, and with status 1 if a promise was broken:

- every good request is answered, and no request ends in a 5xx;
- every known request has its serial answer;
- memory grows by no more than the caches may take;
- no request goes on without its client;
- the server ends cleanly when told to.

With --distinct, instead: so many pictures, each sent once, to a server with a processor
cache and to one without; memory must stay within the cache's size.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from PIL import Image

from tools.demo import free_port, start_server

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / ".cache" / "load-server.log"

START_LIMIT_S = 600
STOP_LIMIT_S = 60
MAX_IMAGES = 4
KNOWN_REQUESTS = 40
CACHE_MIB = 128
KV_BLOCKS = 512
"""Few enough that all have been used, and so count as memory, before it is measured."""
WARM_UP_PICTURES = 500
"""After so many, --distinct has met all shapes and used all blocks."""
GROWTH_LIMIT_MIB = 2 * CACHE_MIB
"""The cache may still fill while it is measured, and clients leave and err meanwhile;
--distinct, which does neither, is held to the cache's size."""

SHARES = {"known": 0.5, "new": 0.4, "bad": 0.05, "leave": 0.05}
SIZES = ((448, 448), (640, 480), (300, 200), (90, 400), (31, 70), (900, 260))

Body = dict[str, Any]


def data_url(image: Image.Image) -> str:
    """A picture as the data URL of a PNG."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    content = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/png;base64,{content}"


def picture(rng: random.Random) -> Image.Image:
    """Coarse random colours at one of SIZES."""
    colours = Image.frombytes("RGB", (7, 5), rng.randbytes(105))
    return colours.resize(rng.choice(SIZES), Image.Resampling.BILINEAR)


def image_part(url: str) -> dict[str, Any]:
    """A picture as a part of a chat message."""
    return {"type": "image_url", "image_url": {"url": url}}


def good_body(rng: random.Random, pictures: int | None = None) -> Body:
    """A request with so many pictures, by default 0 to MAX_IMAGES."""
    if pictures is None:
        pictures = rng.randrange(MAX_IMAGES + 1)
    images = [picture(rng) for _ in range(pictures)]
    text = {"type": "text", "text": f"What do you see? {rng.randrange(10**6)}"}
    parts = [*(image_part(data_url(image)) for image in images), text]
    body = {
        "messages": [{"role": "user", "content": parts}],
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if images:
        body["mm_processor_kwargs"] = {"max_partition": rng.choice((1, 2, 4, 9))}
    return body


def bad_body(rng: random.Random) -> Body:
    """A request that a client got wrong."""
    body = good_body(rng)
    whole = data_url(picture(rng))
    thin = data_url(Image.new("RGB", (1000, 1)))
    urls = rng.choice(
        (
            ["data:image/png;base64,AAAA"],
            [whole[: len(whole) // 2]],
            [thin],
            [whole] * (MAX_IMAGES + 1),
        )
    )
    if rng.random() < 0.5:
        urls = [whole]
        body["mm_processor_kwargs"] = rng.choice(
            ({"max_partition": 0}, {"max_partition": 10**4}, {"max_partitions": 4})
        )
    body["messages"][0]["content"] = [image_part(url) for url in urls]
    return body


@contextlib.contextmanager
def server(model: str, port: int, cache_mib: int) -> Iterator[subprocess.Popen]:
    """A server with small caches, so that a leak cannot hide behind them."""
    options = ["--max-model-len", "8192"]
    options += ["--dtype", "float32", "--generation-config", "vllm"]
    options += ["--limit-mm-per-prompt", json.dumps({"image": MAX_IMAGES})]
    options += ["--mm-processor-cache-gb", str(cache_mib / 1024)]
    options += ["--num-gpu-blocks-override", str(KV_BLOCKS)]
    process = start_server(model, port, options, LOG)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def wait_until_healthy(process: subprocess.Popen, client: Any) -> None:
    """Wait for the health page.

    Raises:
        RuntimeError: If the server ends or takes too long.

    """
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if (await client.get("/health")).status_code == 200:
                return
        await asyncio.sleep(0.5)
    raise RuntimeError(f"the server did not become healthy; its log: {LOG}")


def resident_mib(process: subprocess.Popen) -> dict[str, float]:
    """Memory of the server's processes that is their own, by process."""
    root = psutil.Process(process.pid)
    sizes = {}
    for member in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = member.memory_info()
            sizes[f"{member.name()} {member.pid}"] = (
                memory.rss - memory.shared
            ) / 2**20
    return sizes


class Load:
    """Clients of one server, and what they saw."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self.client = client
        self.rng = random.Random(seed)
        self.known: list[tuple[Body, list[int]]] = []
        self.done: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.new_images = 0
        self.faults: list[str] = []

    async def post(self, body: Body) -> httpx.Response:
        response = await self.client.post("/v1/chat/completions", json=body)
        self.statuses[response.status_code] += 1
        if response.status_code >= 500:
            self.faults.append(f"{response.status_code}: {response.text[:300]}")
        return response

    async def learn(self) -> None:
        """Take the serial answers."""
        for _ in range(KNOWN_REQUESTS):
            body = good_body(self.rng)
            response = await self.post(body)
            response.raise_for_status()
            self.known.append((body, response.json()["choices"][0]["token_ids"]))

    async def run(self, until: float) -> None:
        """One client, busy until a time of the monotonic clock."""
        kinds, weights = list(SHARES), list(SHARES.values())
        while time.monotonic() < until:
            (kind,) = self.rng.choices(kinds, weights)
            try:
                await getattr(self, f"_{kind}")()
            except httpx.TransportError as error:
                self.faults.append(f"{kind}: {error!r}")
            self.done[kind] += 1

    async def _known(self) -> None:
        body, answer = self.rng.choice(self.known)
        response = await self.post(body)
        if response.status_code != 200:
            self.faults.append(f"a known request got {response.status_code}")
        elif response.json()["choices"][0]["token_ids"] != answer:
            self.faults.append("a known request got another answer")

    async def _new(self) -> None:
        body = good_body(self.rng)
        response = await self.post(body)
        if response.status_code == 200:
            self.new_images += len(body["messages"][0]["content"]) - 1
        else:
            self.faults.append(f"a new request got {response.status_code}")

    async def _bad(self) -> None:
        response = await self.post(bad_body(self.rng))
        if not 400 <= response.status_code < 500:
            self.faults.append(f"a bad request got {response.status_code}")

    async def _leave(self) -> None:
        body = good_body(self.rng) | {"max_tokens": 4000, "stream": True}
        async with self.client.stream(
            "POST", "/v1/chat/completions", json=body
        ) as response:
            async for _ in response.aiter_lines():
                break

    async def show(self, pictures: int) -> None:
        """One client that sends pictures, each new and in a request of its own."""
        for _ in range(pictures):
            response = await self.post(good_body(self.rng, pictures=1))
            if response.status_code == 200:
                self.new_images += 1
            else:
                self.faults.append(f"a new request got {response.status_code}")

    async def unfinished(self) -> float:
        """Requests in the server once it had time to drop those without a client."""
        deadline = time.monotonic() + STOP_LIMIT_S
        while True:
            left = 0.0
            for line in (await self.client.get("/metrics")).text.splitlines():
                if line.startswith(
                    ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
                ):
                    left += float(line.rsplit(" ", 1)[1])
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def clients(
    process: subprocess.Popen, url: str, seed: int
) -> AsyncIterator[Load]:
    """Clients of a server that is healthy."""
    # No kept connections: the server closes idle ones while a client takes them up.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        await wait_until_healthy(process, client)
        yield Load(client, seed)


async def put_under_load(
    process: subprocess.Popen, url: str, minutes: float, concurrency: int, seed: int
) -> dict[str, Any]:
    """Run the clients; returns the report, with the broken promises in `faults`."""
    async with clients(process, url, seed) as load:
        await load.learn()
        # A first part fills buffers that a server keeps; memory is flat after it.
        start = time.monotonic()
        seconds = 60 * minutes
        for share in (0.25, 1.0):
            until = start + share * seconds
            await asyncio.gather(*(load.run(until) for _ in range(concurrency)))
            if share < 1:
                before, images_before = resident_mib(process), load.new_images
                print(f"after {share:.0%}: {dict(load.done)}", flush=True)
        unfinished = await load.unfinished()
    after = resident_mib(process)
    growth = sum(after.values()) - sum(before.values())
    faults = Counter(load.faults)
    if growth > GROWTH_LIMIT_MIB:
        faults[f"memory grew by {growth:.0f} MiB"] += 1
    if unfinished:
        faults[f"{unfinished:.0f} requests go on without a client"] += 1
    return {
        "minutes": minutes,
        "concurrency": concurrency,
        "requests": dict(load.done),
        "statuses": dict(sorted(load.statuses.items())),
        "new_images": load.new_images,
        "new_images_while_measured": load.new_images - images_before,
        "memory_mib_before": {name: round(size) for name, size in before.items()},
        "memory_mib_after": {name: round(size) for name, size in after.items()},
        "memory_growth_mib": round(growth, 1),
        "memory_growth_limit_mib": GROWTH_LIMIT_MIB,
        "faults": dict(faults),
    }


async def show_distinct(
    process: subprocess.Popen, url: str, pictures: int, concurrency: int, seed: int
) -> dict[str, Any]:
    """Send pictures once each; returns how memory grew, with `faults`."""
    async with clients(process, url, seed) as load:
        sizes = []
        for count in (WARM_UP_PICTURES, pictures // 2, pictures - pictures // 2):
            shares = [count // concurrency] * concurrency
            shares[0] += count % concurrency
            await asyncio.gather(*map(load.show, shares))
            sizes.append(resident_mib(process))
            print(f"after {load.new_images} pictures: {sizes[-1]}", flush=True)
    before, halfway, after = (sum(size.values()) for size in sizes)
    faults = Counter(load.faults)
    if after - before > CACHE_MIB:
        faults[f"memory grew by {after - before:.0f} MiB"] += 1
    return {
        "warm_up_pictures": WARM_UP_PICTURES,
        "pictures": load.new_images - WARM_UP_PICTURES,
        "memory_mib_before": {name: round(size) for name, size in sizes[0].items()},
        "memory_mib_after": {name: round(size) for name, size in sizes[-1].items()},
        "memory_growth_mib": round(after - before, 1),
        "memory_growth_in_second_half_mib": round(after - halfway, 1),
        "memory_growth_limit_mib": CACHE_MIB,
        "faults": dict(faults),
    }


def stop(process: subprocess.Popen) -> list[str]:
    """Tell the server to end; returns what was not clean."""
    members = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        status = process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        return [f"the server did not end within {STOP_LIMIT_S} s"]
    _, alive = psutil.wait_procs(members, timeout=10)
    faults = [f"process {member.pid} outlived the server" for member in alive]
    if status not in (0, -signal.SIGTERM):
        faults.append(f"the server ended with status {status}")
    return faults


def main() -> int:
    """Run the load; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "demo" / "tiny-ovis2"))
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument(
        "--distinct", type=int, metavar="PICTURES", help="new pictures only, once each"
    )
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the report here, too")
    args = parser.parse_args()
    # As on Ctrl-C, the server ends with this command.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def measured(cache_mib: int, run: Any, amount: float) -> dict[str, Any]:
        port = free_port()
        with server(args.model, port, cache_mib) as process:
            url = f"http://127.0.0.1:{port}"
            report = asyncio.run(run(process, url, amount, args.concurrency, args.seed))
            for fault in stop(process):
                report["faults"][fault] = 1
        return report

    if args.distinct is None:
        report = measured(CACHE_MIB, put_under_load, args.minutes)
        broken = bool(report["faults"])
    else:
        report = {
            f"cache of {cache_mib} MiB": measured(
                cache_mib, show_distinct, args.distinct
            )
            for cache_mib in (CACHE_MIB, 0)
        }
        broken = any(part["faults"] for part in report.values())
    text = json.dumps(report, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
