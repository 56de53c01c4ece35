# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An engine that dies takes its server along, with a message and a status."""

import httpx
import psutil

from tests.models.ovis import golden
from tests.models.ovis.pictures import picture
from tests.models.ovis.server import image_part, running, text_part, user_message

SECONDS_TO_END = 120


def test_a_killed_engine_ends_the_server() -> None:
    """A request in the middle of its answer ends, and so do all processes."""
    checkpoint = golden.checkpoint_path("tiny-ovis2")
    with running(checkpoint, "--dtype", "float32", "--max-num-seqs", "2") as server:
        members = psutil.Process(server.process.pid).children(recursive=True)
        (engine,) = (p for p in members if "EngineCore" in p.name())
        body = {
            "messages": user_message(image_part(picture(1)), text_part("Tell all.")),
            "max_tokens": 7000,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=body, timeout=60
        ) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            engine.kill()
            assert "EngineCore encountered an issue" in "".join(lines)
        status = server.process.wait(SECONDS_TO_END)
        _, alive = psutil.wait_procs(members, SECONDS_TO_END)
        log = server.log.read_text()
    assert status == 1, log[-4000:]
    assert not alive
    assert "engine core exited unexpectedly" in log
    assert "The server ends because its engine has died." in log
