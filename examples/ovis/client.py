# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ask a running Ovis server about pictures and a video.

Start the server first, then:

    python examples/ovis/client.py first.jpg second.png --video clip.mp4
"""

import argparse
from pathlib import Path
from typing import Any

import pybase64
from openai import OpenAI


def media_part(path: Path, kind: str, media_type: str) -> dict[str, Any]:
    """A file as a part of a message; the server reads the format from the bytes."""
    content = pybase64.b64encode(path.read_bytes()).decode()
    return {"type": kind, kind: {"url": f"data:{media_type};base64,{content}"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pictures", nargs="*", type=Path)
    parser.add_argument("--video", type=Path)
    parser.add_argument("--question", default="Describe what you see.")
    parser.add_argument("--max-partition", type=int, help="most cells per picture")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    arguments = parser.parse_args()

    parts = [media_part(p, "image_url", "image/png") for p in arguments.pictures]
    if arguments.video:
        parts.append(media_part(arguments.video, "video_url", "video/mp4"))
    parts.append({"type": "text", "text": arguments.question})

    extra: dict[str, Any] = {}
    if arguments.max_partition:
        extra["mm_processor_kwargs"] = {"max_partition": arguments.max_partition}
    client = OpenAI(base_url=arguments.url, api_key="none")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": parts}],  # type: ignore[misc,list-item]
        temperature=0,
        extra_body=extra,
    )
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
