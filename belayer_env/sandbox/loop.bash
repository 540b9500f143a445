# The persistent shell of a sandbox, bash. Reads "run N" and "ping N" from the req FIFO, sources /belayer/step for
# each run, and answers on the ctl FIFO: "ready PID", "begin N", "end N CODE", "pong N".
#
# A command runs in this very shell, so that cd, variables, functions, traps and jobs stay. Descriptors 8 and 9 are
# closed for it, and what `exec` does to 0, 1 and 2 is undone after it, since they are redirected for the command.
# After each command the state that a successor would need (this shell may be killed) goes to /belayer/state.new;
# the host makes it /belayer/state once it has read the "end".
exec 9<>/belayer/req 8<>/belayer/ctl
if [[ -s /belayer/state ]]; then
    . /belayer/state
    builtin cd -- "$PWD" || builtin cd /
fi

# Signal 41 is the host's "give up this command": from now on every command that is about to run makes the
# function or sourced file around it return, until the step itself has returned. (Bash: extdebug, DEBUG trap with
# status 2.) Loops of builtins end by it too, and the shell keeps its variables and jobs.
__belayer_unwind() {
    builtin local name
    for name in "${FUNCNAME[@]:1}"; do
        [[ $name == source ]] && builtin return 2
    done
    builtin return 0
}
__belayer_give_up() {
    if [[ $__belayer_busy == 1 ]]; then
        __belayer_busy=2
        builtin shopt -s extdebug
        builtin set -T
        builtin trap __belayer_unwind DEBUG
    fi
}
__belayer_status() { builtin return "$1"; }
__belayer_busy=0
__belayer_code=0
builtin trap __belayer_give_up 41
builtin echo "ready $$" >&8
while IFS=' ' builtin read -r __belayer_verb __belayer_n <&9; do
    if [[ $__belayer_verb == ping ]]; then
        builtin echo "pong $__belayer_n" >&8
        builtin continue
    fi
    builtin echo "begin $__belayer_n" >&8
    __belayer_busy=1
    __belayer_status "$__belayer_code"
    . /belayer/step </dev/null >"/belayer/out.$__belayer_n" 2>&1 8>&- 9>&-
    __belayer_code=$?
    if [[ $__belayer_busy == 2 ]]; then
        builtin trap - DEBUG
        builtin shopt -u extdebug
        builtin set +T
    fi
    __belayer_busy=0
    builtin set +e
    { builtin declare -p; builtin declare -f; builtin shopt -p; builtin set +o; builtin umask -p; builtin alias -p; } \
        >/belayer/state.new || builtin exit "$__belayer_code"
    builtin echo "end $__belayer_n $__belayer_code" >&8
done
