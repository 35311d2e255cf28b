#!/usr/bin/env bash
# Install the wheel of dist/ in a clean environment, with the core's dependencies only, and run what a stranger would run.
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(ls dist/vsgd-*.whl)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --constraint constraints.txt "$wheel"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import vsgd
state = vsgd.init(1.0)
theta, state, info = vsgd.step(1.0, state, vsgd.Moments(1.0, 1.0, 1.0, 1.0), 1)
try:
    import vsgd.torch
except ModuleNotFoundError as error:
    assert "vsgd[torch]" in str(error), error
else:
    raise SystemExit("torch should not be there")
print("the core of vsgd", vsgd.__version__, "works without extras")
PYTHON
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --constraint "$OLDPWD/constraints.txt" "$OLDPWD/$wheel[files]"
printf 'stars,liked\n1,no\n5,yes\n2,no\n4,yes\n' > reviews.csv
"$folder/venv/bin/vsgd" fit reviews.csv --target liked --model reviews.npz
"$folder/venv/bin/vsgd" score reviews.csv --model reviews.npz
