# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""tools/fork check: everything that must hold before the fork is released."""

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

from .basewheel import BaseWheel, package_edits
from .errors import ForkError
from .fetch import fetch
from .git import git
from .pins import load_upstream
from .series import load_series, owners
from .tree import BASE, apply_patches, format_patches, make_tree

# Common idioms stay below either number, a copied part of a file exceeds both.
_SHARED_SHARE = 0.2
_SHARED_LINES = 5
_UPSTREAM_HOOKS = (
    "check_spdx_header.py",
    "check_forbidden_imports.py",
    "check_torch_cuda.py",
    "check_boolean_context_manager.py",
)
_IMPORT = """
import importlib, sys
import vllm
if not vllm.__file__.startswith(sys.argv[1]):
    sys.exit(f"imported {vllm.__file__} instead of the tree's vllm")
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


class Checks:
    """The checks and what they share.

    Attributes:
        root: The repository.
        device: "cpu" or "cuda": whose wheel is looked at.
        cache: Folder of upstream archives.
        work: Folder for trees made on the way.

    """

    def __init__(self, root: Path, device: str, cache: Path, work: Path) -> None:
        self.root = root
        self.device = device
        self.cache = cache
        self.work = work
        self.upstream = load_upstream(root / "series" / "upstream.toml")
        self.series = load_series(root)
        self.files = self.series.files(root)
        self.tree = work / self.upstream.version

    def all(self) -> list[tuple[str, Callable[[], None]]]:
        """Names and functions of all checks; some use the trees of those before."""
        versions = [a.version for a in self.upstream.archives if a.kind == "sdist"]
        return [
            ("archives have the pinned content", self.archives),
            ("each file belongs to exactly one commit", self.ownership),
            ("each commit changes something", self.no_empty_commit),
            ("our Python files parse", self.syntax),
            (f"anchors are found once in the {self.device} wheel", self.wheel_anchors),
            *(
                (
                    f"the series applies to vLLM {version} with git am",
                    lambda version=version: self.applies(version),
                )
                for version in versions
            ),
            ("no upstream text is stored", self.originality),
            ("the tree passes upstream's ruff settings", self.lint),
            ("our files pass upstream's own hooks", self.hooks),
            ("our modules import from the tree", self.imports),
        ]

    def archives(self) -> None:
        """Fetches what is missing and compares every archive with its pin."""
        fetch(self.upstream.wheel(self.device), self.cache)
        for archive in self.upstream.archives:
            if archive.kind == "sdist":
                fetch(archive, self.cache)

    def ownership(self) -> None:
        """Each file at an upstream path is in one commit, or is the fork's own."""
        wrong = [
            f"{path}: in {', '.join(found) or 'no commit'}"
            for path, found in owners(self.series, self.files).items()
            if len(found) != 1
        ]
        _fail_on(wrong)

    def no_empty_commit(self) -> None:
        """Each commit has a file or an edit, and each of its globs finds a file."""
        wrong = [
            f"{commit.source}: no file matches {glob!r}"
            for commit in self.series.commits
            for glob in commit.files
            if not any(fnmatchcase(path, glob) for path in self.files)
        ]
        wrong += [
            f"{commit.source}: no files and no edits"
            for commit in self.series.commits
            if not commit.files and not commit.edits
        ]
        _fail_on(wrong)

    def syntax(self) -> None:
        """Each Python file of the series parses."""
        wrong = []
        for path in self._python_files():
            try:
                ast.parse((self.root / path).read_text(encoding="utf-8"), path)
            except SyntaxError as error:
                wrong.append(f"{path}:{error.lineno}: {error.msg}")
        _fail_on(wrong)

    def wheel_anchors(self) -> None:
        """Edits of the installed package apply to the base wheel."""
        wheel = BaseWheel(fetch(self.upstream.wheel(self.device), self.cache))
        for path, edits in package_edits(self.series.edits()).items():
            wheel.edited(path, edits)

    def applies(self, version: str) -> None:
        """The series gives a tree of `version`, and its patches the same tree."""
        tree, patches = self.work / version, self.work / f"patches-{version}"
        make_tree(self.root, tree, self.cache, version)
        format_patches(tree, self.series, patches)
        apply_patches(tree, patches, self.work / f"pristine-{version}")

    def originality(self) -> None:
        """A file of ours that replaces one of upstream's shares no text with it."""
        wrong = []
        for path in git(self.tree, "ls-tree", "-r", "--name-only", BASE).split("\n"):
            if path in self.files:
                theirs = git(self.tree, "show", f"{BASE}:{path}")
                ours = (self.root / path).read_text("utf-8")
                shared, telling = shared_lines(ours, theirs)
                if shared >= _SHARED_LINES and shared > _SHARED_SHARE * telling:
                    wrong.append(f"{path}: {shared} of {telling} lines are upstream's")
        _fail_on(wrong)

    def lint(self) -> None:
        """Ruff with the tree's settings on our files and on those we edit."""
        edited = [path for path in self.series.edits() if path.endswith(".py")]
        files = [*self._python_files(), *edited]
        for arguments in (["check"], ["format", "--check"]):
            self._run([sys.executable, "-m", "ruff", *arguments, *files])

    def hooks(self) -> None:
        """Upstream's own scripts for its commit hooks."""
        for hook in _UPSTREAM_HOOKS:
            script = f"tools/pre_commit/{hook}"
            self._run([sys.executable, script, *self._python_files()])

    def imports(self) -> None:
        """Each module of ours imports when the tree is what Python finds first."""
        modules = [
            path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            for path in self._python_files()
            if path.startswith("vllm/")
        ]
        command = [sys.executable, "-c", _IMPORT, str(self.tree), *modules]
        self._run(command, PYTHONPATH=str(self.tree))

    def _python_files(self) -> list[str]:
        return [path for path in self.files if path.endswith(".py")]

    def _run(self, command: list[str], **settings: str) -> None:
        done = subprocess.run(
            command,
            cwd=self.tree,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ForkError((done.stdout + done.stderr).strip())


def shared_lines(ours: str, theirs: str) -> tuple[int, int]:
    """How many of our telling lines occur in `theirs` word for word, and of how many.

    Comments, imports and lines too short to tell anything do not count.
    """

    def telling(text: str) -> list[str]:
        lines = (line.strip() for line in text.splitlines())
        skipped = ("#", "import ", "from ")
        return [x for x in lines if len(x) >= 20 and not x.startswith(skipped)]

    mine, known = telling(ours), set(telling(theirs))
    return sum(line in known for line in mine), len(mine)


def _fail_on(wrong: list[str]) -> None:
    if wrong:
        raise ForkError("\n".join(wrong))


def run_checks(root: Path, device: str, cache: Path) -> int:
    """Runs all checks, prints a line for each and returns the number that failed."""
    cache.mkdir(parents=True, exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory(dir=cache, prefix="check-") as folder:
        for name, check in Checks(root, device, cache, Path(folder)).all():
            try:
                check()
            except ForkError as error:
                failed += 1
                print(f"FAIL {name}")
                print("     " + str(error).replace("\n", "\n     "), flush=True)
            else:
                print(f"ok   {name}", flush=True)
    return failed
