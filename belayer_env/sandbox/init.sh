# PID 1 of a sandbox: keeps one shell running and tells the host, on the ctl FIFO, how each one ended.
# POSIX sh, builtins only. The shell runs in the foreground: a job put in the background by a non-interactive sh
# starts with SIGINT and SIGQUIT ignored, and so would everything the agent runs. While sh waits for it, it reaps
# whatever else was re-parented to it.
exec </dev/null >/dev/null 2>&1
# A sh that cannot fork, as every pid is taken, gives up; and with it would go the sandbox. It starts over instead.
trap 'exec /bin/sh /belayer/init.sh' EXIT
exec 8<>/belayer/ctl
cd "$BELAYER_WORKDIR" || cd /
if command -v bash; then
    while :; do
        bash --noprofile --norc /belayer/loop.bash 8>&-
        echo "exit $?" >&8
    done
else
    while :; do
        sh /belayer/loop.sh 8>&-
        echo "exit $?" >&8
    done
fi
