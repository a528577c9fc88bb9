# Sets the machine up and runs the trainer in the background. Further calls do nothing, because a caller whose connection
# broke calls again. Reads its parameters from the file `env` in its own folder, removes that file, and writes `log` there.
cd "$(dirname "$0")" || exit
if [ "${1:-}" != attempt ]; then
    mkdir started 2>/dev/null || exit 0
    exec setsid --fork bash --login "$PWD/start.sh" attempt </dev/null >log 2>&1
fi
set -a
. ./env
set +a
rm -f env
umask 022
ulimit -Sn 1048576 2>/dev/null || ulimit -Sn "$(ulimit -Hn)"
bash setup.sh && : >running && bash run.sh
echo $? >code.new && mv code.new code
