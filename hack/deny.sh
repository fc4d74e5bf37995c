#!/usr/bin/env bash
# Licences, bans and sources, always; advisories where their database can be fetched.
#   hack/deny.sh path/to/cargo-deny
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

"$1" --workspace check --hide-inclusion-graph licenses bans sources
if timeout 60 "$1" fetch db >/dev/null 2>&1; then "$1" --workspace check --disable-fetch advisories
else echo "the advisory database cannot be reached: advisories were not checked"; fi
