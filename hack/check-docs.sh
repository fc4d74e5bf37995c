#!/usr/bin/env bash
# Docs name files and tests: prints those that do not exist, and fails if there are any.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

missing=$(
  for page in *.md docs/*.md docs/*/*.md charts/paddock/*.md; do
    { grep -oE '\]\([A-Za-z0-9_./-]+[)#]' "$page" || true; } | tr -d '](#)' | while read -r link; do
      [ -e "$(dirname "$page")/$link" ] || echo "$page: link $link"
    done
    { grep -oE '`(bed|charts|crates|docs|examples|hack|src|tests)/[A-Za-z0-9_./-]+' "$page" || true; } | tr -d '`' | while read -r path; do
      [ -e "$path" ] || echo "$page: file $path"
    done
  done
  { grep -oE '`[a-z0-9]+(_[a-z0-9]+){2,}`' docs/invariants.md || true; } | tr -d '`' | sort -u | while read -r test; do
    grep -rqw "$test" --include='*.rs' crates src tests bed || echo "docs/invariants.md: test $test"
  done
)
[ -z "$missing" ] || { printf '%s\n' "$missing" >&2; exit 1; }
