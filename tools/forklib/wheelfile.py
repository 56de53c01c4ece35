# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Writing a wheel that is another wheel with a few members replaced."""

import copy
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

from .basewheel import BaseWheel
from .metadata import dist_info_name, read_record, record_row, write_record

_LOCAL_HEADER = struct.Struct("<26xHH")
_DATE = (1980, 1, 1, 0, 0, 0)


def write_wheel(
    target: Path,
    source: BaseWheel,
    version: str,
    members: Mapping[str, bytes],
    info: Mapping[str, bytes],
) -> None:
    """Writes the fork's wheel.

    Members that stay are copied as they lie in `source`, still compressed: a wheel of
    hundreds of megabytes is written in seconds.

    Args:
        target: The wheel to write.
        source: The wheel most members come from.
        version: The fork's version.
        members: Content of added and replaced members of the vllm package.
        info: Content of the .dist-info folder, RECORD aside, by relative path.

    """
    folder = dist_info_name(version)
    record_of_source = read_record(source.read_info("RECORD").decode())
    rows = {path: record_of_source[path] for path in source.package_names()}
    written = {**members, **{f"{folder}/{name}": text for name, text in info.items()}}
    rows |= {path: record_row(path, content) for path, content in written.items()}
    record = f"{folder}/RECORD"
    written[record] = write_record(rows, record).encode()
    part = target.with_suffix(".part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as out:
        for member in source.zip.infolist():
            if member.filename in rows and member.filename not in written:
                _copy_compressed(source.zip, member, out)
        for path, content in written.items():
            entry = zipfile.ZipInfo(path, _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o100644 << 16
            out.writestr(entry, content)
    part.replace(target)


def _copy_compressed(
    source: zipfile.ZipFile, member: zipfile.ZipInfo, out: zipfile.ZipFile
) -> None:
    """Copies one member without unpacking it; zipfile has no call for this."""
    stream, target = source.fp, out.fp
    assert stream is not None and target is not None
    stream.seek(member.header_offset)
    names, extras = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    stream.seek(names + extras, 1)
    entry = copy.copy(member)
    entry.extra = b""
    # The sizes go into the header itself, not after the data.
    entry.flag_bits &= ~0x08
    target.seek(out.start_dir)
    entry.header_offset = target.tell()
    target.write(entry.FileHeader())
    target.write(stream.read(member.compress_size))
    out.start_dir = target.tell()
    out.filelist.append(entry)
    out.NameToInfo[entry.filename] = entry
    out._didModify = True  # type: ignore[attr-defined]
