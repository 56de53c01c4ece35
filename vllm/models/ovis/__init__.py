# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ovis, AIDC-AI's vision-language models.

The engine's entry points are loaded on first use, so that the pure modules (tiling,
images, processor) can be imported without the engine.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import OvisConfig
    from .model import Ovis
    from .processor import OvisProcessor

__all__ = ["Ovis", "OvisConfig", "OvisProcessor"]

_MODULE_BY_NAME = {
    "Ovis": "model",
    "OvisConfig": "config",
    "OvisProcessor": "processor",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_MODULE_BY_NAME[name]}", __name__), name)
