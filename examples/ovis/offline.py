# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ready tiles, their normalised form, and frames, through `LLM.generate`.

python examples/ovis/offline.py MODEL picture.png
"""

import argparse
from typing import Any

from PIL import Image

from vllm import LLM, SamplingParams
from vllm.models.ovis import OvisProcessor
from vllm.models.ovis.images import normalization_table, normalize, tile_image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("picture")
    arguments = parser.parse_args()

    picture = Image.open(arguments.picture)
    processor = OvisProcessor.from_pretrained(arguments.model)
    settings = processor.image_settings
    tiled = tile_image(picture, settings.side, max_partition=4)
    ready = {
        "pixel_values": tiled.pixels,
        "rectangles": tiled.rectangles,
        "grid": tiled.grid,
    }
    table = normalization_table(settings.mean, settings.std)
    normalized = {
        "pixel_values": normalize(tiled.pixels, tiled.rectangles, table),
        "grid": tiled.grid,
    }

    def prompt(mark: str) -> str:
        return processor.apply_chat_template(
            [{"role": "user", "content": f"{mark}\nDescribe what you see."}],
            add_generation_prompt=True,
        )

    llm = LLM(arguments.model, mm_processor_kwargs={"max_partition": 4})
    requests: list[Any] = [
        {"prompt": prompt("<image>"), "multi_modal_data": {"image": image}}
        for image in (picture, ready, normalized)
    ]
    frames = [picture, picture.rotate(90)]
    requests.append(
        {"prompt": prompt("<video>"), "multi_modal_data": {"video": frames}}
    )
    outputs = llm.generate(requests, SamplingParams(temperature=0, max_tokens=64))
    for name, output in zip(("picture", "bytes", "floats", "video"), outputs):
        print(f"{name}: {output.outputs[0].text}")


if __name__ == "__main__":
    main()
