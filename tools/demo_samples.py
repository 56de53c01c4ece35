# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Write the demo's sample pictures and questions.

    python tools/demo_samples.py

Answers come from the generator, not from the model.  Output: ``demo/images/*.png`` and
``demo/samples.json``, a list of {images, question, answer, max_partition?}.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.demo_data.scenes import make_sample  # noqa: E402

# Seeds outside those that training and evaluation use, picked for variety.
CHOSEN = [
    ("read", 20000),
    ("read", 20005),
    ("read", 20008),
    ("read", 20010),
    ("small_text", 20000),
    ("small_text", 20010),
    ("detail", 20007),
    ("detail", 20010),
    ("colour", 20011),
    ("shape", 20001),
    ("position", 20006),
    ("describe", 20006),
    ("two_images", 20000),
    ("two_images", 20002),
    ("two_images", 20004),
]


def main() -> None:
    folder = ROOT / "demo" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    samples = []
    for number, (task, seed) in enumerate(CHOSEN, 1):
        images, question, answer = make_sample(task, seed)
        names = []
        for k, image in enumerate(images, 1):
            part = f"_{k}" if len(images) > 1 else ""
            name = f"{number:02}_{task}{part}.png"
            image.save(folder / name, optimize=True)
            names.append(f"images/{name}")
        samples.append({"images": names, "question": question, "answer": answer})
        if question.startswith("Which image"):
            # The same two pictures the other way round: their order is seen.
            other = {"image 1": "image 2", "image 2": "image 1"}[answer]
            swapped = {"images": names[::-1], "question": question, "answer": other}
            samples.append(swapped)
        print(f"{', '.join(names)}: {question} {answer}")
    text = json.dumps(samples, indent=1) + "\n"
    (ROOT / "demo" / "samples.json").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
