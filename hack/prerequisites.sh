#!/usr/bin/env bash
# Says in one sentence each which programs are missing or too old, before anything is built.
#   hack/prerequisites.sh [cargo cc go java mvn npm pip curl tar ip]      (no names: all of them)
set -euo pipefail

[ $# -gt 0 ] || set -- cargo cc go java mvn npm pip curl tar ip
missing=0
lacks() { printf '%s\n' "$*" >&2; missing=1; }

# version COMMAND…: the first number of its output; nothing when the command does not work.
version() { "$@" 2>&1 | grep -v '^Picked up JAVA' | grep -oE '[0-9]+(\.[0-9]+)*' | head -n 1 || true; }
older() { [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" != "$2" ]; } # VERSION THAN

# at_least WHAT WANTED REMEDY COMMAND…
at_least() {
  local what=$1 wanted=$2 remedy=$3 found; shift 3
  found=$(command -v "$1" >/dev/null && version "$@" || true)
  if [ -z "$found" ]; then lacks "$what $wanted or newer is needed and not there: $remedy."
  elif older "$found" "$wanted"; then lacks "$what $wanted or newer is needed, and this is $found: $remedy."; fi
}
present() { command -v "$1" >/dev/null || lacks "$1 is needed and not there: apt-get install $2."; }

for name in "$@"; do
  case $name in
    cargo) at_least Rust 1.95 "https://rustup.rs, or rustup update" cargo --version ;;
    cc) present cc build-essential ;;
    go) at_least Go 1.26 "https://go.dev/dl" go version ;;
    java) at_least Java 17 "apt-get install default-jre-headless" java -version ;;
    mvn) present mvn maven ;;
    npm) present npm npm ;;
    pip) python3 -m pip --version >/dev/null 2>&1 || lacks "Python 3 with pip is needed and not there: apt-get install python3-pip." ;;
    curl | tar) present "$name" "$name" ;;
    ip) PATH=$PATH:/usr/sbin:/sbin present ip iproute2 ;;
    *) lacks "no prerequisite is called '$name'" ;;
  esac
done
exit "$missing"
