#!/usr/bin/env bash
# Makes the virtual environment of the peers: TensorFlow, PyTorch, pyarrow, pinned.
#
#   setup.sh [VENV_DIR]      default: ${ELASTICDL_CACHE:-~/.cache/elasticdl}/peers
#
# Prints the path of its Python as the last line of stdout. A second call with
# the same pins returns at once. Needs Python 3.11 or newer with venv, a C
# compiler and readelf (which come with any Rust toolchain's linker), and PyPI.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
venv=${1:-${ELASTICDL_CACHE:-$HOME/.cache/elasticdl}/peers}
python=$venv/bin/python
pins=$(cat "$here/requirements.txt" "$here/requirements-torch.txt" "$here/stub_cuda.py" | cksum)
stamp=$venv/elasticdl-peers.stamp

if [[ -x $python && -f $stamp && $(cat "$stamp") == "$pins" ]]; then
    echo "$python"
    exit 0
fi

base=${PYTHON:-python3}
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: the peers need Python 3.11 or newer, and $base is older" >&2
    echo "hint: set PYTHON to a newer interpreter" >&2
    exit 1
}

mkdir -p "$(dirname "$venv")"
rm -f "$stamp"
[[ -x $python ]] || "$base" -m venv "$venv"
"$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip --upgrade >/dev/null
# uv installs in a third of pip's time; pip does where uv cannot be had.
if "$python" -m pip install --quiet --disable-pip-version-check uv==0.13.7 >&2; then
    install=("$python" -m uv pip install --quiet --python "$python")
else
    install=("$python" -m pip install --quiet --disable-pip-version-check)
fi
"${install[@]}" -r "$here/requirements.txt" >&2
"${install[@]}" --no-deps -r "$here/requirements-torch.txt" >&2
"$python" "$here/stub_cuda.py" >&2
"$python" -c 'import torch, pyarrow; torch.ones(2, 2) @ torch.ones(2, 2)' >&2
echo "$pins" >"$stamp"
echo "$python"
