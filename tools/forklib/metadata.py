# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Files of a distribution's .dist-info folder, rewritten for the fork."""

import base64
import csv
import hashlib
import io
from collections.abc import Mapping
from typing import Protocol

# Path, hash and size of a file.
Row = tuple[str, str, str]

VERSION_MODULE = "vllm/_version.py"
# They name whoever packed the base wheel, whom reports about the fork must not reach.
_PACKER_FIELDS = ("author", "author-email", "maintainer", "maintainer-email")
# The CPU path of the Ovis models uses none of these, and the builds the index offers
# are not made against the CPU build of torch: they fail to load beside it.
_CPU_UNUSED = ("torchaudio", "torchvision", "torchcodec")


class InfoSource(Protocol):
    """What is needed of a base wheel here."""

    tag: str

    def info_names(self) -> list[str]:
        """Members of the .dist-info folder, relative to it."""

    def read_info(self, name: str) -> bytes:
        """Content of a member of the .dist-info folder."""


def fork_info(
    base: InfoSource, version: str, device: str, description: str
) -> dict[str, bytes]:
    """Content of the fork's .dist-info folder, RECORD aside, by relative path.

    Args:
        base: The base wheel.
        version: The fork's version.
        device: "cpu" or "cuda".
        description: Markdown for the METADATA.

    """
    files = {name: base.read_info(name) for name in base.info_names()}
    del files["RECORD"]
    files["METADATA"] = rewrite_metadata(
        files["METADATA"].decode("utf-8"), version, device, description
    ).encode("utf-8")
    files["WHEEL"] = rewrite_wheel(files["WHEEL"].decode("utf-8"), base.tag).encode()
    return files


def dist_info_name(version: str) -> str:
    """Name of the .dist-info folder of the fork."""
    return f"vllm-{version.replace('-', '_')}.dist-info"


def rewrite_metadata(text: str, version: str, device: str, description: str) -> str:
    """METADATA of a base wheel, turned into the fork's.

    Args:
        text: METADATA of the base wheel.
        version: The fork's version.
        device: "cpu" relaxes the requirements that only hold on the packer's index:
            "torch==X+cpu" becomes "torch==X" (which an X+cpu build fulfils).
        description: Markdown put in the place of the base wheel's description.

    """
    head = text.split("\n\n", 1)[0]
    lines = []
    for line in head.splitlines():
        field, _, value = line.partition(": ")
        field = field.lower()
        if field == "name":
            line = "Name: vllm"
        elif field == "version":
            line = f"Version: {version}"
        elif field in _PACKER_FIELDS or value.startswith("Bug Tracker,"):
            continue
        elif field == "requires-dist" and device == "cpu":
            if requirement_name(value) in _CPU_UNUSED:
                continue
            line = line.replace("+cpu;", ";").removesuffix("+cpu")
        lines.append(line)
    return "\n".join(lines) + "\n\n" + description


def requirement_name(requirement: str) -> str:
    """Project name of a requirement such as "torch==2.13.0; extra == 'x'"."""
    for position, character in enumerate(requirement):
        if not (character.isalnum() or character in "-_."):
            return requirement[:position].lower()
    return requirement.lower()


def rewrite_wheel(text: str, tag: str) -> str:
    """WHEEL of a base wheel with the tags of its file name.

    The base wheels were retagged by name only; installers compare the two.

    Args:
        text: WHEEL of the base wheel.
        tag: Tag of the file name, for example "cp38-abi3-manylinux_2_28_x86_64".

    """
    lines = [line for line in text.splitlines() if line and line[:4] != "Tag:"]
    python, abi, platforms = tag.split("-")
    lines += [f"Tag: {python}-{abi}-{platform}" for platform in platforms.split(".")]
    return "\n".join(lines) + "\n"


def version_module(version: str) -> str:
    """Source of vllm/_version.py."""
    public, _, local = version.partition("+")
    numbers = ", ".join(public.split("."))
    return (
        f'__version__ = version = "{version}"\n'
        f'__version_tuple__ = version_tuple = ({numbers}, "{local}")\n'
    )


def record_row(path: str, content: bytes) -> Row:
    """The line of RECORD for a file."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return (path, f"sha256={digest.rstrip(b'=').decode()}", str(len(content)))


def unhashed_row(path: str) -> Row:
    """The line of RECORD for a file whose content may change."""
    return (path, "", "")


def read_record(text: str) -> dict[str, Row]:
    """Lines of a RECORD by path.

    The file is CSV: some of upstream's paths hold commas and are quoted.
    """
    rows = csv.reader(io.StringIO(text))
    return {path: (path, digest, size) for path, digest, size in rows}


def write_record(rows: Mapping[str, Row], record_path: str) -> str:
    """Makes a RECORD of its lines; its own carries no hash."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows(rows[path] for path in sorted(rows) if path != record_path)
    writer.writerow(unhashed_row(record_path))
    return out.getvalue()
