# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The one error type that the tool turns into a message for its user."""


class ForkError(ValueError):
    """A condition the user can understand and repair from the message alone."""
