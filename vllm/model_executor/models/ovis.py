# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ovis 1.6 and 2; the code lives in `vllm.models.ovis`."""

from vllm.models.ovis.model import Ovis

__all__ = ["Ovis"]
