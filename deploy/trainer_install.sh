#!/usr/bin/env bash
# Installs what `python -m trainer` needs, on a machine or in an image.
#   deploy/trainer_install.sh [FOLDER]      FOLDER: where the virtual environment goes (default ~/.gpubroker-trainer)
# GPUBROKER_EXTRAS: further extras of pyproject.toml, separated by spaces (trackers, fp8).
# GPUBROKER_AGENT_ONLY: set for the image of a job, which gets no torch: only the packages of the agent are installed.
# Needs Python 3.11+ with venv, or uv to get one. Run it again to bring an installation up to date. A Python that
# already has the trainer's torch is the base of the environment. If no package is missing, nothing is downloaded.
set -euo pipefail
umask 022

source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-$HOME/.gpubroker-trainer}
torch=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' "$source/constraints-trainer.txt")

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

has_torch() {
    "$1" -I -c 'import importlib.metadata as m, sys; sys.exit(m.version("torch").split("+")[0] != sys.argv[1])' \
        "$torch" 2>/dev/null
}

# The Python to build on: one with torch before one without. Several may exist, because SkyPilot brings its own.
choose() {
    local found="" candidate
    for candidate in ${PYTHON:-python3 /usr/bin/python3 /usr/local/bin/python3 /opt/conda/bin/python3}; do
        new_enough "$candidate" || continue
        if has_torch "$candidate"; then
            found=$candidate
            break
        fi
        found=${found:-$candidate}
    done
    echo "$found"
}

make_venv() {
    local python uv
    python=$(choose)
    if [ -z "$python" ]; then
        uv=$(command -v uv || command -v "$HOME/.local/bin/uv") ||
            { echo "trainer_install.sh: no Python 3.11 or newer found; install one, or set PYTHON to its path" >&2; exit 1; }
        "$uv" venv --quiet --clear --seed --python 3.12 "$venv"
    elif has_torch "$python"; then
        "$python" -m venv --clear --without-pip --system-site-packages "$venv"
        # If that Python is in a virtual environment, --system-site-packages misses the environment's packages: add their path.
        "$python" -c 'import sys, sysconfig
if sys.prefix != sys.base_prefix: print(sysconfig.get_path("purelib"))' >"$(purelib)/below.pth"
        "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null
    else
        "$python" -m venv --clear "$venv"
    fi
}

purelib() {
    "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

pip() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-cache-dir --progress-bar off "$@"
}

# PyPI's torch is built for CUDA 13, which needs a driver of 580 or newer; an older one gets the build for CUDA 12.6.
torch_index() {
    local driver
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1) || true
    if [ "${driver:-580}" -lt 580 ]; then echo "--extra-index-url=https://download.pytorch.org/whl/cu126"; fi
}

{ "$venv/bin/python" -m pip --version >/dev/null 2>&1 && new_enough "$venv/bin/python"; } || make_venv
read -ra extras <<<"${GPUBROKER_EXTRAS:-}"
[ -z "${GPUBROKER_AGENT_ONLY:-}" ] || extras=(--agent)
requirements=$("$venv/bin/python" "$source/deploy/trainer_requirements.py" "${extras[@]}")
if ! pip --quiet --no-index --requirement /dev/stdin <<<"$requirements" 2>/dev/null; then
    index=
    [ -n "${GPUBROKER_AGENT_ONLY:-}" ] || index=$(torch_index)
    if [ -z "${GPUBROKER_AGENT_ONLY:-}$index" ] && ! has_torch "$venv/bin/python"; then
        # No torch to keep: install all locked packages, with those of the extras, by their reviewed hashes.
        pip --require-hashes --no-deps --requirement "$source/constraints-trainer.txt"
    else
        # The lock has the hashes and CUDA packages of another build of torch, so it only constrains the other versions.
        constraints=$(sed -n 's/^\([A-Za-z0-9][^\\]*\).*/\1/p' "$source/constraints-trainer.txt" |
            grep -v -e '^nvidia-' -e '^cuda-' -e '^triton=')
        pip ${index:+"$index"} --constraint <(echo "$constraints") --requirement /dev/stdin <<<"$requirements"
    fi
fi

# Only the trainer's package: it imports nothing of the broker.
site=$(purelib)
rm -rf "$site/trainer"
cp -R "$source/trainer" "$site/trainer"
if [ -n "${GPUBROKER_AGENT_ONLY:-}" ]; then
    (cd / && "$venv/bin/python" -c 'import trainer.agent.agent; print("agent ready")')
    exit
fi
(cd / && "$venv/bin/python" -c 'import torch, trainer.contract; print("trainer ready: torch", torch.__version__)')
