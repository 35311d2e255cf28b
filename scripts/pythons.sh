#!/usr/bin/env bash
# Run the tests on every supported Python that is installed, each in a separate environment.
set -euo pipefail
cd "$(dirname "$0")/.."
for version in 3.11 3.12 3.13; do
    if ! command -v "python$version" > /dev/null; then
        echo "python$version: not installed, skipped"
        continue
    fi
    echo "python$version"
    make VENV=".venv-$version" PYTHON="python$version" test
done
