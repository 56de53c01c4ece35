# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Git commands whose outcome no personal configuration can change."""

import os
import subprocess
from pathlib import Path

from .errors import ForkError

_ENV = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "Ovis for vLLM",
    "GIT_AUTHOR_EMAIL": "maintainers@ovis-for-vllm.invalid",
    "GIT_COMMITTER_NAME": "Ovis for vLLM",
    "GIT_COMMITTER_EMAIL": "maintainers@ovis-for-vllm.invalid",
}


def git(folder: Path, *arguments: str) -> str:
    """Runs git in `folder` and returns what it prints.

    Raises:
        ForkError: If git fails; holds its message.

    """
    env = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env=env | _ENV, capture_output=True, text=True
    )
    if done.returncode:
        raise ForkError(
            f"git {' '.join(arguments[:2])} failed in {folder}:\n"
            f"{done.stdout}{done.stderr}".rstrip()
        )
    return done.stdout
