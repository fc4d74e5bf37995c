#!/usr/bin/env bash
# Repeats tests, to find those that fail now and then.
#   [BUSY=N] hack/repeat.sh TIMES [TEST…]
# TEST is a suite (`e2e`), a part of one (`e2e::boards::claim::lost_jit_config_is_replaced`; part of a name will do), or
# `make` for the whole of `make test`. Without one: every suite that uses the bed.
# The last BUSY of the runs (default: 0) have every core busy with other work.
#
# Results are kept per commit, and apart for a tree with uncommitted changes: a repetition that was interrupted goes on
# where it stopped, and more TIMES add to what there is. The summary counts all runs of this commit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. hack/progress.sh
export PADDOCK_CACHE=$cache CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$cache/target}

[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || die "how many times? hack/repeat.sh TIMES [TEST…]"
times=$1 busy=${BUSY:-0}; shift
[[ $busy =~ ^[0-9]+$ && $busy -le $times ]] || die "BUSY is the number of runs on busy cores, at most $times"
[ $# -gt 0 ] || set -- isolation control_plane node server bed github machine kubelet api chart install crash e2e

key=$(git rev-parse --short=12 HEAD)
changes=$(git diff HEAD; git ls-files --others --exclude-standard -z | xargs -0 -r sha256sum)
[ -z "$changes" ] || key+=-changed-$(sha256sum <<<"$changes" | cut -c1-8)
results="$cache/repeat/$key"
mkdir -p "$results"

# Occupies every core until it is killed or this script ends.
occupy() {
  local core
  for core in $(seq "$(nproc)"); do (while kill -0 $$ 2>/dev/null; do :; done) & load+=($!); done
}
idle() { [ ${#load[@]} -eq 0 ] || kill "${load[@]}" 2>/dev/null || true; load=(); }
load=()
end() { idle; [ -z "$child" ] || kill -- "-$child" 2>/dev/null || true; }
child=
trap end EXIT
trap 'exit 130' INT TERM

run() { # TEST
  local suite=${1%%::*} filter=()
  [ "$suite" = "$1" ] || filter=("${1#*::}")
  if [ "$suite" = make ]; then make test
  else cargo test --workspace --no-fail-fast --test "$suite" -- "${filter[@]}"; fi
}

hack/prepare.sh all -- build --workspace --bins --tests
for round in $(seq "$times"); do
  for test in "$@"; do
    dir="$results/${test//[^A-Za-z0-9_]/-}"
    mkdir -p "$dir"
    exec 8>"$dir/.lock"
    flock -n 8 || continue # another repetition runs it
    if [ -e "$dir/$round.passed" ] || [ -e "$dir/$round.failed" ]; then continue; fi
    start=$EPOCHSECONDS state=
    if [ "$round" -gt $((times - busy)) ]; then occupy; state=" on busy cores"; fi
    set -m # a process group of its own, which ends with this script
    run "$test" >"$dir/$round.log" 2>&1 </dev/null 8>&- & child=$!
    set +m
    wait "$child" && outcome=passed || outcome=failed
    child=
    # A filter that fits no test, and a suite that has none, prove nothing.
    if [ "$outcome" = passed ] && ! grep -qaE '[^0-9][1-9][0-9]* passed' "$dir/$round.log"; then outcome=failed; fi
    idle
    mv "$dir/$round.log" "$dir/$round.$outcome"
    say "$(printf '  %-4s %-40s %s in %ss%s' "$round" "$test" "$outcome" $((EPOCHSECONDS - start)) "$state")"
    [ "$outcome" = passed ] || hack/failed.sh "$dir/$round.failed" | sed 's/^/         /' >&2
  done
done

printf '\nAll runs of %s (logs: %s)\n' "$key" "$results"
failed=0
for dir in "$results"/*/; do
  passes=$(find "$dir" -name '*.passed' | wc -l) failures=$(find "$dir" -name '*.failed' | wc -l)
  failed=$((failed + failures))
  printf '  %-40s %3s passed %3s failed\n' "$(basename "$dir")" "$passes" "$failures"
  for log in "$dir"*.failed; do [ ! -e "$log" ] || hack/failed.sh "$log" | grep -a FAILED | sed "s|^|      $(basename "$log"): |" || true; done
done
[ "$failed" -eq 0 ]
