# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm serve` over HTTP: golden answers, refusals, and the request after them."""

import io
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cv2
import httpx
import numpy as np
import pybase64
import pytest
import torch
from PIL import Image

from tests.models.ovis import golden
from tests.models.ovis.server import (
    chat,
    data_url,
    image_part,
    serve,
    text_part,
    user_message,
)

CHECKPOINT = "tiny-ovis2"
IMAGE_PAD = 697
"""Id of the token at image positions in this checkpoint."""


@pytest.fixture(scope="module")
def media_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of which the server may read local files."""
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="module")
def url(media_folder: Path) -> Iterator[str]:
    with serve(
        golden.checkpoint_path(CHECKPOINT),
        *("--dtype", "float32"),
        *("--mm-processor-kwargs", '{"max_partition": 16}'),
        *("--limit-mm-per-prompt", '{"image": 8}'),
        *("--allowed-local-media-path", str(media_folder)),
        "--enable-mm-embeds",
        VLLM_IMAGE_FETCH_TIMEOUT="1",
        VLLM_MEDIA_FETCH_MAX_RETRIES="1",
    ) as address:
        yield address


def cases(*names: str) -> list[dict[str, Any]]:
    by_name = {case["name"]: case for case in golden.array_cases(CHECKPOINT)}
    return [by_name[name] for name in names]


def as_messages(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The chat request that a case's single human turn stands for.

    Markers of the golden text become image parts; a line break beside a marker is the
    server's own between parts.
    """
    assert isinstance(case["conversation"], str)
    pictures = iter(golden.case_images(case))
    parts: list[dict[str, Any]] = []
    for index, piece in enumerate(case["conversation"].split("<image>")):
        if index:
            parts.append(image_part(golden.authors_view(next(pictures))))
        if text := piece.removeprefix("\n").removesuffix("\n"):
            parts.append(text_part(text))
    return user_message(*parts)


def expected_greedy(case: dict[str, Any]) -> list[int]:
    return golden.arrays()[f"{CHECKPOINT}/{case['name']}/greedy"].tolist()


SERVED = (
    "size_112x112",
    "size_640x480",
    "size_3x50",
    "mode_L",
    "two_different_grids",
    "two_equal_size",
    "max_partition_16_wide",
    "no_image",
)


def ask(url: str, case: dict[str, Any], **options: Any) -> httpx.Response:
    return chat(
        url,
        as_messages(case),
        ignore_eos=True,
        mm_processor_kwargs={"max_partition": case["max_partition"]},
        **options,
    )


@pytest.mark.parametrize("name", SERVED)
def test_golden_answers(url: str, name: str) -> None:
    """The authors' prompt, ids and greedy tokens through the chat endpoint."""
    (case,) = cases(name)
    response = ask(url, case)
    assert response.status_code == 200, response.text
    body = response.json()
    assert len(body["prompt_token_ids"]) == case["expected"]["merged_length"]
    assert body["choices"][0]["token_ids"] == expected_greedy(case)


def test_concurrent_answers_equal_serial_ones(url: str) -> None:
    """Every case four times at once: mixed grids, counts and text-only."""
    batch = cases(*SERVED) * 4
    with ThreadPoolExecutor(len(batch)) as pool:
        responses = list(pool.map(lambda case: ask(url, case), batch))
    for case, response in zip(batch, responses, strict=True):
        assert response.status_code == 200, response.text
        token_ids = response.json()["choices"][0]["token_ids"]
        assert token_ids == expected_greedy(case), case["name"]


def test_streamed_answer_is_the_same(url: str) -> None:
    (case,) = cases("two_different_grids")
    whole = ask(url, case).json()["choices"][0]["message"]["content"]
    streamed = ask(url, case, stream=True).text
    pieces = [
        httpx.Response(200, text=line.removeprefix("data: ")).json()
        for line in streamed.splitlines()
        if line.startswith("data: {")
    ]
    deltas = [piece["choices"][0]["delta"].get("content") for piece in pieces]
    assert "".join(filter(None, deltas)) == whole


def test_images_may_stand_anywhere_in_the_message(url: str) -> None:
    """An image keeps its place among the texts of a message."""
    picture = Image.new("RGB", (112, 112), (200, 30, 30))
    orders = (
        (image_part(picture), text_part("What is this?")),
        (text_part("What is this?"), image_part(picture)),
    )
    prompts = [
        chat(url, user_message(*order)).json()["prompt_token_ids"] for order in orders
    ]
    assert sorted(prompts[0]) == sorted(prompts[1])
    assert prompts[0] != prompts[1]


PICTURE = Image.new("RGB", (300, 200), (20, 120, 220))


@pytest.mark.parametrize(
    "messages, options, words",
    [
        pytest.param(
            user_message(image_part(PICTURE), text_part("What?")),
            {"mm_processor_kwargs": {"max_partition": value}},
            ("max_partition", str(value), "16"),
            id=f"max_partition {value!r}",
        )
        for value in (0, -1, "nine", 10000, 2.5, True)
    ]
    + [
        pytest.param(
            user_message(image_part(PICTURE), text_part("What?")),
            {"mm_processor_kwargs": {"max_partitions": 4}},
            ("max_partitions", "max_partition"),
            id="misspelt option",
        ),
        pytest.param(
            user_message(image_part(PICTURE), text_part("What?")),
            {
                "mm_processor_kwargs": {
                    "max_partition": 2,
                    "images_kwargs": {"max_partition": 3},
                }
            },
            ("given twice", "2", "3"),
            id="an option twice",
        ),
        pytest.param(
            user_message(image_part(Image.new("RGB", (1000, 1))), text_part("What?")),
            {},
            ("1000", "1"),
            id="too thin",
        ),
        pytest.param(
            user_message(*[image_part(PICTURE)] * 9, text_part("What?")),
            {},
            ("At most 8 image",),
            id="too many images",
        ),
    ],
)
def test_client_mistakes_are_told(
    url: str, messages: Any, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    """A 400 that names what was wrong, and the server goes on."""
    response = chat(url, messages, **options)
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    for word in words:
        assert word in message
    assert "Traceback" not in response.text
    (case,) = cases("size_112x112")
    answer = ask(url, case)
    assert answer.json()["choices"][0]["token_ids"] == expected_greedy(case)


def test_tools_need_a_parser(url: str) -> None:
    """A server without one says which options it lacks."""
    tool = {"type": "function", "function": {"name": "paint", "parameters": {}}}
    response = chat(
        url, user_message(text_part("Paint it.")), tools=[tool], tool_choice="auto"
    )
    assert response.status_code == 400
    assert "--enable-auto-tool-choice" in response.json()["error"]["message"]


def test_scoped_image_options(url: str) -> None:
    """Options under `images_kwargs` count as the flat ones do."""
    message = user_message(image_part(PICTURE), text_part("What?"))
    lengths = [
        len(chat(url, message, mm_processor_kwargs=k).json()["prompt_token_ids"])
        for k in (
            {"max_partition": 1},
            {"images_kwargs": {"max_partition": 1}},
            {"max_partition": 16},
            {},
        )
    ]
    assert lengths[0] == lengths[1] < lengths[2] == lengths[3]


@pytest.mark.parametrize("typed", ["<image>", "<video>", "<|image_pad|>"])
def test_typed_marks_stay_text(url: str, typed: str) -> None:
    """In text, history and tool results they take no image's place."""
    plain, marked = (
        chat(
            url,
            [
                {"role": "system", "content": f"Be brief.{words}"},
                *user_message(text_part(f"See{words}"), image_part(PICTURE)),
                {"role": "assistant", "content": f"Seen{words}"},
                {"role": "tool", "tool_call_id": "1", "content": f"Result{words}"},
                *user_message(image_part(PICTURE), text_part(f"Again{words}")),
            ],
        )
        for words in ("", f" {typed}")
    )
    assert marked.status_code == 200, marked.text
    ids = [answer.json()["prompt_token_ids"] for answer in (plain, marked)]
    typed_pads = 5 if typed == "<|image_pad|>" else 0
    assert ids[1].count(IMAGE_PAD) == ids[0].count(IMAGE_PAD) + typed_pads
    assert len(ids[1]) > len(ids[0])


@pytest.mark.parametrize(
    "size, status",
    [
        *(((1, 1), 200), ((3, 3), 200), ((3, 1), 200), ((500, 19), 200)),
        *(((1, 1000), 400), ((4000, 5), 400)),
    ],
)
def test_sizes_at_the_edge(url: str, size: tuple[int, int], status: int) -> None:
    """Served while a row and a column remain after the resize, else told why."""
    messages = user_message(image_part(PICTURE.resize(size)), text_part("What?"))
    response = chat(url, messages)
    assert response.status_code == status, response.text
    if status == 400:
        for number in size:
            assert str(number) in response.json()["error"]["message"]


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def file_part(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    content = pybase64.b64encode(data).decode()
    return url_part(f"data:{media_type};base64,{content}")


def url_part(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


def picture_answer(url: str, part: dict[str, Any]) -> tuple[list[int], list[int]]:
    response = chat(url, user_message(part, text_part("What?")), ignore_eos=True)
    assert response.status_code == 200, response.text
    body = response.json()
    return body["prompt_token_ids"], body["choices"][0]["token_ids"]


def noise(width: int = 200, height: int = 120) -> np.ndarray:
    # Blocks, so that JPEG keeps them apart from other pictures.
    random = np.random.default_rng(7)
    small = random.integers(0, 256, (height // 20, width // 20, 3), np.uint8)
    return small.repeat(20, 0).repeat(20, 1)


def rotated(picture: Image.Image) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture.transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif)


def transparent() -> Image.Image:
    picture = Image.fromarray(noise())
    picture.putalpha(Image.linear_gradient("L").resize(picture.size))
    return picture


def on_white(picture: Image.Image) -> Image.Image:
    white = Image.new("RGB", picture.size, (255, 255, 255))
    white.paste(picture, mask=picture.getchannel("A"))
    return white


def sixteen_bit() -> tuple[Image.Image, Image.Image]:
    grey = noise()[:, :, 0]
    return (
        Image.fromarray(grey.astype(np.uint16) * 257),
        Image.fromarray(grey).convert("RGB"),
    )


def animation() -> bytes:
    frames = [Image.new("P", (200, 120), index) for index in range(3)]
    for index, frame in enumerate(frames):
        frame.putpalette([index * 90, 30, 200] * 256)
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


KINDS: dict[str, Callable[[], tuple[bytes, Image.Image]]] = {
    "16-bit grey": lambda: (encoded(sixteen_bit()[0], "PNG"), sixteen_bit()[1]),
    "16-bit grey TIFF": lambda: (encoded(sixteen_bit()[0], "TIFF"), sixteen_bit()[1]),
    "transparency": lambda: (
        encoded(transparent(), "PNG"),
        on_white(transparent()),
    ),
    "EXIF": lambda: (rotated(Image.fromarray(noise())), Image.fromarray(noise())),
    "CMYK": lambda: (
        encoded(Image.fromarray(noise()).convert("CMYK"), "TIFF"),
        Image.fromarray(noise()).convert("CMYK").convert("RGB"),
    ),
    "1-bit": lambda: (
        encoded(Image.fromarray(noise()).convert("1"), "PNG"),
        Image.fromarray(noise()).convert("1").convert("RGB"),
    ),
    "animation": lambda: (animation(), Image.new("RGB", (200, 120), (0, 30, 200))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_files(url: str, kind: str) -> None:
    """A file of each kind is seen as the RGB picture it stands for."""
    data, picture = KINDS[kind]()
    assert picture_answer(url, file_part(data)) == picture_answer(
        url, image_part(picture)
    )


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header claims a size that its few bytes do not have."""

    def chunk(name: bytes, content: bytes) -> bytes:
        check = zlib.crc32(name + content)
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


class HostileHost(BaseHTTPRequestHandler):
    """Answers /slow late, /broken with 500 and everything else with 404."""

    def do_GET(self) -> None:
        if self.path == "/slow":
            time.sleep(8)
        self.send_error(500 if self.path == "/broken" else 404)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), HostileHost)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


WHOLE = encoded(Image.fromarray(noise()), "PNG")
HOSTILE = {
    "truncated": file_part(WHOLE[: len(WHOLE) // 2]),
    "truncated JPEG": file_part(encoded(PICTURE, "JPEG")[:300], "image/jpeg"),
    "zero bytes": file_part(b""),
    "a text file": file_part(b"This is no picture.", "text/plain"),
    "bad base64": url_part("data:image/png;base64,@@@@"),
    "no base64": url_part("data:image/png,abc"),
    "a data URL without data": url_part("data:image/png;base64"),
    "decompression bomb": file_part(bomb(60000, 60000)),
    "oversized": file_part(bomb(14000, 10000)),
    "not found": url_part("HOST/none.png"),
    "a slow host": url_part("HOST/slow"),
    "an unreachable host": url_part("http://127.0.0.1:9/picture.png"),
    "another scheme": url_part("ftp://127.0.0.1/picture.png"),
    "no URL": url_part("picture.png"),
    "a forbidden file": url_part("file:///etc/hostname"),
    "a forbidden file by a detour": url_part("file://FOLDER/../../etc/hostname"),
    "a missing file": url_part("file://FOLDER/none.png"),
    "a folder": url_part("file://FOLDER/inner"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(url: str, host: str, media_folder: Path, name: str) -> None:
    """4xx without a trace, within the timeout, and the next request is served."""
    (media_folder / "inner").mkdir(exist_ok=True)
    part = HOSTILE[name]
    address = part["image_url"]["url"].replace("HOST", host)
    address = address.replace("FOLDER", str(media_folder))
    response = chat(
        url, user_message(url_part(address), text_part("What?")), timeout=30
    )
    assert 400 <= response.status_code < 500, response.text
    assert "Traceback" not in response.text and 'File "' not in response.text
    (case,) = cases("size_112x112")
    answer = ask(url, case)
    assert answer.json()["choices"][0]["token_ids"] == expected_greedy(case)


def test_a_local_file_that_is_allowed(url: str, media_folder: Path) -> None:
    (media_folder / "picture.png").write_bytes(WHOLE)
    part = url_part(f"file://{media_folder}/picture.png")
    assert picture_answer(url, part) == picture_answer(url, file_part(WHOLE))


def tensor_part(tensor: torch.Tensor) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    content = pybase64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_embeds", "image_embeds": content}


def golden_embeddings(case: dict[str, Any]) -> torch.Tensor:
    """The rows of a case's one image among the authors' merged embeddings."""
    merged = golden.arrays()[f"{CHECKPOINT}/{case['name']}/inputs_embeds"]
    ids = case["expected"]["input_ids"]
    start = next(index for index, token in enumerate(ids) if token < 0)
    after = len(ids) - 1 - max(index for index, token in enumerate(ids) if token < 0)
    return torch.from_numpy(merged[start : len(merged) - after])


def test_image_embeddings(url: str) -> None:
    """The authors' embeddings in place of the picture give their tokens."""
    for name in ("size_112x112", "size_640x480"):
        (case,) = cases(name)
        (message,) = as_messages(case)
        image, *others = message["content"]
        assert image["type"] == "image_url"
        parts = [tensor_part(golden_embeddings(case)), *others]
        response = chat(url, user_message(*parts), ignore_eos=True)
        assert response.status_code == 200, response.text
        body = response.json()
        assert len(body["prompt_token_ids"]) == case["expected"]["merged_length"]
        assert body["choices"][0]["token_ids"] == expected_greedy(case)


@pytest.mark.parametrize(
    "part, words",
    [
        (tensor_part(torch.zeros(19, 64)), ("128", "64")),
        (tensor_part(torch.zeros(20, 128)), ("20 rows", "19")),
        (tensor_part(torch.full((19, 128), torch.nan)), ("NaN",)),
        (tensor_part(torch.zeros(19, 128, dtype=torch.int32)), ("int32",)),
        (tensor_part(torch.zeros(128)), ("1 rows",)),
        (tensor_part(torch.zeros(1, 1, 19, 128)), ("19",)),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, ("tensor",)),
        ({"type": "image_embeds", "image_embeds": "@"}, ()),
        (
            {"type": "image_embeds", "image_embeds": {"grids": [1, 2]}},
            ("image_embeds",),
        ),
    ],
)
def test_image_embeddings_that_are_refused(
    url: str, part: dict[str, Any], words: tuple[str, ...]
) -> None:
    response = chat(url, user_message(part, text_part("What?")))
    assert response.status_code == 400, response.text
    for word in words:
        assert word in response.json()["error"]["message"]
    (case,) = cases("size_112x112")
    answer = ask(url, case)
    assert answer.json()["choices"][0]["token_ids"] == expected_greedy(case)


def video_part(address: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": address}}


def test_frames_of_a_video(url: str) -> None:
    """A sequence of pictures sent as a video gives the authors' tokens."""
    (case,) = cases("video_4_frames")
    frames = [data_url(f).partition(",")[2] for f in golden.case_images(case)]
    part = video_part("data:video/jpeg;base64," + ",".join(frames))
    response = chat(
        url, user_message(part, text_part("Describe the frames.")), ignore_eos=True
    )
    assert response.status_code == 200, response.text
    body = response.json()
    assert len(body["prompt_token_ids"]) == case["expected"]["merged_length"]
    assert body["choices"][0]["token_ids"] == expected_greedy(case)


def test_frames_of_any_mode(url: str) -> None:
    """Grey and CMYK frames stand beside others."""
    frames = []
    for mode in ("RGB", "L", "CMYK"):
        buffer = io.BytesIO()
        PICTURE.convert(mode).save(buffer, "JPEG")
        frames.append(pybase64.b64encode(buffer.getvalue()).decode())
    response = chat(
        url, user_message(video_part("data:video/jpeg;base64," + ",".join(frames)))
    )
    assert response.status_code == 200, response.text


def test_a_video_file(url: str, tmp_path: Path) -> None:
    """Frames are chosen from a file; their number is settable up to the server's."""
    file = tmp_path / "video.avi"
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*"MJPG"), 10, (160, 120))
    for brightness in range(0, 240, 12):
        writer.write(np.full((120, 160, 3), brightness, np.uint8))
    writer.release()
    content = pybase64.b64encode(file.read_bytes()).decode()
    video = video_part(f"data:video/avi;base64,{content}")
    for options, frames in (
        ({}, 8),
        ({"media_io_kwargs": {"video": {"num_frames": 3}}}, 3),
    ):
        response = chat(url, user_message(video, image_part(PICTURE)), **options)
        assert response.status_code == 200, response.text
        # The picture of 300 x 200 pixels makes a grid of its own.
        alone = chat(url, user_message(image_part(PICTURE))).json()
        count = response.json()["prompt_token_ids"].count(IMAGE_PAD)
        assert count - alone["prompt_token_ids"].count(IMAGE_PAD) == frames * 19
    refused = chat(
        url, user_message(video), media_io_kwargs={"video": {"num_frames": 9}}
    )
    assert refused.status_code == 400
    assert "1 to 8 frames" in refused.json()["error"]["message"]


@pytest.mark.parametrize("data", [b"", b"no video", WHOLE])
def test_videos_that_are_refused(url: str, data: bytes) -> None:
    content = pybase64.b64encode(data).decode()
    part = video_part(f"data:video/mp4;base64,{content}")
    response = chat(url, user_message(part, text_part("What?")))
    assert 400 <= response.status_code < 500, response.text
    assert "Traceback" not in response.text


SMALL = PICTURE.resize((112, 112))
"""One tile: 19 tokens, from the 16th of a prompt on."""


@pytest.mark.parametrize("limit, fits", [(5, False), (20, False), (60, True)])
def test_an_image_is_never_cut(url: str, limit: int, fits: bool) -> None:
    """A truncation that would cut the picture is refused, one behind it served."""
    messages = user_message(image_part(SMALL), text_part("word " * 100))
    response = chat(
        url, messages, truncate_prompt_tokens=limit, truncation_side="right"
    )
    if fits:
        assert response.status_code == 200, response.text
        assert len(response.json()["prompt_token_ids"]) == limit
    else:
        assert response.status_code == 400, response.text
        assert "truncate" in response.text


def test_an_image_that_exceeds_the_model_length(url: str) -> None:
    """A text that fits by itself is refused beside an image that does not."""

    def answer(words: str, *parts: dict[str, Any]) -> httpx.Response:
        return chat(url, user_message(*parts, text_part(words)), max_tokens=1)

    one, two = (
        len(answer("a " * count).json()["prompt_token_ids"]) for count in (100, 200)
    )
    words = "a " * (100 + (8192 - 10 - one) * 100 // (two - one))
    assert answer(words).status_code == 200
    image = image_part(Image.new("RGB", (112, 112), (2, 1, 9)))
    response = answer(words, image)
    assert response.status_code == 400, response.text
    assert "8192" in response.text
    # The refusal leaves nothing behind that the next request would stumble over.
    assert answer("What?", image).status_code == 200


@pytest.mark.parametrize(
    "options",
    [
        {"truncate_prompt_tokens": 33, "truncation_side": "right"},
        {"logit_bias": {"99999999": 1}},
        {"mm_processor_kwargs": {"max_partition": 99}},
        {"temperature": -3},
        {"max_tokens": 2, "min_tokens": 3},
    ],
    ids=["truncated", "bad parameter", "bad option", "too cold", "too short"],
)
def test_a_refused_image_can_be_sent_again(url: str, options: dict[str, Any]) -> None:
    """A refusal leaves nothing behind that the next request would stumble over."""
    # A picture that no other request sends.
    image = image_part(Image.new("RGB", (112, 112), (1, len(str(options)), 9)))
    messages = user_message(image, text_part("What is this?"))
    refused = chat(url, messages, **options)
    assert refused.status_code == 400, refused.text
    served = chat(url, messages)
    assert served.status_code == 200, served.text


def test_repeated_images_by_uuid(url: str) -> None:
    """An image that was sent once may be named by its uuid."""
    question = text_part("What?")
    sent = {**image_part(PICTURE), "uuid": "picture-1"}
    named = {"type": "image_url", "image_url": None, "uuid": "picture-1"}
    answers = [chat(url, user_message(part, question)) for part in (sent, named, sent)]
    assert [answer.status_code for answer in answers] == [200] * 3, answers[1].text
    first, *others = [answer.json() for answer in answers]
    for other in others:
        assert other["prompt_token_ids"] == first["prompt_token_ids"]
        assert other["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    unknown = {**named, "uuid": "picture-2"}
    assert chat(url, user_message(unknown, question)).status_code == 400


def test_caches_keep_budgets_and_pixels_apart(url: str) -> None:
    """Counts follow the request's own budget; one pixel makes another picture."""
    picture = Image.fromarray(noise(600, 400))
    changed = picture.copy()
    changed.putpixel((599, 399), (1, 2, 3))
    requests = [
        (image, {"max_partition": budget})
        for image in (picture, changed)
        for budget in (1, 9, 4)
    ]

    def answer(image: Image.Image, options: dict[str, Any]) -> tuple[int, Any]:
        response = chat(
            url,
            user_message(image_part(image), text_part("What?")),
            mm_processor_kwargs=options,
            max_tokens=1,
            logprobs=True,
            top_logprobs=5,
        )
        assert response.status_code == 200, response.text
        body = response.json()
        top = body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return len(body["prompt_token_ids"]), [
            (entry["token"], round(entry["logprob"], 4)) for entry in top
        ]

    serial = [answer(*request) for request in requests]
    assert len({count for count, _ in serial}) == 3
    # The changed pixel is in the picture that one tile shows, too.
    assert serial[1] != serial[4]
    with ThreadPoolExecutor(6) as pool:
        again = list(pool.map(lambda request: answer(*request), requests * 3))
    for expected, (count, top) in zip(serial * 3, again, strict=True):
        assert count == expected[0]
        assert [token for token, _ in top] == [token for token, _ in expected[1]]
        assert np.allclose(
            [value for _, value in top], [value for _, value in expected[1]], atol=2e-3
        )
