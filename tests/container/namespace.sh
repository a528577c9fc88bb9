#!/usr/bin/env bash
# Runs COMMAND in new namespaces, in which no process, disk or mount of the host is reachable:
#   tests/container/namespace.sh COMMAND...
# Without namespaces, a build in chroot isolation runs the image's package scripts as root on the host's /dev and processes.
# The script checks the separation before the command starts. The host's files remain visible.
set -euo pipefail

exec unshare --mount --pid --fork --kill-child --mount-proc --uts --ipc --propagation private bash -euc '
mount -t tmpfs -o mode=755,nosuid tmpfs /mnt
for device in null zero full random urandom tty; do
    touch "/mnt/$device"
    mount --bind "/dev/$device" "/mnt/$device"
done
mkdir /mnt/pts /mnt/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts /mnt/pts
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs /mnt/shm
ln -s pts/ptmx /mnt/ptmx
ln -s /proc/self/fd /mnt/fd
ln -s /proc/self/fd/0 /mnt/stdin
ln -s /proc/self/fd/1 /mnt/stdout
ln -s /proc/self/fd/2 /mnt/stderr
mount --move /mnt /dev
[ $$ = 1 ] || { echo "namespace.sh: the processes of the host are visible" >&2; exit 1; }
[ -z "$(find /dev -type b)" ] || { echo "namespace.sh: the disks of the host are visible" >&2; exit 1; }
exec "$@"' namespace "$@"
