#!/usr/bin/env bash
# Run the timing-sensitive tests (signals, processes, locks) repeatedly, with all cores busy.
# Arguments: number of rounds (default: 20), pytest command. Stops after the first failed round.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds="${1:-20}"
pytest="${2:-.venv/bin/pytest}"
files=(
    tests/pytorch/test_interrupts.py tests/test_streams.py tests/test_cli.py tests/test_jit.py tests/test_disk.py
    tests/test_outputs.py tests/test_stored_results.py tests/test_watch.py tests/distributed tests/pages
)
busy=()
log="$(mktemp)"
end() {
    kill "${busy[@]}" 2> /dev/null || true
    rm -f "$log"
}
trap end EXIT
for ((core = 0; core < $(nproc --all); core++)); do
    while :; do :; done &
    busy+=("$!")
done
for ((round = 1; round <= rounds; round++)); do
    if ! "$pytest" -q -m "not slow" --hypothesis-profile ci "${files[@]}" > "$log" 2>&1; then
        cat "$log"
        echo "round $round of $rounds: failed"
        exit 1
    fi
    echo "round $round of $rounds: $(tail -n 1 "$log")"
done
