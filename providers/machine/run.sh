# Runs the trainer of one attempt. All parameters are GPUBROKER_* and SKYPILOT_* variables.
#
# final.json contains the attempt's result. The exit code only shows a trainer that could not run or was killed.
set -uo pipefail

work=/var/tmp/gpubroker
venv=/srv/venv

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# The trainer runs the user's program, so it must not run as root, nor as SkyPilot's user, who may become root.
folders() {
    as_root install -d -m 700 -o "$1" -g "$1" "$work" "$work/home" "$work/attempt"
}

# World-readable files into which SkyPilot or an image copies the container's environment, which contains the cloud's key
# for this machine. Without read access for others, the user's program cannot read the key, since it is not root.
copies=(/etc/profile.d/container_env_var.sh /etc/environment /etc/rp_environment)
close_copies() {
    local file
    for file in "${copies[@]}"; do
        [ ! -e "$file" ] || as_root chmod go= "$file" || return
    done
}

# Prints the trainer's variables, one per line; values contain no line break.
trainer_env() {
    env | grep -e '^GPUBROKER_' -e '^HOME=' -e '^HF_HOME=' -e '^USER=' -e '^LOGNAME=' |
        grep -v -e '^GPUBROKER_REGISTRY_' -e '^GPUBROKER_BUNDLE_'
}

run_docker() {
    folders 1000
    local rdma=()
    [ -e /dev/infiniband ] && rdma=(--device /dev/infiniband)
    as_root docker rm --force gpubroker-trainer >/dev/null 2>&1
    # The variables travel through a pipe, so that they appear in no argument list and in no file.
    trainer_env | as_root docker run --rm --name gpubroker-trainer --pull never --gpus all --ipc host --network host \
        --ulimit memlock=-1 --ulimit stack=67108864 --security-opt no-new-privileges --stop-timeout 120 \
        "${rdma[@]}" --user 1000:1000 --volume "$work:$work" --workdir "$work" --env-file /dev/stdin \
        "$GPUBROKER_IMAGE" "$venv/bin/python" -m trainer
}

run_here() {
    local uid=1000 names
    [ "$(id -u)" = 0 ] || uid=10001
    folders "$uid"
    close_copies || return
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

# Prints a variable that the cloud set in the container. An SSH session may lack it, but process 1 has it.
cloud_variable() {
    local value=${!1:-}
    [ -n "$value" ] || value=$(as_root cat /proc/1/environ "${copies[@]}" 2>/dev/null | tr '\0' '\n' |
        sed -n "s/^\(declare -x \|export \)\?$1=//p" | head -n 1 | tr -d "\"'")
    printf %s "$value"
}

# Ends this machine through its cloud's API, with the key that the cloud created for this machine alone.
# The key travels in the environment, because other users can read argument lists. -I prevents imports of user code.
end_by_key() {
    local cloud=runpod id key
    id=$(cloud_variable RUNPOD_POD_ID) key=$(cloud_variable RUNPOD_API_KEY)
    [ -n "$id" ] || { cloud=vast id=$(cloud_variable CONTAINER_ID) key=$(cloud_variable CONTAINER_API_KEY); }
    if [ -z "$id" ] || [ -z "$key" ]; then
        echo "gpubroker-run: the cloud has set no key on this machine; destroy it by \`gpubroker sweep\`" >&2
        return 1
    fi
    cd / || return
    CLOUD=$cloud ID=$id KEY=$key "$(command -v python3 || echo "$venv/bin/python")" -I - <<'PYTHON'
import json, os, sys, time, urllib.parse, urllib.request

cloud, machine, key = os.environ["CLOUD"], os.environ["ID"], os.environ["KEY"]
quoted = urllib.parse.quote(machine, safe="")
if cloud == "runpod":
    # REST v2 first; GraphQL ends in early 2027. Unknown: whether REST v2 takes a pod's own key.
    query = "mutation { podTerminate(input: { podId: %s }) }" % json.dumps(machine)
    base = "https://api.runpod.io"
    ways = [("DELETE", "/v2/pods/" + quoted, None), ("POST", "/graphql", {"query": query})]
else:
    base, ways = "https://console.vast.ai", [("DELETE", "/api/v0/instances/%s/" % quoted, {})]
base = (os.environ.get("GPUBROKER_SELF_STOP_URL") or base).rstrip("/")
for pause, (method, path, body) in ((p, way) for p in (0, 10, 60, 300, *[600] * 140) for way in ways):
    time.sleep(pause if (method, path, body) == ways[0] else 0)
    request = urllib.request.Request(base + path, None if body is None else json.dumps(body).encode(), method=method)
    request.add_header("Content-Type", "application/json")
    request.add_header("User-Agent", "gpubroker")
    request.add_unredirected_header("Authorization", "Bearer " + key)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.loads(response.read() or b"null")
        if body is None:
            done = response.status == 204
        elif cloud == "runpod":
            done = "data" in answer and not answer.get("errors")
        else:
            done = answer.get("success") is True
        problem = "it answered " + json.dumps(answer)[:200].replace(key, "...")
    except Exception as e:
        done, problem = False, "%s %s" % (type(e).__name__, getattr(e, "code", ""))
    if done:
        sys.exit(0)
    print("gpubroker-run: %s does not end this machine: %s" % (cloud, problem.rstrip()), file=sys.stderr, flush=True)
sys.exit("gpubroker-run: this machine cannot end itself; destroy it by `gpubroker sweep`")
PYTHON
}

# Dead-man's switch: ends the machine if no broker destroys it, on clouds where this ends the billing.
stop_self() {
    case ${GPUBROKER_SELF_STOP:-} in os_shutdown | instance_key) ;; *) return ;; esac
    sleep "${GPUBROKER_SELF_STOP_S:-1800}"
    echo "gpubroker-run: no broker has destroyed this machine; it ends itself" >&2
    if [ "$GPUBROKER_SELF_STOP" = os_shutdown ]; then as_root shutdown -h now; else end_by_key; fi
}

export GPUBROKER_NODE=${SKYPILOT_NODE_RANK:-0}
GPUBROKER_MASTER=$(head -n 1 <<<"${SKYPILOT_NODE_IPS:-127.0.0.1}"):29400
export GPUBROKER_MASTER GPUBROKER_WORKDIR=$work/attempt
export HOME=$work/home HF_HOME=$work/home/huggingface USER=gpubroker LOGNAME=gpubroker
# Remove the keys of the registry and of the bundle. The clouds' keys for this machine stay in this shell alone.
unset GPUBROKER_REGISTRY_PASSWORD GPUBROKER_BUNDLE_URL "${!SKYPILOT_DOCKER_@}"
export -n RUNPOD_API_KEY CONTAINER_API_KEY

code=0
if [ "$GPUBROKER_WAY" = docker ]; then run_docker; else run_here; fi || code=$?
echo "gpubroker-run: the trainer ended with $code"
stop_self
case $code in
    0 | 64 | 65 | 70 | 71 | 75) exit 0 ;;
    *) exit "$code" ;;
esac
