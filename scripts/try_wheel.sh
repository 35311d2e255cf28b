#!/usr/bin/env bash
# Install the wheel of dist/ in a clean environment, first with required dependencies only, and try the main features.
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(ls dist/vsgd-*.whl)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --constraint constraints.txt "$wheel"
if "$folder/venv/bin/python" -m zipfile --list "$wheel" | grep --quiet vsgd_bench; then
    echo "the wheel contains vsgd_bench" >&2
    exit 1
fi
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import vsgd
state = vsgd.init(1.0)
theta, state, info = vsgd.step(1.0, state, vsgd.Moments(1.0, 1.0, 1.0, 1.0), 1)
try:
    import vsgd.torch
except ModuleNotFoundError as error:
    assert "pip install '.[torch]'" in str(error), error
else:
    raise SystemExit("torch should not be installed")
print("the core of vsgd", vsgd.__version__, "works without extras")
PYTHON
for command in figures "compare --suite large" "sparse --seeds 2"; do
    code=0
    # shellcheck disable=SC2086  # the words of a command
    "$folder/venv/bin/vsgd" $command 2> answer || code=$?
    if [ "$code" != 2 ] || [ "$(wc -l < answer)" != 1 ] || ! grep --quiet "part of the repository" answer; then
        echo "vsgd $command should print that it is part of the repository, with exit code 2:" >&2
        cat answer >&2
        exit 1
    fi
done
cat answer
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --constraint "$OLDPWD/constraints.txt" "$OLDPWD/$wheel[files,sklearn,torch]"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import torch

from vsgd.sklearn import VSGDClassifier
from vsgd.torch import VSGD

rng = np.random.default_rng(0)
X = rng.normal(size=(500, 4))
y = X[:, 0] > 0
assert VSGDClassifier(random_state=0).fit(X, y).score(X, y) > 0.9

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
inputs, targets = torch.tensor(X, dtype=torch.float32), torch.tensor(y).long()
optimizer = VSGD(model.parameters())
losses = []
for batch in torch.randint(len(X), (200, 16)):

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
        loss.backward()
        return loss

    losses.append(float(optimizer.step(closure)))
assert sum(losses[-20:]) < 0.5 * sum(losses[:20]), losses
print("a network and a linear model were trained")
PYTHON
printf 'stars,liked\n1,no\n5,yes\n2,no\n4,yes\n' > reviews.csv
"$folder/venv/bin/vsgd" fit reviews.csv --target liked --model reviews.npz
"$folder/venv/bin/vsgd" score reviews.csv --model reviews.npz
