#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#
# Ask a running Ovis server about one picture:
#
#     examples/ovis/client.sh photo.jpg "What does the sign say?"
set -eu
picture=$1
question=${2:-Describe the picture.}
url=${OVIS_URL:-http://127.0.0.1:8000}

# The picture goes through a file: an argument of a command has a size limit.
body=$(mktemp)
trap 'rm -f "$body"' EXIT
{
    printf '{"temperature": 0, "messages": [{"role": "user", "content": ['
    printf '{"type": "image_url", "image_url": {"url": "data:image/png;base64,'
    base64 < "$picture" | tr -d '\n'
    printf '"}}, {"type": "text", "text": "%s"}]}]}' \
        "$(printf '%s' "$question" | sed 's/[\\"]/\\&/g')"
} > "$body"
curl --silent --show-error "$url/v1/chat/completions" \
    --header 'Content-Type: application/json' --data @"$body"
echo
