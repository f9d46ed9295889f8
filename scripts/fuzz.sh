#!/usr/bin/env bash
# Fuzzes what listens to others with coverage, each target for FUZZ_SECONDS (60): scripts/fuzz.sh [TARGET]…
# Needs a nightly toolchain, for cargo-fuzz; without one it says so. All that it makes is below target/fuzz: what covers
# more than the kept corpora (corpus/TARGET), inputs that break something (found/TARGET), and the build.
# Ends with 1 at the first find.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${FUZZ_SECONDS:-60}
case "$seconds" in ''|0*|*[!0-9]*) echo "FUZZ_SECONDS=$seconds: it must be a number of seconds, 1 or more" >&2; exit 2;; esac
nightly=$(rustup toolchain list 2>/dev/null | grep -o '^nightly[^ ]*' | head -n 1 || true)
if [ -z "$nightly" ]; then
  echo "no nightly toolchain is installed, without which nothing is fuzzed with coverage: rustup toolchain install nightly" >&2
  exit 2
fi
if ! cargo fuzz --version >/dev/null 2>&1; then
  echo "installing cargo-fuzz with cargo"
  cargo install --quiet --locked cargo-fuzz
fi
all=$(cargo run --quiet --package godwit-fuzz-targets --bin fuzz-seeds -- --list)
targets=("$@")
[ $# -gt 0 ] || mapfile -t targets <<<"$all"
for target in "${targets[@]}"; do
  grep -qx "$target" <<<"$all" || { echo "'$target' is no target: $(tr '\n' ' ' <<<"$all")" >&2; exit 2; }
done
root=$PWD/target/fuzz
fuzz=(cargo "+$nightly" fuzz)
echo "building for $nightly, with address sanitizer and coverage"
"${fuzz[@]}" build --target-dir "$root/build" target >"$root.log" 2>&1 || { cat "$root.log" >&2; exit 1; }
for target in "${targets[@]}"; do
  corpus=$root/corpus/$target found=$root/found/$target
  mkdir -p "$corpus" "$found"
  # Five seconds for an input are a find as well, and so is more memory than any may ask for.
  status=0
  GODWIT_FUZZ_TARGET=$target "${fuzz[@]}" run --target-dir "$root/build" target \
    "$corpus" "lab/fuzz-targets/corpus/$target" -- \
    -max_total_time="$seconds" -timeout=5 -rss_limit_mb=2048 -max_len=8192 -artifact_prefix="$found/" \
    -print_final_stats=1 >"$found.log" 2>&1 || status=$?
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$found.log")
  covered=$(grep -o 'cov: [0-9]*' "$found.log" | tail -n 1 || true)
  if [ "$status" -ne 0 ] && ! grep -q 'Test unit written to' "$found.log"; then
    echo "$target: did not end by itself and has found nothing (status $status); what was said is in target/fuzz/found/$target.log" >&2
    exit 1
  fi
  if [ "$status" -ne 0 ]; then
    grep -m 1 -A 3 'panicked at\|ERROR: ' "$found.log" >&2 || true
    echo "$target: found something; the input is in target/fuzz/found/$target, what was said in target/fuzz/found/$target.log" >&2
    echo "again: GODWIT_FUZZ_TARGET=$target cargo +$nightly fuzz run --target-dir target/fuzz/build target FILE" >&2
    exit 1
  fi
  echo "$target: nothing found in ${runs:-?} runs of $seconds s (${covered:-no coverage told})"
done
echo "nothing found in ${#targets[@]} targets"
