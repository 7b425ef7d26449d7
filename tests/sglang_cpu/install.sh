#!/usr/bin/env bash
# install.sh VENV [PYTHON] installs the unmodified SGLang 0.5.23 for a machine without a GPU.
# The download is 1.7 GB and takes one to three minutes.
set -euo pipefail
here="$(dirname "$0")"
venv="$1"
"${2:-python3}" -m venv "$venv"
pip() { "$venv/bin/pip" "$@" --quiet --disable-pip-version-check; }
pip install torch==2.13.0 numpy==2.4.6  # first, so that pip takes a CPU build if the index has one
pip install --no-deps -r "$here/requirements.txt"
