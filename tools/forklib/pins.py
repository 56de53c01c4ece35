# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What upstream is: the release, its archives and their hashes."""

import platform
import tomllib
from dataclasses import dataclass
from pathlib import Path

from .errors import ForkError

KINDS = ("sdist", "cpu", "cuda")


@dataclass(frozen=True)
class Archive:
    """One file of the upstream release.

    Attributes:
        kind: "sdist", "cpu" or "cuda".
        version: Upstream version, for example "0.32.0".
        project: Name of the project on the package index.
        file: Name of the file.
        sha256: Hash of its content, 64 hexadecimal digits.
        machine: `platform.machine()` a wheel is for; empty for the sdist.

    """

    kind: str
    version: str
    project: str
    file: str
    sha256: str
    machine: str = ""


@dataclass(frozen=True)
class Upstream:
    """The pinned release and the archives known for it.

    Attributes:
        version: Upstream version the fork is made from.
        fork: Running number N of the fork on that version.
        archives: All archives, other releases included.

    """

    version: str
    fork: int
    archives: tuple[Archive, ...]

    def fork_version(self, device: str) -> str:
        """Version of the fork's distribution.

        vLLM takes itself for a CPU build only if the letters "cpu" occur in the
        version of the installed distribution, hence the suffix.

        Args:
            device: "cpu" or "cuda".

        """
        suffix = ".cpu" if device == "cpu" else ""
        return f"{self.version}+ovis.{self.fork}{suffix}"

    def sdist(self, version: str | None = None) -> Archive:
        """The source archive of `version` (default: the release forked from).

        Raises:
            ForkError: If no archive of that version is pinned.

        """
        wanted = version or self.version
        found = [a for a in self.archives if a.kind == "sdist" and a.version == wanted]
        if not found:
            known = ", ".join(a.version for a in self.archives if a.kind == "sdist")
            raise ForkError(f"no sdist of vLLM {wanted} is pinned; pinned are: {known}")
        return found[0]

    def wheel(self, device: str, machine: str | None = None) -> Archive:
        """The upstream wheel for `device` on `machine` (default: this machine).

        Raises:
            ForkError: If no such wheel is pinned.

        """
        machine = machine or platform.machine()
        wheels = [
            a for a in self.archives if a.kind == device and a.version == self.version
        ]
        for wheel in wheels:
            if wheel.machine == machine:
                return wheel
        known = ", ".join(a.machine for a in wheels) or "none"
        raise ForkError(
            f"there is no {device} wheel of vLLM {self.version} for machine "
            f"{machine!r}; there are wheels for: {known}"
        )


def load_upstream(path: Path) -> Upstream:
    """Reads series/upstream.toml.

    Raises:
        ForkError: If the file holds an archive of unknown kind or a bad hash.

    """
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    archives = tuple(Archive(**entry) for entry in data["archive"])
    for archive in archives:
        if archive.kind not in KINDS:
            raise ForkError(
                f"{path}: {archive.file} is of kind {archive.kind!r}; "
                f"allowed are {', '.join(KINDS)}"
            )
        if len(archive.sha256) != 64:
            raise ForkError(f"{path}: the sha256 of {archive.file} has not 64 digits")
    return Upstream(data["version"], data["fork"], archives)
