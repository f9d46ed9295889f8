#!/usr/bin/env bash
# Runs all tests and repeats at the end, with a count, what was skipped and why. A skipped test says so on standard
# error in a line that begins with SKIPPED, which the test harness does not hold back. Arguments go to the harness:
# `--ignored` runs the long tests instead.
set -euo pipefail
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
# One guest of each kind boots, and the others start from its state (lab/testbed/src/booted.rs).
export GODWIT_BOOT_ONCE=1
"${CARGO:-cargo}" test --workspace --features godwit-cli/test-hooks --no-fail-fast -- "$@" 2>&1 | tee "$log" || status=$?
skipped=$(grep -c '^SKIPPED' "$log" || true)
echo
if [ "$skipped" -gt 0 ]; then
  echo "$skipped tests were skipped:"
  grep '^SKIPPED' "$log" | sort | uniq
else
  echo "no test was skipped"
fi
[ "$status" -eq 0 ] && echo "all tests passed" || echo "TESTS FAILED"
exit "$status"
