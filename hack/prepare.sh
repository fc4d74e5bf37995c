#!/usr/bin/env bash
# Builds tools of the test bed (none, some, or all), and what a cargo command builds, side by side:
#   hack/prepare.sh etcd helm … -- build --workspace --bins
# Go and cargo each have long stretches on one core (a link, aws-sdk-ec2), which the other one fills.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. hack/progress.sh

tools=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do tools+=("$1"); shift; done
cargo=("${@:2}") others=()

[ ${#tools[@]} -eq 0 ] || others=('hack/tools.sh "${tools[@]}" >/dev/null')
side_by_side 'step cargo cargo "${cargo[@]}"' "${others[@]}"
