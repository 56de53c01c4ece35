# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Parts of the demo checkpoint's training; ``tools/train_demo.py`` is the command."""
