# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A real `vllm serve` process for tests, and what its clients need."""

import io
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pybase64
from PIL import Image

START_SECONDS = 300
"""Generous: importing the engine alone takes about half a minute on two cores."""


class Server(NamedTuple):
    """A healthy server.

    Attributes:
        url: Its base URL, without a trailing slash.
        process: The process of the command.
        log: File that has its output.

    """

    url: str
    process: subprocess.Popen
    log: Path


@contextmanager
def serve(model: str, *arguments: str, **environment: str) -> Iterator[str]:
    """Run `vllm serve MODEL` on a free loopback port until the block ends.

    Args:
        model: Name or folder.
        *arguments: Further arguments of the command.
        **environment: Further environment variables.

    Yields:
        The server's base URL, without a trailing slash.

    Raises:
        RuntimeError: If the server ends or is not healthy in time; the message has
            the end of its log.

    """
    with running(model, *arguments, **environment) as server:
        yield server.url


@contextmanager
def running(model: str, *arguments: str, **environment: str) -> Iterator[Server]:
    """Run a server as `serve` does, for tests of its process.

    Args:
        model: Name or folder.
        *arguments: Further arguments of the command.
        **environment: Further environment variables.

    Raises:
        RuntimeError: As `serve`.

    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(sys.executable).parent / "vllm"),
        "serve",
        model,
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--max-model-len", "8192", "--max-num-seqs", "16"),
        *("--trust-request-mm-kwargs", "--generation-config", "vllm"),
        *arguments,
    ]
    environment = {
        **os.environ,
        **environment,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # The test process may keep its own engine in process; a server does not.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    url = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            _wait_until_healthy(process, url, log)
            yield Server(url, process, Path(log.name))
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_healthy(process: subprocess.Popen, url: str, log: Any) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    log.seek(0)
    raise RuntimeError(
        f"vllm serve did not become healthy (exit status {process.poll()}):\n"
        + log.read()[-4000:]
    )


def data_url(image: Image.Image) -> str:
    """A picture as the data URL of a PNG."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + pybase64.b64encode(buffer.getvalue()).decode()


def image_part(image: Image.Image) -> dict[str, Any]:
    """A picture as a part of an OpenAI chat message."""
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


def text_part(text: str) -> dict[str, Any]:
    """A text as a part of an OpenAI chat message."""
    return {"type": "text", "text": text}


def user_message(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation of one user message."""
    return [{"role": "user", "content": list(parts)}]


def chat(
    url: str, messages: Sequence[dict[str, Any]], timeout: float = 120, **options: Any
) -> httpx.Response:
    """Send a greedy chat request; `options` go into the body."""
    body = {
        "messages": messages,
        "temperature": 0,
        "max_tokens": 24,
        "return_token_ids": True,
        **options,
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=timeout)
