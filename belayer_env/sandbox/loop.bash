# The persistent shell of a sandbox, bash. Reads "run N" and "ping N" from the req FIFO, sources /belayer/step for
# each run, and answers on the ctl FIFO: "ready PID", "begin N LAST", "end N CODE", "pong N PID LAST NEWEST"; LAST
# is the run that it has ended last, 0 at first: the host compares, and so knows that nothing ran in between. NEWEST
# is the pid given out last, where a restored sandbox goes on counting.
#
# A command runs in this very shell, so that cd, variables, functions, traps and jobs stay. The FIFOs are opened anew
# for each message, so the descriptors from 3 on are the command's to keep (`exec 9>lock; flock 9`), but for 10 to 12,
# where bash keeps 0, 1 and 2 meanwhile: what `exec` does to those is undone after the command.
# After each command the state that a successor would need (this shell may be killed) goes to /belayer/state.new;
# the host makes it /belayer/state once it has read the "end".

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
__belayer_ran=0
__belayer_pid=0
# One group, read as a whole before the state brings the command's aliases back.
{
if [[ -s /belayer/state ]]; then
    . /belayer/state
    builtin cd -- "$PWD" || builtin cd /
fi
builtin trap __belayer_give_up 41
# Bash sends itself the SIGINT that a $(command) died of, which must not end the shell. Children get the default back.
# A blank, not a command: the unwinding would jump out of the trap, and bash then believes itself in it for ever.
builtin trap ' ' INT
builtin echo "ready $$" >/belayer/ctl
while IFS=' ' builtin read -r __belayer_verb __belayer_n <>/belayer/req; do
    if [[ $__belayer_verb == ping ]]; then
        IFS='' builtin read -r __belayer_pid </proc/sys/kernel/ns_last_pid || __belayer_pid=0
        builtin echo "pong $__belayer_n $$ $__belayer_ran $__belayer_pid" >/belayer/ctl
        builtin continue
    fi
    # A run has its output FIFO, made by the host; what else the sandbox may have written into req has none.
    [[ $__belayer_verb == run && -p /belayer/out.$__belayer_n ]] || builtin continue
    builtin echo "begin $__belayer_n $__belayer_ran" >/belayer/ctl
    __belayer_busy=1
    __belayer_status "$__belayer_code"
    . /belayer/step </dev/null >"/belayer/out.$__belayer_n" 2>&1
    __belayer_code=$?
    # The command may have taken even `builtin` away (a function, `enable -n`). What still ends a shell then is a
    # failing expansion; the successor starts from the state before this command.
    __belayer_sane=
    builtin printf -v __belayer_sane yes
    [[ $__belayer_sane == yes ]] || : "${__belayer_no_builtins_left:?}"
    if [[ $__belayer_busy == 2 ]]; then
        builtin trap - DEBUG
        builtin shopt -u extdebug
        builtin set +T
    fi
    __belayer_busy=0
    __belayer_ran=$__belayer_n
    builtin set +e
    # Options that functions are parsed by come before them, aliases after them.
    { builtin declare -p; builtin shopt -p; builtin umask -p; builtin declare -f; builtin set +o; builtin alias -p
      # The rest is for the host, which compares: no successor takes it up.
      builtin echo "builtin return 0"; builtin trap -p; builtin dirs -l -p; builtin enable -n; builtin complete -p
      builtin printf "%q\n" "${!-}" "$@"; } \
        >/belayer/state.new || builtin exit "$__belayer_code"
    builtin echo "end $__belayer_n $__belayer_code" >/belayer/ctl || : "${__belayer_no_builtins_left:?}"
done
}
