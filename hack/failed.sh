#!/usr/bin/env bash
# Prints which tests failed in the log of a test run, and the first line of why.
#   hack/failed.sh LOG
set -uo pipefail
# A test by its name; a compiler's error; a suite that failed as a whole. Then each test with the first line of its error.
grep -aE '^test .* FAILED$|^error|^I10:|^not as GitHub has it|could not be set' "$1" | sort -u | cut -c-200 | tail -n 15
grep -aE -A1 '^---- .* ----$' "$1" | grep -av '^--$' | cut -c-300 | tail -n 20
exit 0
