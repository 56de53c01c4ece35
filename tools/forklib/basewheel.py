# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reading an upstream wheel and laying the series over its package."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

from .edits import Edit, apply_edits
from .errors import ForkError

PACKAGE = "vllm/"


class BaseWheel:
    """An upstream wheel, open for reading.

    Attributes:
        path: The wheel.
        names: Paths of its members.
        tag: Tag part of its file name.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.zip = zipfile.ZipFile(path)
        self.names = [n for n in self.zip.namelist() if not n.endswith("/")]
        self.tag = path.stem.split("-", 2)[2]
        self._info = next(n for n in self.names if n.endswith(".dist-info/METADATA"))

    def read(self, name: str) -> bytes:
        """Content of a member."""
        return self.zip.read(name)

    def info_names(self) -> list[str]:
        """Members of the .dist-info folder, relative to it."""
        folder = self._info.removesuffix("METADATA")
        return [n.removeprefix(folder) for n in self.names if n.startswith(folder)]

    def read_info(self, name: str) -> bytes:
        """Content of a member of the .dist-info folder."""
        return self.read(self._info.removesuffix("METADATA") + name)

    def unpack_package(self, site: Path) -> None:
        """Extracts the vllm package below `site`, execute permissions included."""
        for info in self.zip.infolist():
            if info.filename.startswith(PACKAGE) and not info.is_dir():
                path = Path(self.zip.extract(info, site))
                if (info.external_attr >> 16) & 0o111:
                    path.chmod(0o755)

    def package_names(self) -> list[str]:
        """Members of the vllm package."""
        return [name for name in self.names if name.startswith(PACKAGE)]

    def edited(self, path: str, edits: Sequence[Edit]) -> bytes:
        """Member `path` with the declared edits applied.

        Raises:
            ForkError: If the member does not exist or an anchor is not found once.

        """
        if path not in self.names:
            raise ForkError(f"{edits[0].where}: {path} is not in {self.path.name}")
        return apply_edits(self.read(path).decode("utf-8"), edits).encode("utf-8")


def package_files(files: Sequence[str]) -> list[str]:
    """Those of the series' files that an installed package holds."""
    return [path for path in files if path.startswith(PACKAGE)]


def package_edits(edits: dict[str, list[Edit]]) -> dict[str, list[Edit]]:
    """Those of the series' edits that an installed package shows."""
    return {path: here for path, here in edits.items() if path.startswith(PACKAGE)}


def link_points(files: Sequence[str], upstream: Sequence[str]) -> list[str]:
    """Where to link so that `files` appear among `upstream`'s.

    A folder that upstream lacks is linked whole, so that files added to it later
    appear without another installation; any other file is linked by itself.

    Args:
        files: Our paths below vllm/.
        upstream: Paths of the base wheel.

    Returns:
        Paths of folders and files, sorted.

    """
    folders = {parent.as_posix() for name in upstream for parent in Path(name).parents}
    points = set()
    for path in files:
        parents = [parent.as_posix() for parent in Path(path).parents]
        missing = [parent for parent in parents if parent not in folders]
        points.add(missing[-1] if missing else path)
    return sorted(points)
