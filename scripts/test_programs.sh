#!/usr/bin/env bash
# Bring the real programs that some tests talk to, where that is possible; never fails, those tests skip instead.
set -uo pipefail

wanted=()
command -v prometheus >/dev/null && command -v promtool >/dev/null || wanted+=(prometheus)
command -v amtool >/dev/null || wanted+=(prometheus-alertmanager)
command -v chromium >/dev/null || wanted+=(chromium)
command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || wanted+=(g++)
[ ${#wanted[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "Not installed, and only root on Debian or Ubuntu can install it here: ${wanted[*]}. Tests that need it skip."
    exit 0
fi

# The packages' services must not start: the tests run their own on free ports.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
echo "Installing for the tests: ${wanted[*]}."
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
apt-get update -qq >"$log" 2>&1 </dev/null
for package in "${wanted[@]}"; do # one by one: a distribution may lack one of them
    if ! apt-get install -y -qq --no-install-recommends "$package" >"$log" 2>&1 </dev/null; then
        echo "apt-get could not install $package; tests that need it skip. Its last words:"
        tail -n 3 "$log"
    fi
done
rm -f "$log"
exit 0
