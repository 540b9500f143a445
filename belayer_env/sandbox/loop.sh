# The persistent shell of a sandbox whose image has no bash; the protocol is that of loop.bash. POSIX sh, builtins
# only. `command .` keeps a syntax error or a failing special builtin from ending the shell.
# There is no way to give up a command from within: at a time-out the host kills this shell, and its successor
# starts from /belayer/state (variables and cwd, no functions).
__belayer_ran=0
__belayer_pid=0
if [ -s /belayer/state ]; then
    command . /belayer/state
    command cd "$PWD" || command cd /
fi
__belayer_code=0
__belayer_status() { return "$1"; }
command echo "ready $$" >/belayer/ctl
while IFS=' ' command read -r __belayer_verb __belayer_n <>/belayer/req; do
    if command [ "$__belayer_verb" = ping ]; then
        IFS='' command read -r __belayer_pid </proc/sys/kernel/ns_last_pid || __belayer_pid=0
        command echo "pong $__belayer_n $$ $__belayer_ran $__belayer_pid" >/belayer/ctl
        continue
    fi
    command [ "$__belayer_verb" = run ] && command [ -p "/belayer/out.$__belayer_n" ] || continue
    command echo "begin $__belayer_n $__belayer_ran" >/belayer/ctl
    __belayer_status "$__belayer_code"
    command . /belayer/step </dev/null >"/belayer/out.$__belayer_n" 2>&1
    __belayer_code=$?
    __belayer_ran=$__belayer_n
    set +e
    { set; export -p; } >/belayer/state.new || exit "$__belayer_code"
    command echo "end $__belayer_n $__belayer_code" >/belayer/ctl
done
