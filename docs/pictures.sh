#!/usr/bin/env bash
# Makes the picture of README.md: the report of its question, drawn by a browser. Needs chromium on the PATH; takes a
# minute.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p build docs/images
.venv/bin/layoutopt search examples/transformer_lm.py:llama3_8b --devices 128 --hardware h100 --set batch=64 \
    --allow +sequence --report build/readme.html --quiet > build/readme.txt
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$profile" \
    --disable-background-networking --window-size=1200,1000 \
    --screenshot="docs/images/report.png" "file://$PWD/build/readme.html" 2>/dev/null
