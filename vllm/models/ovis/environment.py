# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Environment variables of other servers that would mislead here."""

import os

from vllm.logger import init_logger

logger = init_logger(__name__)


def warn_about_environment() -> None:
    """Say once that MAX_PARTITION, which another server reads, does nothing here."""
    value = os.environ.get("MAX_PARTITION")
    if value is not None:
        logger.warning_once(
            "The environment variable MAX_PARTITION (%s) has no effect; start with "
            "--mm-processor-kwargs '{\"max_partition\": %s}' instead.",
            value,
            value,
        )
