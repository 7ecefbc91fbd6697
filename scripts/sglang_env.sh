#!/bin/sh
# Make the directory that KVOBS_TEST_SGLANG names: SGLang's wheel, unzipped, without any of its dependencies.
# Quick, and kept: an existing one is used again. Usage: scripts/sglang_env.sh DIRECTORY
set -eu
version=0.5.23
directory=${1:?Usage: scripts/sglang_env.sh DIRECTORY}
python=${PYTHON:-python3}
if [ ! -f "$directory/$version" ]; then
    mkdir -p "$directory/download"
    "$python" -m pip download -q --no-deps --dest "$directory/download" --only-binary :all: "sglang==$version"
    rm -rf "$directory/sglang"
    "$python" -m zipfile -e "$directory"/download/sglang-*.whl "$directory"
    rm -r "$directory/download"
    touch "$directory/$version"
fi
echo "export KVOBS_TEST_SGLANG=$directory"
