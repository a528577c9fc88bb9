# Prepares a rented machine to run the trainer. All parameters are GPUBROKER_* variables. Running it twice is safe.
#
#   GPUBROKER_WAY   image   only checks the machine, which runs the trainer's image
#                   docker  pulls the image onto a plain machine
#                   bundle  installs the trainer for the machine's own PyTorch
set -euo pipefail

home=/srv/gpubroker
venv=/srv/venv

fail() {
    echo "gpubroker-setup: $1" >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

docker_is_up() {
    local try
    for try in 1 2 3 4 5 6 7 8 9 10 11 12; do
        as_root docker info >/dev/null 2>&1 && return
        echo "gpubroker-setup: docker does not answer yet ($try)" >&2
        sleep 5
    done
    fail "docker does not answer; this kind of machine cannot run an image, so leave trainer.image unset for it"
}

pull() {
    login=$(mktemp -d)
    trap 'as_root rm -rf -- "$login"' EXIT
    if [ -n "${GPUBROKER_REGISTRY_USERNAME:-}" ]; then
        printf %s "$GPUBROKER_REGISTRY_PASSWORD" |
            as_root docker --config "$login" login --username "$GPUBROKER_REGISTRY_USERNAME" --password-stdin \
                "$GPUBROKER_REGISTRY_SERVER" >/dev/null ||
            fail "$GPUBROKER_REGISTRY_SERVER refuses the login; check registry_username and GPUBROKER_REGISTRY_PASSWORD"
    fi
    local try
    for try in 1 2 3; do
        as_root docker --config "$login" pull --quiet "$GPUBROKER_IMAGE" && return
        echo "gpubroker-setup: the pull failed ($try of 3)" >&2
    done
    fail "cannot pull $GPUBROKER_IMAGE; check trainer.image, and the registry's login if it is private"
}

# Reads the URL from the environment: it grants access to the store, and other users can read argument lists.
fetch() {
    /usr/bin/env python3 - "$1" <<'PYTHON'
import hashlib, os, shutil, sys, time, urllib.request

url, expected, path = os.environ["GPUBROKER_BUNDLE_URL"], os.environ["GPUBROKER_BUNDLE_SHA256"], sys.argv[1]
problem = ""
for pause in (0, 2, 5, 15):
    time.sleep(pause)
    try:
        with urllib.request.urlopen(url, timeout=60) as answer, open(path, "wb") as file:
            shutil.copyfileobj(answer, file)
    except OSError as e:
        problem = f"cannot fetch the trainer: {getattr(e, 'reason', None) or type(e).__name__}"
        continue
    with open(path, "rb") as file:
        if hashlib.sha256(file.read()).hexdigest() == expected:
            sys.exit(0)
    problem = "the fetched trainer is not the one that was uploaded (sha256)"
sys.exit(f"gpubroker-setup: {problem}")
PYTHON
}

# Installs uv if the machine's Python is too old for the trainer. After a failure trainer_install.sh reports what is missing.
get_uv() {
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return
    [ -x "$HOME/.local/bin/uv" ] || curl -LsSf https://astral.sh/uv/install.sh | env UV_INSTALL_DIR="$HOME/.local/bin" sh ||
        echo "gpubroker-setup: uv cannot be fetched" >&2
}

install_bundle() {
    local folder=$home/$GPUBROKER_BUNDLE_SHA256
    [ -e "$folder/.installed" ] && return
    as_root install -d -m 755 -o "$(id -u)" -g "$(id -g)" "$home" "$venv"
    rm -rf -- "$folder"
    mkdir "$folder"
    fetch "$folder/bundle.tar"
    tar -xf "$folder/bundle.tar" -C "$folder" --no-same-owner
    get_uv
    bash "$folder/deploy/trainer_install.sh" "$venv" || fail "the trainer cannot be installed; see the lines above"
    touch "$folder/.installed"
}

# An upgrade of docker, or of the GPU's driver, would end the trainer.
as_root systemctl disable --now unattended-upgrades apt-daily-upgrade.timer >/dev/null 2>&1 || true

case $GPUBROKER_WAY in
    image) [ -x "$venv/bin/python" ] || fail "no trainer in this image; build it with \`make image\`" ;;
    docker) docker_is_up && pull ;;
    bundle) install_bundle ;;
    *) fail "GPUBROKER_WAY $GPUBROKER_WAY is not known" ;;
esac
