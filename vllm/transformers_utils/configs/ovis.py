# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Configuration of Ovis 1.6 and 2; the code lives in `vllm.models.ovis`."""

from vllm.models.ovis.config import Ovis2HfConfig, OvisConfig

__all__ = ["Ovis2HfConfig", "OvisConfig"]
