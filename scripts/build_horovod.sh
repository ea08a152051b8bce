#!/usr/bin/env bash
# Builds the last release of Horovod (0.28.1, 2023) against the torch in .venv, on gloo alone, and installs it there.
# Does nothing where it is there and works. Horovod is not maintained: its sources ask for C++14, which today's torch
# headers are not. Its files are compiled eight at a time, as torch's headers take most of a file's time, and without the
# symbols for a debugger that it asks for: a third of the minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$PWD/${1:-.venv}/bin/python
constraints=$PWD/constraints.txt
pip() { "$python" -m pip --disable-pip-version-check --quiet "$1" --constraint "$constraints" "${@:2}"; }

if "$python" -c 'import horovod.torch as hvd; hvd.init(); assert hvd.gloo_built()' 2>/dev/null; then
    echo "Horovod is there"
    exit
fi
command -v g++ >/dev/null || { echo "a C++ compiler is missing: install g++ (on a cluster: module load gcc)" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "building Horovod 0.28.1: about two minutes on two cores"
# cmake 4 took away what the sources' old third parties need; the variable below gives it back.
pip install wheel cmake packaging cloudpickle psutil pyyaml cffi
pip download --no-deps --no-binary :all: --no-build-isolation --dest "$work" horovod==0.28.1
tar -xzf "$work"/horovod-0.28.1.tar.gz -C "$work"
cd "$work/horovod-0.28.1"
sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 20/' CMakeLists.txt horovod/torch/CMakeLists.txt
sed -i 's/^add_library(${PYTORCH_TARGET_LIB} .*/&\nset_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES UNITY_BUILD ON)/' \
    horovod/torch/CMakeLists.txt
sed -i "s/'RelWithDebInfo'/'Release'/" setup.py

PATH=$(dirname "$python"):$PATH \
HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 CMAKE_POLICY_VERSION_MINIMUM=3.5 \
    pip install --no-deps --no-build-isolation .
cd /
"$python" -c "import horovod.torch as hvd; hvd.init(); assert hvd.gloo_built(); print('Horovod 0.28.1 is there')"
