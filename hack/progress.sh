# shellcheck shell=bash
# Sourced by the scripts here: long steps that run side by side, each with a log of its own, and one line that says
# what is under way: kept up to date on a terminal, repeated every 30 s elsewhere. All of it on standard error.
# PADDOCK_STEPS is a directory with a file per running step, shared with the scripts that a step starts.

cache=${PADDOCK_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/paddock}
mkdir -p "$cache/tools" "$cache/log"

wipe() { if [ -t 2 ]; then printf '\r\033[K' >&2; fi; }
say() { wipe; printf '%s\n' "$*" >&2; }
die() { say "$(basename "$0"): $*"; exit 1; }

# step NAME COMMAND…: runs it with its output in a log, and shows the log's end if it fails.
step() {
  local name=$1 log="$cache/log/$1.log" start=$EPOCHSECONDS; shift
  echo "$start" >"$PADDOCK_STEPS/$name"
  "$@" >"$log" 2>&1 & # in the background, because a command in a condition would lose `set -e`
  if wait $!; then say "$(printf '  %-26s done in %ss' "$name" $((EPOCHSECONDS - start)))"
  else say "$(tail -n 60 "$log")"; die "$name failed; the whole log is $log"; fi
  rm -f "$PADDOCK_STEPS/$name"
}

# side_by_side COMMAND…: runs the commands (each one string) at the same time; the first to fail ends the others.
side_by_side() {
  local command; lanes=()
  trap end_lanes EXIT
  trap 'exit 130' INT TERM
  if [ -z "${PADDOCK_STEPS:-}" ]; then
    PADDOCK_STEPS=$(mktemp -d); export PADDOCK_STEPS
    show_steps >/dev/null & shower=$!
  fi
  set -m # a process group for each, to be ended with all that it started
  for command in "$@"; do (set +m; eval "$command") </dev/null & lanes+=($!); done
  set +m
  for _ in "$@"; do wait -n || exit 1; done
  lanes=(); end_lanes
  trap - EXIT INT TERM
}

end_lanes() {
  local lane
  for lane in "${lanes[@]}"; do kill -- "-$lane" 2>/dev/null || true; done
  if [ -n "${shower:-}" ]; then
    kill "$shower" 2>/dev/null || true; wait "$shower" 2>/dev/null || true
    rm -rf "$PADDOCK_STEPS"; unset PADDOCK_STEPS shower; wipe
  fi
}

show_steps() {
  local file name line seconds=30
  [ ! -t 2 ] || seconds=1
  while sleep "$seconds" >/dev/null 2>&1; do
    line=""
    for file in "$PADDOCK_STEPS"/*; do
      [ -s "$file" ] || continue
      name=${file##*/}
      line+="  $name $((EPOCHSECONDS - $(<"$file")))s $(tail -n 1 "$cache/log/$name.log" 2>/dev/null | cut -c1-40)"
    done
    if [ -z "$line" ]; then continue; fi
    if [ -t 2 ]; then printf '\r\033[K%.*s' "$(tput cols 2>/dev/null || echo 80)" "$line" >&2; else say "  …$line"; fi
  done
}
