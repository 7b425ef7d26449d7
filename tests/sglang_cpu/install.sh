#!/usr/bin/env bash
# install.sh VENV [PYTHON]: the unmodified SGLang 0.5.23 for a machine without a GPU. About 1.7 GB, one to three minutes.
set -euo pipefail
here="$(dirname "$0")"
venv="$1"
"${2:-python3}" -m venv "$venv"
pip() { "$venv/bin/pip" "$@" --quiet --disable-pip-version-check; }
pip install torch==2.13.0 numpy==2.4.6  # where the index has a CPU build of this version, nothing heavier is pulled in
pip install --no-deps -r "$here/requirements.txt"
