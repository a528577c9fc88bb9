#!/usr/bin/env bash
# Runs its arguments where they can reach no process, device or mount of this machine's:
#   tests/container/room.sh COMMAND...
# A build in chroot isolation runs the image's package scripts as root over the host's own /dev and processes otherwise.
# That nothing of those can be seen is checked before the command starts. The files stay the host's.
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
[ $$ = 1 ] || { echo "room.sh: the processes of this machine can be seen" >&2; exit 1; }
[ -z "$(find /dev -type b)" ] || { echo "room.sh: the disks of this machine can be seen" >&2; exit 1; }
exec "$@"' room "$@"
