# Runs the trainer of one attempt. Constant: what varies comes in GPUBROKER_* and SkyPilot's variables.
#
# How the attempt ended is in final.json: SkyPilot only hears of a trainer that could not run, or was killed. It ends
# all machines of a job as soon as one fails, and the first is still writing then.
set -uo pipefail

work=/var/tmp/gpubroker
venv=/srv/venv
case $0 in /tmp/sky_*) rm -f -- "$0" ;; esac # SkyPilot wrote the secrets into this file

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# The trainer runs the user's program, so it is not root, and not SkyPilot's own user, who may become root.
folders() {
    as_root install -d -m 700 -o "$1" -g "$1" "$work" "$work/home" "$work/attempt"
}

# The variables that the trainer is given, one a line; values hold no line break.
given() {
    env | grep -e '^GPUBROKER_' -e '^HOME=' -e '^HF_HOME=' -e '^USER=' -e '^LOGNAME=' |
        grep -v -e '^GPUBROKER_REGISTRY_' -e '^GPUBROKER_BUNDLE_'
}

run_docker() {
    folders 1000
    local rdma=()
    [ -e /dev/infiniband ] && rdma=(--device /dev/infiniband)
    as_root docker rm --force gpubroker-trainer >/dev/null 2>&1
    # The variables go through a pipe: they are in no argument list and in no file.
    given | as_root docker run --rm --name gpubroker-trainer --pull never --gpus all --ipc host --network host \
        --ulimit memlock=-1 --ulimit stack=67108864 --security-opt no-new-privileges --stop-timeout 120 \
        "${rdma[@]}" --user 1000:1000 --volume "$work:$work" --workdir "$work" --env-file /dev/stdin \
        "$GPUBROKER_IMAGE" "$venv/bin/python" -m trainer
}

run_here() {
    local uid=1000 names
    [ "$(id -u)" = 0 ] || uid=10001
    folders "$uid"
    cd / || return
    local drop=(setpriv --reuid "$uid" --regid "$uid" --clear-groups --no-new-privs)
    local trainer=(env --chdir="$work" "$venv/bin/python" -m trainer)
    if [ "$(id -u)" = 0 ]; then
        "${drop[@]}" "${trainer[@]}"
    else
        names=$(compgen -e | grep -e '^GPUBROKER_' -e '^HF_HOME$' -e '^HOME$' -e '^USER$' -e '^LOGNAME$' | paste -sd,)
        sudo -n --preserve-env="$names" "${drop[@]}" "${trainer[@]}"
    fi
}

# A machine that nobody destroys any more ends itself where its cloud then ends the bill.
stop_self() {
    [ "${GPUBROKER_SELF_STOP:-}" = os_shutdown ] || return
    sleep "${GPUBROKER_SELF_STOP_S:-1800}"
    echo "gpubroker-run: nobody has destroyed this machine; it shuts itself down" >&2
    as_root shutdown -h now
}

export GPUBROKER_NODE=${SKYPILOT_NODE_RANK:-0}
GPUBROKER_MASTER=$(head -n 1 <<<"${SKYPILOT_NODE_IPS:-127.0.0.1}"):29400
export GPUBROKER_MASTER GPUBROKER_WORKDIR=$work/attempt
export HOME=$work/home HF_HOME=$work/home/huggingface USER=gpubroker LOGNAME=gpubroker
# Keys of the registry, of the bundle, and those that the clouds themselves lay into their containers.
unset GPUBROKER_REGISTRY_PASSWORD GPUBROKER_BUNDLE_URL RUNPOD_API_KEY CONTAINER_API_KEY "${!SKYPILOT_DOCKER_@}"

code=0
if [ "$GPUBROKER_WAY" = docker ]; then run_docker; else run_here; fi || code=$?
echo "gpubroker-run: the trainer ended with $code"
stop_self
case $code in
    0 | 64 | 65 | 70 | 71 | 75) exit 0 ;;
    *) exit "$code" ;;
esac
