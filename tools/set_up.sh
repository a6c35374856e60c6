#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# set_up.sh VENV REQUIREMENT: make the environment if it is not there, PyTorch first, then REQUIREMENT in editable form.
# PYTHON, TORCH and TORCH_INDEX_URL are explained in the Makefile.
set -euo pipefail
venv=$1
requirement=$2

if [ ! -x "$venv/bin/python" ]; then
    if [ -z "${PYTHON:-}" ]; then
        echo "No Python 3.11, 3.12 or 3.13 found. Install one, or name it: make PYTHON=/path/to/python3.12 …" >&2
        exit 1
    fi
    "$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
        { echo "$PYTHON is $("$PYTHON" --version 2>&1); oscar-kv needs Python 3.11, 3.12 or 3.13." >&2; exit 1; }
    echo "Making a virtual environment in $venv with $("$PYTHON" --version) …"
    "$PYTHON" -m venv "$venv" ||
        { echo "python -m venv failed (on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }
fi
python=$venv/bin/python

installed() { "$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null; }

if ! installed >/dev/null; then
    # The local version label +cpu keeps pip from choosing a CUDA build of several gigabytes. macOS wheels carry none.
    if [ "$(uname -s)" = Darwin ]; then default=torch==2.13.0; else default=torch==2.13.0+cpu; fi
    wanted=${TORCH:-$default}
    echo "Installing $wanted …"
    if [ -n "${TORCH_INDEX_URL:-}" ]; then
        "$python" -m pip install --quiet --index-url "$TORCH_INDEX_URL" "$wanted"
    elif ! "$python" -m pip install --quiet "$wanted" 2>"$venv/torch.log"; then
        if [ -n "${TORCH:-}" ] || ! grep -q "No matching distribution" "$venv/torch.log"; then
            cat "$venv/torch.log" >&2
            exit 1
        fi
        echo "The default package index has no CPU build; installing torch==2.13.0 as it is there, which may be a" >&2
        echo "CUDA build of several gigabytes. To avoid that, stop here and set TORCH_INDEX_URL to PyTorch's CPU index." >&2
        "$python" -m pip install --quiet torch==2.13.0
    fi
fi

# Nothing that follows may replace this PyTorch.
echo "torch==$(installed)" >"$venv/torch.constraint"
echo "Installing oscar-kv and its tools beside PyTorch $(installed) …"
"$python" -m pip install --quiet --constraint "$venv/torch.constraint" --editable "$requirement"
