#!/bin/sh
# Every test, in parts: tests/in_parts.sh PYTHON. Its status is 1 when any of them failed; all parts run.
#
# Ranks and browsers need the cores for themselves, and mostly wait: what only computes and has no clock takes what they
# leave (its words come when it has ended). What has a clock shares the cores with its like; the labs come last.
python=$1
COMPUTES="not slow and not engine and not browser"
clockless="tests/layout tests/model $(ls tests/engine/*parity*.py tests/plan/test_*.py | grep -v shell_manners)"

said=$(mktemp)
tests/idly.sh "$python" -m pytest -p no:cacheprovider -m "$COMPUTES" $clockless >"$said" 2>&1 &
beside=$!
trap 'kill $beside 2>/dev/null; rm -f "$said"' EXIT
trap 'exit 130' INT TERM # what runs in the background does not hear Ctrl-C

failed=0
"$python" -m pytest -m "not slow and (engine or browser)" tests || failed=1
wait $beside || failed=1
cat "$said"
ignored=$(for each in $clockless; do echo "--ignore=$each"; done)
"$python" -m pytest -n 2 --dist loadfile -m "$COMPUTES" $ignored tests || failed=1
"$python" -m pytest --nbval-lax --nbval-cell-timeout=240 -p no:cacheprovider labs dashboards || failed=1
exit $failed
