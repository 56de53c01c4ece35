# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pictures, questions and answers of the demo checkpoint; needs Pillow only."""
