#!/usr/bin/env bash
# Builds the trainer's image and pushes it, with the first installed of podman, docker and buildah.
#   deploy/image.sh [REGISTRY/NAME[:TAG]]      without a name the image is only built, and no cloud can pull it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=${1:-}
local_name=${name:-gpubroker-trainer}
for engine in podman docker buildah none; do
    command -v "$engine" >/dev/null && break
done
if [ "$engine" = none ]; then
    echo "image.sh: needs podman, docker or buildah; install one, or leave trainer.image unset (docs/guide/images-and-storage.md)" >&2
    exit 1
fi

"$engine" build --file deploy/Containerfile.trainer --tag "$local_name" .
if [ -z "$name" ]; then
    echo "built $local_name; \`make image IMAGE=registry/name\` pushes it and prints its digest"
    exit
fi

digest_file=$(mktemp)
trap 'rm -f "$digest_file"' EXIT
repository=$name
[[ ${name##*/} == *:* ]] && repository=${name%:*}
case $engine in
    podman) podman push --digestfile "$digest_file" "$name" ;;
    buildah) buildah push --digestfile "$digest_file" "$name" "docker://$name" ;;
    docker)
        docker push "$name"
        docker image inspect --format '{{join .RepoDigests "\n"}}' "$name" | sed -nE "s|^(.*/)?${repository##*/}@||p" >"$digest_file"
        ;;
esac
digest=$(head -n 1 "$digest_file")
[[ $digest == sha256:* ]] || { echo "image.sh: $engine did not report the digest of $name" >&2; exit 1; }
printf 'For gpubroker.yaml:\ntrainer:\n  image: %s@%s\n' "$repository" "$digest"
