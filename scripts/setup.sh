#!/usr/bin/env bash
# Make the virtual environment that the Makefile's targets use: scripts/setup.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1

python=""
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "kvobs needs Python 3.11 or newer; install it, or name it with PYTHON=/path/to/python." >&2
    exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "Installing what $python needs to make virtual environments."
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "python$version-venv"; } \
        >/dev/null 2>&1 </dev/null || true
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "$python cannot make virtual environments; on Debian and Ubuntu, apt-get install python3-venv brings that." >&2
    exit 1
fi

# A half-made environment (an interrupted first run) is made anew.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "Making $venv with $("$python" --version)."
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
# First and pinned: a range would let pip replace a build that is already there by a larger one.
echo "Installing torch."
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0
echo "Installing kvobs and what its demo, tests and benchmarks need."
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[torch,otel,prometheus,nvml,app,lab,dev]'
