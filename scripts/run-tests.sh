#!/usr/bin/env bash
# Runs all tests and repeats at the end, with a count, what was skipped and why. A skipped test says so on standard
# error in a line that begins with SKIPPED, which the test harness does not hold back. Arguments go to the harness:
# `--ignored` runs the long tests instead.
#
# GODWIT_REPEAT=N: up to N tests that fail are run once more, one by one with nothing beside them, and those that pass
# then are named at the end, and in the file GODWIT_REPEATED if that is set, instead of failing the whole. CI sets it,
# whose machine is at times held up for seconds. Nothing is repeated where one has seen damage.
set -euo pipefail
log=$(mktemp)
again=$(mktemp)
trap 'rm -f "$log" "$again"' EXIT
status=0
# One guest of each kind boots, and the others start from its state (lab/testbed/src/booted.rs).
export GODWIT_BOOT_ONCE=1
tests=("${CARGO:-cargo}" test --workspace --features godwit-cli/test-hooks --no-fail-fast)
"${tests[@]}" -- "$@" 2>&1 | tee "$log" || status=$?

# The names of tests that failed, from the lists at the end of each program; nothing if a program failed in another
# way (it did not come to its end, or did not compile), if a list is not whole (names of documentation's examples have
# spaces and are left out), or if what failed has told of damage.
failed_tests() {
  awk '
    # The first of two in a program begins what they printed, the second the list.
    /^failures:$/ { lists = 1; here = 0; next }
    lists && /^    [^ ]+$/ { list[++here] = $1; next }
    /^test result: / {
      if (/FAILED/) {
        programs++
        number = $0
        sub(/^.* passed; /, "", number)
        if (number + 0 != here) others++
        for (i = 1; i <= here; i++) names[++count] = list[i]
      }
      lists = here = 0
    }
    lists && /BUG|NOT exact|"verified": ?false/ { others++ }
    /^error: [0-9]+ targets? failed:$/ { targets = $2 }
    # virsh begins so what it says of a migration that a test gives up.
    /^error: operation aborted: / { next }
    /^error: / && !/targets? failed:$/ && !/^error: (test|doctest) failed, to rerun pass/ { others++ }
    END { if (programs == targets && !others) for (i = 1; i <= count; i++) print names[i] }
  ' "$log" | sort -u
}

repeated=()
if [ "$status" -ne 0 ] && [ "${GODWIT_REPEAT:-0}" -gt 0 ]; then
  mapfile -t failed < <(failed_tests)
  if [ "${#failed[@]}" -gt 0 ] && [ "${#failed[@]}" -le "$GODWIT_REPEAT" ]; then
    status=0
    for name in "${failed[@]}"; do
      echo
      echo "failed, and is run once more by itself: $name"
      RUST_TEST_THREADS=1 "${tests[@]}" --lib --bins --tests -- "$@" --exact "$name" >"$again" 2>&1 || status=1
      grep -v -E '^ *Running |^running 0 tests$|^test result: ok\. 0 passed|^$' "$again" || true
      # Somewhere it must have been run, and to its end.
      grep -q -E '^test result: ok\. [1-9]' "$again" || status=1
      if grep -q '^SKIPPED' "$again"; then status=1; fi
      repeated+=("$name")
    done
  fi
fi

skipped=$(grep -c '^SKIPPED' "$log" || true)
echo
if [ "$skipped" -gt 0 ]; then
  echo "$skipped tests were skipped:"
  grep '^SKIPPED' "$log" | sort | uniq
else
  echo "no test was skipped"
fi
if [ "${#repeated[@]}" -gt 0 ] && [ "$status" -eq 0 ]; then
  echo "${#repeated[@]} tests failed at first and passed by themselves:"
  printf 'REPEATED %s\n' "${repeated[@]}" | tee -a "${GODWIT_REPEATED:-/dev/null}"
fi
[ "$status" -eq 0 ] && echo "all tests passed" || echo "TESTS FAILED"
exit "$status"
