# Says how the attempt on this machine fares: a line with its status and the seconds since `run` began, and the end of its
# log. Run over SSH, by any sh. Nothing is said where none was started.
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
