# Prints a line with the attempt's status and the seconds since `run` began, then the end of its log. Runs over SSH in any
# sh. Prints nothing if no attempt was started on this machine.
cd ~/.gpubroker 2>/dev/null && [ -d started ] || exit 0
status=SETTING_UP ran_s=0 code=
[ -e running ] && status=RUNNING ran_s=$(($(date +%s) - $(stat -c %Y running)))
[ -e code ] && code=$(cat code)
case $code:$status in
    :*) ;;
    0:*) status=SUCCEEDED ;;
    *:RUNNING) status=FAILED ;;
    *) status=FAILED_SETUP ;;
esac
echo "$status $ran_s"
tail -c 16384 log
