# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The demo: a server on the demo checkpoint answers questions about pictures.

Starts `vllm serve` on a free loopback port, waits until it is healthy, asks what
demo/samples.json asks through the OpenAI client, prints the answers and stops the
server. Exits with 0 only if every answer is the expected one.
"""

import base64
import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "demo" / "tiny-ovis2"
SAMPLES = ROOT / "demo" / "samples.json"
LOG = ROOT / ".cache" / "demo-server.log"
START_LIMIT_S = 300


class DemoError(RuntimeError):
    """A step that failed: which one, and how to repair it."""


def main() -> int:
    """Runs the demo; returns the exit status."""
    try:
        samples = load_samples()
        with server() as url:
            wrong = ask_all(url, samples)
    except DemoError as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    if wrong:
        print(f"\n{wrong} of {len(samples)} answers are wrong", file=sys.stderr)
        return 1
    print("\nThe demo is complete; the server has been stopped.")
    return 0


def load_samples() -> list[dict[str, Any]]:
    """Samples of demo/samples.json: images, question, answer, maybe max_partition.

    Raises:
        DemoError: If the checkpoint, the samples or a picture is missing.

    """
    for path in (CHECKPOINT / "config.json", SAMPLES):
        if not path.exists():
            raise DemoError(
                f"{path.relative_to(ROOT)} is missing. Restore it with 'git checkout "
                "demo', or train the checkpoint anew with tools/train_demo.py."
            )
    samples = json.loads(SAMPLES.read_text(encoding="utf-8"))
    for sample in samples:
        for name in sample["images"]:
            if not (SAMPLES.parent / name).exists():
                raise DemoError(f"demo/{name} is missing. Try 'git checkout demo'.")
    return samples


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A healthy server on the demo checkpoint; yields its address.

    Raises:
        DemoError: If the server does not become healthy.

    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = ["--served-model-name", "tiny-ovis2"]
    if runs_on_cpu():
        options += ["--dtype", "float32"]
    process = start_server(str(CHECKPOINT), port, options, LOG)
    try:
        wait_until_healthy(process, url)
        yield url
    finally:
        stop(process)


def runs_on_cpu() -> bool:
    """Whether the fork was built for the CPU."""
    return "cpu" in importlib.metadata.version("vllm")


def start_server(
    model: str, port: int, options: list[str], log: Path
) -> subprocess.Popen:
    """Start `vllm serve` on the loopback address, in a process group of its own.

    Args:
        model: Name or folder.
        port: Port to listen on.
        options: Further arguments of the command.
        log: File that takes the server's output.

    """
    command = [str(Path(sys.executable).with_name("vllm")), "serve", model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--trust-request-mm-kwargs", *options]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    if runs_on_cpu():
        # Memory grows with every new shape without them: docs/reliability.md.
        env |= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
        env |= {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    log.parent.mkdir(exist_ok=True)
    print("Starting", " ".join(["vllm", *command[1:]]), flush=True)
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**env, **os.environ},
            start_new_session=True,
        )


def free_port() -> int:
    """A loopback port that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(process: subprocess.Popen, url: str) -> None:
    """Waits for the server's health page, showing how long it takes.

    Raises:
        DemoError: If the server ends or takes longer than START_LIMIT_S seconds.

    """
    start = time.monotonic()
    said = 0.0
    while (waited := time.monotonic() - start) < START_LIMIT_S:
        if process.poll() is not None:
            raise DemoError(f"the server ended while it started.\n{log_tail()}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            print(f"The server is healthy after {waited:.0f} s", flush=True)
            return
        if waited - said >= 5:
            said = waited
            print(f"  waiting for the server ... {waited:.0f} s", flush=True)
        time.sleep(0.5)
    raise DemoError(f"the server is not healthy after {waited:.0f} s.\n{log_tail()}")


def log_tail() -> str:
    """The end of the server's log."""
    lines = LOG.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
    name = LOG.relative_to(ROOT)
    return "\n".join([f"The end of its log ({name}):", *(f"  {x}" for x in lines)])


def stop(process: subprocess.Popen) -> None:
    """Ends the server and the processes it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ask_all(url: str, samples: list[dict[str, Any]]) -> int:
    """Asks every question and prints the answers; returns how many are wrong.

    Raises:
        DemoError: If a request fails.

    """
    from openai import OpenAI, OpenAIError

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    wrong = 0
    for sample in samples:
        print(f"\nPicture:  {', '.join(Path(n).name for n in sample['images'])}")
        print(f"Question: {sample['question']}", flush=True)
        try:
            reply = client.chat.completions.create(
                model="tiny-ovis2",
                messages=[{"role": "user", "content": content(sample)}],
                temperature=0,
                max_tokens=32,
                extra_body=extra_body(sample),
            )
        except OpenAIError as error:
            raise DemoError(f"a request failed: {error}\n{log_tail()}") from error
        answer = (reply.choices[0].message.content or "").strip()
        right = answer == sample["answer"]
        wrong += not right
        remark = "" if right else f"   (expected: {sample['answer']})"
        print(f"Answer:   {answer}{remark}", flush=True)
    return wrong


def content(sample: dict[str, Any]) -> list[Any]:
    """Content of the user's message: the pictures, then the question."""
    parts: list[Any] = []
    for name in sample["images"]:
        data = base64.b64encode((SAMPLES.parent / name).read_bytes()).decode()
        image_url = {"url": f"data:image/png;base64,{data}"}
        parts.append({"type": "image_url", "image_url": image_url})
    return [*parts, {"type": "text", "text": sample["question"]}]


def extra_body(sample: dict[str, Any]) -> dict[str, Any]:
    """What the request says beyond OpenAI's fields."""
    if "max_partition" not in sample:
        return {}
    return {"mm_processor_kwargs": {"max_partition": sample["max_partition"]}}


if __name__ == "__main__":
    sys.exit(main())
