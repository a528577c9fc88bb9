#!/usr/bin/env bash
# The one recipe that makes a machine or an image able to run `python -m trainer`; the same lines serve both.
#   deploy/trainer_install.sh [FOLDER]      FOLDER: where the virtual environment goes (default ~/.gpubroker-trainer)
# Needs Python 3.11+ with venv. Run it again to bring an installation up to date.
set -euo pipefail

source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-$HOME/.gpubroker-trainer}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "trainer_install.sh: $("$python" --version) is too old: set PYTHON to a Python of 3.11 or newer" >&2; exit 1; }
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" "$source/deploy/trainer_requirements.py" |
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-cache-dir --progress-bar off \
        --constraint "$source/constraints-trainer.txt" --requirement /dev/stdin

# Only the trainer's package: it imports nothing of the broker.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$site/trainer"
cp -R "$source/trainer" "$site/trainer"
(cd / && "$venv/bin/python" -c 'import torch, trainer.contract; print("trainer ready: torch", torch.__version__)')
