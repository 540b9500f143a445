"""The persistent shell, in real sandboxes of every runtime: what agents type, by mistake and on purpose."""

from __future__ import annotations

import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from belayer_env.errors import InvalidInput, NotText, SandboxHung
from belayer_env.sandbox.base import Sandbox
from belayer_env.sandbox.cgroup import Cgroup
from belayer_env.spec import MIB, ExecResult
from tests.sandboxes import Sandboxes

PROMPT_S = 5.0
"""Far above what a command that does nothing needs, far below any time limit of these tests."""


def quick(sandbox: Sandbox, command: str) -> ExecResult:
    """Run what must not wait for anything."""
    done = sandbox.run(command)
    assert not done.timed_out, f"{command!r} timed out with {done.output!r}"
    assert done.duration_s < PROMPT_S
    return done


def answers(sandbox: Sandbox) -> None:
    done = quick(sandbox, "echo ok")
    assert (done.output, done.exit_code) == ("ok\n", 0)


# -- what stays between steps


@pytest.fixture
def settled(shell: Sandbox) -> Sandbox:
    """A shell with something to lose: variables, functions, a working directory, a background job."""
    settle(shell)
    return shell


def settle(sandbox: Sandbox) -> None:
    quick(sandbox, "trap ' ' INT; trap - TERM; pkill sleep; wait; jobs >/dev/null")
    done = quick(
        sandbox,
        "cd /srv; V=3; export W=4; A=(a 'b c'); f() { echo fn$V; }; sleep 4321 & "
        "until pgrep -fx 'sleep 4321' >/dev/null; do :; done",
    )
    assert done.exit_code == 0, done.output


def still_settled(sandbox: Sandbox) -> None:
    done = quick(sandbox, 'pwd; echo $V; printenv W; echo "${A[1]}"; f; jobs; pgrep -fc "^sleep 4321"')
    lines = done.output.splitlines()
    assert lines[:5] == ["/srv", "3", "4", "b c", "fn3"]
    assert "Running" in lines[5]
    assert "sleep 4321" in lines[5]
    assert lines[6:] == ["1"]


def test_cwd_variables_functions_and_jobs_live_on(settled: Sandbox) -> None:
    still_settled(settled)


def test_status_of_the_last_step_is_there_in_the_next(shell: Sandbox) -> None:
    assert quick(shell, "(exit 9)").exit_code == 9
    assert quick(shell, "echo $?").output == "9\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [("true", 0), ("false", 1), ("no-such-command", 127), ("/etc/passwd", 126), ("sh -c 'kill -9 $$'", 137)],
)
def test_exit_code_is_the_commands_own(shell: Sandbox, command: str, code: int) -> None:
    assert quick(shell, command).exit_code == code


def test_return_ends_the_step_with_its_code_and_keeps_the_shell(shell: Sandbox) -> None:
    done = quick(shell, "echo before; return 3; echo after")
    assert (done.output, done.exit_code, done.shell_restarted) == ("before\n", 3, False)


@pytest.mark.parametrize("number", [3, 5, 8, 9, 13, 99, 200])  # bash keeps its own at 10 to 12
def test_descriptor_that_exec_opens_stays_open(shell: Sandbox, number: int) -> None:
    quick(shell, f"exec {number}>/tmp/lock{number}; flock {number}")
    assert quick(shell, f"flock -n /tmp/lock{number} true || echo held").output == "held\n"
    quick(shell, f"exec {number}>&-")
    assert quick(shell, f"flock -n /tmp/lock{number} echo free").output == "free\n"


def test_command_inherits_no_descriptor_of_ours(shell: Sandbox) -> None:
    # 3 is the directory that ls itself has open.
    assert quick(shell, "ls /proc/self/fd").output.split() == ["0", "1", "2", "3"]
    assert quick(shell, "sh -c 'ls /proc/$$/fd'").output.split() == ["0", "1", "2"]


def test_set_x_shows_the_command_alone(shell: Sandbox) -> None:
    try:
        quick(shell, "set -x")
        output = quick(shell, "echo traced").output
    finally:
        quick(shell, "set +x")
    assert output == "++ echo traced\ntraced\n"


# -- time limits


@pytest.mark.parametrize(
    "endless",
    [
        pytest.param("sleep 999", id="one external command"),
        pytest.param("while :; do /bin/true; done", id="loop of externals"),
        pytest.param("while :; do :; done", id="loop of builtins"),
        pytest.param("g() { while :; do h; done; }; h() { for i in 1 2 3; do :; done; }; g", id="functions"),
        pytest.param("wait", id="wait"),
        pytest.param("X=$(while :; do :; done); echo not reached", id="substitution of builtins"),
        pytest.param("X=$(sleep 999); echo not reached; sleep 999", id="substitution of externals"),
        pytest.param("yes | cat >/dev/null", id="pipeline"),
        pytest.param("( while :; do :; done )", id="subshell"),
        pytest.param("{ while :; do :; done; } | cat", id="loop in a pipeline"),
        pytest.param("while :; do sleep .1; done & wait $!", id="wait for an endless job"),
        pytest.param("trap '' INT TERM; while :; do :; done", id="trapped loop"),
        pytest.param("trap '' INT TERM; sleep 999", id="trapped external"),
        pytest.param("setsid python3 -c 'while 1: pass'", id="other session"),
        pytest.param(
            "python3 -c 'import signal as s, time; s.signal(2, s.SIG_IGN); time.sleep(999)'",
            id="ignores the interrupt",
        ),
        pytest.param("mkfifo /tmp/nobody$$ && cat /tmp/nobody$$; rm -f /tmp/nobody$$", id="open of a FIFO"),
        pytest.param("eval 'while :; do eval :; done'", id="eval"),
        pytest.param("source /dev/stdin <<< 'while :; do :; done'", id="source"),
        pytest.param("until false; do true; done; echo not reached; while :; do :; done", id="two loops"),
        pytest.param("sleep 999; sleep 999; sleep 999", id="one after the other"),
    ],
)
def test_time_limit_ends_the_command_and_nothing_else(settled: Sandbox, endless: str) -> None:
    done = settled.run(endless, timeout_s=0.5)
    assert (done.timed_out, done.exit_code, done.shell_restarted) == (True, 124, False)
    assert "not reached" not in done.output
    assert done.duration_s < 0.5 + PROMPT_S
    quick(settled, "trap ' ' INT; trap - TERM; kill %2 2>/dev/null && wait %2; jobs >/dev/null")
    still_settled(settled)
    until = time.monotonic() + PROMPT_S
    # init, the shell, the job, ps itself; the killed ones may take a moment to go
    while quick(settled, "ps -e -o comm=").output.split() != ["sh", "bash", "sleep", "ps"]:
        assert time.monotonic() < until


def test_time_limit_keeps_what_was_printed(settled: Sandbox) -> None:
    """Case B06."""
    looping = (
        "for i in 1 2 3; do echo part$i; sleep .1; done; trap '' TERM INT; setsid python3 -c 'while 1: pass'"
    )
    done = settled.run(looping, timeout_s=1.5)
    assert done.timed_out
    assert done.output.startswith("part1\npart2\npart3\n")
    quick(settled, "trap - TERM INT")
    assert quick(settled, "pgrep -fc 'while [1]'").output == "0\n"
    still_settled(settled)


def test_job_started_by_the_command_that_timed_out_lives_on(shell: Sandbox) -> None:
    done = shell.run("sleep 5432 & echo $!; sleep 999", timeout_s=0.5)
    assert done.timed_out
    assert quick(shell, f"kill {done.output}").exit_code == 0


def test_interrupted_program_may_clean_up(shell: Sandbox) -> None:
    """SIGINT comes first, and the grace is for using it."""
    program = (
        "python3 -c \"import time\ntry: time.sleep(999)\nexcept KeyboardInterrupt: print('cleaned up')\""
    )
    done = shell.run(program, timeout_s=0.5)
    assert (done.timed_out, done.output) == (True, "cleaned up\n")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("set -n", id="runs nothing any more"),
        pytest.param("mkfifo /tmp/nobody; echo x >/tmp/nobody", id="the shell itself waits in open"),
        pytest.param("read x </dev/zero", id="one builtin without end, which no signal interrupts"),
        pytest.param("__belayer_n=8", id="answers another question"),
        pytest.param("trap - INT; X=$(sleep 999)", id="dies with its child, without the trap that we set"),
        pytest.param("trap '' 41; while :; do :; done", id="ignores our signal"),
    ],
)
def test_shell_that_cannot_be_interrupted_is_replaced_at_the_time_limit(
    settled: Sandbox, command: str
) -> None:
    done = settled.run(command, timeout_s=0.5)
    assert (done.timed_out, done.exit_code, done.shell_restarted) == (True, 124, True)
    assert quick(settled, "pwd; echo $V; f; pgrep -fc 'sleep 4321'").output == "/srv\n3\nfn3\n1\n"


def test_time_limit_ends_the_command_of_a_restored_shell_too(sandboxes: Sandboxes) -> None:
    original = sandboxes.create()
    quick(original, "V=3; sleep 4321 &")
    sandbox = sandboxes.reborn(original)
    done = sandbox.run("echo part; sleep 999", timeout_s=0.5)
    assert (done.output, done.timed_out, done.shell_restarted) == ("part\n", True, False)
    assert quick(sandbox, "echo $V; pgrep -fc 'sleep 999'; pgrep -fc 'sleep [4]321'").output == "3\n0\n1\n"
    with pytest.raises(SandboxHung):
        sandbox.run("kill -STOP $$", timeout_s=0.5)


# -- the shell is stopped by somebody


def test_shell_stopped_between_steps_is_hung_and_the_command_has_not_begun(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    quick(sandbox, "(sleep .1; kill -STOP $$) & sleep 900 &")
    init = psutil.Process(sandbox.init_pid)  # type: ignore[attr-defined]  # of real sandboxes alone
    while not any(child.status() == psutil.STATUS_STOPPED for child in init.children()):
        time.sleep(0.01)
    started = time.monotonic()
    with pytest.raises(SandboxHung) as fault:
        sandbox.run("touch /root/ran")
    assert not fault.value.begun
    assert time.monotonic() - started < PROMPT_S
    assert sandbox.is_alive()


def test_shell_stopped_in_mid_command_is_hung_and_not_timed_out(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    with pytest.raises(SandboxHung) as fault:
        sandbox.run("kill -STOP $$", timeout_s=1)
    assert fault.value.begun


def test_shell_stopped_for_a_moment_goes_on(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    assert quick(sandbox, "(sleep .3; kill -CONT $$) & kill -STOP $$; echo on").output == "on\n"


# -- the shell ends or is replaced (case B05)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 7", 7),
        ("exit", 1),
        ("exec true", 0),
        ("exec false", 1),
        ("exec sh -c 'exit 4'", 4),
        ("exec no-such-program", 127),
        ("set -e; false", 1),
        ("set -eu; echo $NOT_SET", 1),
        ("set -u; echo $NOT_SET", 1),
        (": ${NOT_SET:?gone}", 1),
        ("ulimit -n 3", 0),
        ("kill -9 $$", 137),
        ("kill -ABRT $$", 134),
        ("sh -c 'kill $PPID'", 143),
        ("trap 'echo bye' EXIT; exit 5", 5),
        ("builtin() { :; }", 1),
        ("enable -n echo", 1),
        ("enable -n builtin", 1),
    ],
)
def test_ended_shell_is_replaced_in_the_same_sandbox(settled: Sandbox, command: str, code: int) -> None:
    quick(settled, "touch /tmp/file; (exit 1)")
    done = quick(settled, command)
    assert (done.exit_code, done.shell_restarted) == (code, True)
    done = quick(settled, "echo ok; pwd; echo $V $W; f; ls /tmp/file; pgrep -fc '^sleep 4321'")
    assert done.output == "ok\n/srv\n3 4\nfn3\n/tmp/file\n1\n"
    assert not done.shell_restarted


@pytest.mark.parametrize(
    "command",
    [
        "exec 1>&- 2>&-",
        "exec </dev/null",
        "exec <&-",
        "exec >/dev/null",
        "exec 2>/tmp/log",
        "exec 3>&1 1>&2",
        "exec <&- >&- 2>&-",
        "exec",
        "command exec >/dev/null",
        "exec >&5",
        "exec <no-such-file",
    ],
)
def test_what_exec_does_to_stdio_lasts_until_the_step_ends(shell: Sandbox, command: str) -> None:
    assert not quick(shell, command).shell_restarted
    done = quick(shell, "echo out; echo err >&2; cat")
    assert (done.output, done.exit_code, done.shell_restarted) == ("out\nerr\n", 0, False)


def test_replaced_shell_keeps_options_aliases_and_umask(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    quick(
        sandbox,
        "shopt -s extglob; set -o pipefail; umask 027; alias hi='echo hello'; declare -A M=([k]='v w')",
    )
    quick(sandbox, "declare -i N=5; readonly R=6; declare -n REF=N; ML=$'two\\nlines'")
    assert quick(sandbox, "kill -9 $$").shell_restarted
    done = quick(
        sandbox,
        'shopt extglob; set -o | grep pipefail; umask; alias hi; echo "${M[k]} $N $R $REF"; echo "$ML"',
    )
    assert done.output.split("\n") == [
        "extglob        \ton",
        "pipefail       \ton",
        "0027",
        "alias hi='echo hello'",
        "v w 5 6 5",
        "two",
        "lines",
        "",
    ]


def test_shell_replaced_in_a_removed_directory_answers(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    quick(sandbox, "mkdir /tmp/d; cd /tmp/d; rmdir /tmp/d; K=1")
    assert quick(sandbox, "exit 1").shell_restarted
    assert quick(sandbox, "pwd; echo $K").output == "/\n1\n"


def test_shell_killed_between_steps_is_reported_with_the_next(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    quick(sandbox, "K=1; (sleep .3; kill -9 $$) &")
    time.sleep(0.6)
    done = quick(sandbox, "echo $K")
    assert (done.output, done.shell_restarted) == ("1\n", True)
    assert not quick(sandbox, "true").shell_restarted


def test_everything_killed_from_within_but_init(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    quick(sandbox, "cd /tmp; K=1; sleep 987 &")
    done = quick(sandbox, "kill -9 -1; kill -9 $$")
    assert done.shell_restarted
    assert done.exit_code == 137
    assert quick(sandbox, "pwd; echo $K; pgrep -c sleep").output == "/tmp\n1\n0\n"


def test_init_ignores_signals_from_within(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    done = quick(sandbox, "kill 1; kill -9 1; kill -INT 1; kill -HUP 1; kill -STOP 1; echo alive")
    assert (done.output, done.shell_restarted) == ("alive\n", False)
    assert sandbox.is_alive()


# -- what a command can do to the shell's own workings


@pytest.mark.parametrize(
    "name",
    [
        "read",
        "echo",
        "trap",
        "declare",
        "cd",
        "set",
        "exec",
        "exit",
        "shopt",
        "printf",
        "source",
        "return",
        "unset",
        "eval",
        "test",
        "local",
        "umask",
        "alias",
        "command",
        "[",
        "wait",
    ],
)
def test_function_named_after_a_builtin_harms_nothing(sandboxes_shell: Sandbox, name: str) -> None:
    shell = sandboxes_shell
    assert not quick(shell, f"K=1; function {name} {{ builtin echo mine; }}; {name} >/tmp/o").shell_restarted
    assert not quick(shell, "builtin echo $K").shell_restarted
    assert quick(shell, f"builtin unset -f {name}; builtin echo ok").output == "ok\n"
    # The successor of a shell with such a function stands too.
    quick(shell, f"function {name} {{ builtin echo mine; }}")
    assert quick(shell, "builtin kill -9 $$").shell_restarted
    assert quick(shell, f"builtin unset -f {name}; builtin echo $K").output == "1\n"


@pytest.fixture(scope="module")
def sandboxes_shell(shared_sandboxes: Sandboxes) -> Sandbox:
    """One for tests that leave the shell somewhat battered."""
    return shared_sandboxes.create()


@pytest.mark.parametrize(
    ("command", "undo"),
    [
        ("IFS=x", "unset IFS"),
        ("IFS=", "unset IFS"),
        ("PATH=''", "PATH=/usr/bin:/bin"),
        ("unset PATH HOME PWD IFS", "PATH=/usr/bin:/bin HOME=/root IFS=$' \\t\\n'"),
        ("set -f", "set +f"),
        ("set -v", "set +v"),
        ("set -o posix", "set +o posix"),
        ("set -u", "set +u"),
        ("set -C", "set +C"),
        ("set -k; set -b; set -h; set -P", "set +k; set +b; set +P"),
        ("set -a", "set +a"),
        ("set -T", "set +T"),
        ("set -E; trap 'echo failed' ERR", "trap - ERR; set +E"),
        ("trap 'echo debug' DEBUG", "trap - DEBUG"),
        ("trap 'echo return' RETURN", "trap - RETURN"),
        ("trap '' INT TERM HUP QUIT USR1 PIPE CHLD", "trap - INT TERM HUP QUIT USR1 PIPE CHLD"),
        ("trap '' $(seq 1 64)", "trap - INT TERM"),
        ("trap - $(seq 1 64)", ":"),
        ("shopt -s extdebug", "shopt -u extdebug"),
        ("shopt -s nullglob failglob dotglob", "shopt -u nullglob failglob dotglob"),
        ("shopt -s expand_aliases; alias echo=false builtin=false read=false", "unalias -a"),
        ("umask 777", "umask 022"),
        ("ulimit -f 1", ":"),
        ("ulimit -c 0", ":"),
        ("LANG=C LC_ALL=tr_TR.UTF-8", "unset LC_ALL; LANG=C.UTF-8"),
        ("readonly __belayer_code=5 2>/dev/null; true", ":"),
        ("__belayer_busy=7 __belayer_verb=8 __belayer_code=9 __belayer_sane=", ":"),
        (
            "BASH_ENV=/nonexistent ENV=/nonexistent; PS4='$(exit 9)'; PROMPT_COMMAND=false",
            "unset BASH_ENV ENV PS4",
        ),
        ("set -- a b c", "set --"),
        ("hash -p /bin/false cat", "hash -r"),
        ("cd /tmp && mkdir -p gone && cd gone && rmdir ../gone", "cd /root"),
        ("mount -t tmpfs none /belayer", ":"),
        (
            "echo garbage >/belayer/ctl; head -c 3000 /dev/urandom >/belayer/ctl; echo end 5 5 >/belayer/ctl",
            ":",
        ),
        ("for i in $(seq 500); do echo end $i $i; done >/belayer/ctl", ":"),
        ("echo garbage >/belayer/state.new; rm -f /belayer/state.new", ":"),
    ],
)
def test_shell_answers_after(sandboxes_shell: Sandbox, command: str, undo: str) -> None:
    shell = sandboxes_shell
    quick(shell, command)
    done = quick(shell, "\\echo o''k")
    assert "ok" in done.output.splitlines()
    assert done.exit_code == 0
    quick(shell, undo)
    quick(shell, "builtin cd /root; PATH=/usr/sbin:/usr/bin:/sbin:/bin")
    answers(shell)


@pytest.mark.parametrize(
    "garbage",
    [
        "echo run 1 2 3",
        "echo run 7; echo junk; echo",
        "echo ping 3",
        "head -c 3000 /dev/urandom",
        "yes garbage | head -c 60000",
    ],
)
def test_garbage_in_the_request_fifo_runs_nothing_twice(sandboxes: Sandboxes, garbage: str) -> None:
    """Whoever is root in the sandbox may confuse its own shell; nothing hangs."""
    sandbox = sandboxes.create()
    sandbox.run(f"echo once >>/tmp/ran; {{ {garbage}; }} >/belayer/req", timeout_s=5)
    for _ in range(3):
        sandbox.run("true", timeout_s=2)
    assert quick(sandbox, "cat /tmp/ran").output == "once\n"


WRECK = (
    "rm -rf /belayer/* /belayer; mv /belayer /gone; chmod 0 /belayer; mv /belayer/loop.sh /belayer/x; true"
)


@pytest.mark.parametrize("with_bash", [True, False])
def test_channel_cannot_be_wrecked_from_within_or_the_sandbox_is_called_hung(
    sandboxes: Sandboxes, busybox_image: str, with_bash: bool
) -> None:
    """In a user namespace the channel belongs to nobody inside. Docker's root may remove it: no shell can
    ever start, and the fault says so at the time limit."""
    sandbox = sandboxes.create(image=None if with_bash else busybox_image)
    if sandboxes.runtime.name == "docker":
        with pytest.raises(SandboxHung):
            sandbox.run(WRECK, timeout_s=1)
        return
    assert not quick(sandbox, WRECK).shell_restarted
    answers(sandbox)
    assert quick(sandbox, "exit 1").shell_restarted
    answers(sandbox)


# -- text in, text out


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("", ""),
        ("# only a comment", ""),
        ("echo 'it''s' \"a \\\"quote\\\"\" $'tab\\there' \\\\", 'its a "quote" tab\there \\\n'),
        ("cat <<'EOF'\n$HOME `date` \\n\nEOF", "$HOME `date` \\n\n"),
        ("cat <<A <<'B'\n$HOME\nA\n$HOME\nB", "$HOME\n"),
        ("cat <<-X\n\tindented\n\tX", "indented\n"),
        ("{ time cat <<'E'\nbody\nE\n} 2>/dev/null", "body\n"),
        ('awk \'BEGIN{print "a\\\\n"; print "}"}\'', "a\\n\n}\n"),
        ("printf 'no newline'", "no newline"),
        ("echo é→🙂 | wc -c", "10\n"),
        ("x=1\n\n\nif true; then\n  echo $x\nfi", "1\n"),
        ("echo one; \\\necho two", "one\ntwo\n"),
        ("{ echo a; echo b; } | tac", "b\na\n"),
        ("printf '\\303'", "\\xc3"),
        ("printf '\\251'", "\\xa9"),
        ("printf 'a\\377\\000b\\355\\240\\200c'", "a\\xff\\x00b\\xed\\xa0\\x80c"),
        ("printf '\\033[2J\\033[31mred\\033]0;t\\007'", "\x1b[2J\x1b[31mred\x1b]0;t\x07"),
        ("printf '\\r\\n'", "\r\n"),
        ("echo out; echo err >&2; echo out", "out\nerr\nout\n"),
    ],
)
def test_output_is_what_the_command_prints(shell: Sandbox, command: str, output: str) -> None:
    done = quick(shell, command)
    assert (done.output, done.exit_code, done.output_truncated) == (output, 0, False)


@pytest.mark.parametrize(
    "command",
    [
        'echo "open',
        "echo 'open",
        "for i in 1 2; do",
        "echo )",
        "if true",
        "(",
        "{ echo",
        "echo `",
        "$(",
        "case x in",
        "f() {",
        "echo ${",
        "&& true",
        "; ;",
        "done",
        "[[ a",
    ],
)
def test_malformed_command_is_an_error_of_the_shell(shell: Sandbox, command: str) -> None:
    """Case B04."""
    done = quick(shell, command)
    assert done.exit_code != 0
    assert "line" in done.output
    assert not done.shell_restarted
    answers(shell)


def test_heredoc_without_an_end_is_taken_as_the_shell_takes_it(shell: Sandbox) -> None:
    done = quick(shell, "cat <<'EOF'\nabc\n  EOF")
    assert "abc\n" in done.output
    answers(shell)


def test_carriage_return_at_the_end_of_a_line_is_part_of_the_command(shell: Sandbox) -> None:
    quick(shell, "printf '%s' 'a'\r\n")
    answers(shell)


def test_command_of_one_megabyte(shell: Sandbox) -> None:
    text = "x" * 1_000_000
    assert quick(shell, f"V='{text}'; echo ${{#V}}").output == "1000000\n"
    quick(shell, "unset V")
    lines = "\n".join(f"echo {n} >/dev/null" for n in range(30_000))
    assert quick(shell, f"{lines}\necho end").output == "end\n"


@pytest.mark.parametrize("command", ["a\0b", "\0", "lone \ud800 surrogate"])
def test_text_no_shell_can_read_is_refused(shell: Sandbox, command: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        shell.run(command)
    assert isinstance(caught.value, ValueError)
    answers(shell)


def test_bytes_are_refused(shell: Sandbox) -> None:
    with pytest.raises(NotText):
        shell.run(b"true")  # type: ignore[arg-type]
    answers(shell)


# -- floods


@pytest.mark.parametrize(
    ("flood", "head", "tail"),
    [
        ("echo first; head -c 1000000000 /dev/zero; echo; echo last", "first\n", "last\n"),
        ("echo first; yes | head -c 200000000; echo last", "first\n", "last\n"),
        ("echo first; seq 3000000; echo last", "first\n", "3000000\nlast\n"),
        ("python3 -c \"print('é'*200000)\"", "é", "é\n"),
        ("head -c 50000 /bin/true | od -v -An -tx1; echo last", " 7f 45 4c 46", "last\n"),
    ],
)
def test_flood_is_cut_in_the_middle_without_holding_it(
    sandboxes: Sandboxes, flood: str, head: str, tail: str
) -> None:
    sandbox = sandboxes.create(output_bytes=4097)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = sandbox.run(flood)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert (done.exit_code, done.timed_out, done.output_truncated) == (0, False, True)
    assert done.output.startswith(head)
    assert done.output.endswith(tail)
    assert "bytes cut" in done.output
    done.output.encode("utf-8")
    # A NUL or a broken byte is shown as four characters.
    assert len(done.output) <= 4 * 4097 + 100
    assert grown < 16 * MIB
    answers(sandbox)


def test_endless_flood_is_ended_at_the_time_limit(shell: Sandbox) -> None:
    done = shell.run("yes", timeout_s=1)
    assert (done.timed_out, done.output_truncated, done.shell_restarted) == (True, True, False)
    assert done.output.startswith("y\ny\n")
    answers(shell)


def test_same_bytes_give_the_same_text(shell: Sandbox) -> None:
    """Case B08: a replay is compared by digest."""
    outputs = {quick(shell, "head -c 5000 /bin/true").output for _ in range(5)}
    assert len(outputs) == 1


def test_random_bytes_are_valid_text(shell: Sandbox) -> None:
    for _ in range(5):
        quick(shell, "head -c 5000 /dev/urandom").output.encode("utf-8")
    answers(shell)


# -- background jobs (case B01)


def test_job_that_keeps_stdout_open_holds_nothing_up(shell: Sandbox) -> None:
    started = quick(shell, "(while :; do echo tick; sleep .1; done) & echo started; T=$!")
    assert "started\n" in started.output
    time.sleep(0.5)
    assert quick(shell, "echo two").output == "two\n"
    assert quick(shell, "kill -0 $T && kill $T && echo killed; wait $T 2>/dev/null").output == "killed\n"


def test_late_output_neither_blocks_the_job_nor_grows_the_host(shell: Sandbox) -> None:
    quick(shell, "(sleep .3; head -c 60000000 /dev/zero; echo done >/tmp/flooded) & true")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    until = time.monotonic() + 20
    while quick(shell, "cat /tmp/flooded 2>/dev/null").output != "done\n":
        assert time.monotonic() < until, "the job is blocked"
        time.sleep(0.1)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 16 * MIB


def test_hundred_jobs_at_once(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    for _ in range(4):
        quick(sandbox, "for i in $(seq 25); do (sleep .2; echo late) & done")
    assert quick(sandbox, "wait; jobs >/dev/null; jobs").output == ""
    answers(sandbox)


# -- commands that wait for a human (case B09)


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("cat", ""),
        ("read x; echo got:$x", "got:\n"),
        ("python3", ""),
        ("bash", ""),
        ("bash -i -c 'echo hi' 2>/dev/null", "hi\n"),
        ("printf 'a\\nb\\n' | while read l; do cat; echo $l; done", "b\na\n"),
        ("python3 -c 'input()' 2>&1 | tail -1", "EOFError: EOF when reading a line\n"),
        ("select x in a b; do echo $x; done 2>/dev/null; echo after", "\nafter\n"),
        ("less /etc/hostname >/dev/null; echo after", "after\n"),
        ("cat /dev/tty 2>/dev/null; echo after", "after\n"),
        ("test -t 0 || echo no terminal", "no terminal\n"),
    ],
)
def test_reader_of_stdin_meets_its_end(shell: Sandbox, command: str, output: str) -> None:
    assert quick(shell, command).output == output
    answers(shell)


def test_git_asks_nobody(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    quick(
        sandbox,
        "git init -q /root/r && cd /root/r && git config user.email a@b && git config user.name n && "
        "for i in 1 2; do echo $i >f; git add f; git commit -qm c$i; done",
    )
    assert quick(sandbox, "git log --format=%s").output == "c2\nc1\n"
    assert quick(sandbox, "git commit --allow-empty").exit_code != 0
    # Its editor gets no terminal; whatever it makes of that, history is not rewritten unasked.
    sandbox.run("git rebase -i HEAD~1", timeout_s=5)
    sandbox.run("git rebase --abort 2>/dev/null; true")
    assert quick(sandbox, "git log --format=%s").output == "c2\nc1\n"


@pytest.mark.parametrize(
    "command",
    [
        "passwd",
        "su -c true nobody",
        "apt-get install tzdata",
        "vi /tmp/v",
        "man ls",
        "top",
        "tmux",
        "sqlite3",
        "python3 -i",
        "crontab -e",
        "visudo",
        "ssh x@127.0.0.1",
        "strace -f sleep 0",
    ],
)
def test_interactive_program_ends_or_times_out(shell: Sandbox, command: str) -> None:
    shell.run(command, timeout_s=1.5)
    answers(shell)


# -- scarce resources


def test_full_disk_is_an_error_of_the_command(sandboxes: Sandboxes) -> None:
    if sandboxes.layers.kind != "btrfs" or sandboxes.runtime.name != "runc":
        pytest.skip("Limits.disk_bytes needs the runc runtime and a store on btrfs")
    sandbox = sandboxes.create(disk_bytes=64 * MIB)
    done = sandbox.run("head -c 200M /dev/zero >/root/big")
    assert done.exit_code != 0
    assert "No space left" in done.output or "quota exceeded" in done.output
    answers(sandbox)
    assert quick(sandbox, "V=1; f() { echo $V; }; cd /tmp; f").output == "1\n"
    assert quick(sandbox, "rm /root/big; f").exit_code == 0


def test_full_dev_shm_is_an_error_of_the_command(shell: Sandbox) -> None:
    done = shell.run("head -c 1G /dev/zero >/dev/shm/big; E=$?; rm /dev/shm/big; (exit $E)")
    assert done.exit_code != 0
    assert "No space left" in done.output
    answers(shell)


def test_no_free_pids_is_an_error_of_the_command(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create(pids=16)
    # A job a step: bash tries each fork anew for seconds.
    num_jobs = 0
    while not sandbox.run("sleep 999 &", timeout_s=1).timed_out:
        num_jobs += 1
    assert num_jobs == 16 - 2  # init and the shell
    done = sandbox.run("ls", timeout_s=1)
    assert "Resource temporarily unavailable" in done.output
    # With builtins alone.
    quick(sandbox, "for p in /proc/[0-9]*; do p=${p#/proc/}; [[ $p == 1 || $p == $$ ]] || kill -9 $p; done")
    answers(sandbox)
    assert quick(sandbox, "ls -d /etc").output.endswith("/etc\n")  # after a retry or two


@pytest.mark.parametrize("with_bash", [True, False])
def test_init_survives_a_shell_that_dies_when_no_pid_is_free(
    sandboxes: Sandboxes, busybox_image: str, with_bash: bool
) -> None:
    """A sh that cannot fork gives up; init must not."""
    sandbox = sandboxes.create(image=None if with_bash else busybox_image)
    quick(sandbox, "K=1; sleep 999 & sleep 999 &")
    if sandboxes.runtime.name != "runc":
        pytest.skip("reaches for the cgroup by its name, which is Docker's to give")
    paths = Cgroup.find(f"belayer-{sandbox.id}").paths
    limit = (paths.get("pids") or paths["unified"]) / "pids.max"
    limit.write_text("2")
    freed = threading.Timer(0.5, limit.write_text, ["64"])
    freed.start()
    done = quick(sandbox, "kill -9 $$")
    freed.join()
    assert (done.exit_code, done.shell_restarted) == (137, True)
    assert quick(sandbox, "echo $K").output == "1\n"


def test_fork_bomb_is_ended_at_the_time_limit(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create(pids=64)
    sandbox.run("b() { b | b & }; b; sleep 999", timeout_s=1)
    # Its jobs are background jobs, and as such they live on: the agent ends them.
    deadline = time.monotonic() + 30
    while (
        sandbox.run("kill -9 -1; kill -9 $$", timeout_s=2).timed_out
        or sandbox.run("ls >/dev/null", timeout_s=2).exit_code
    ):
        assert time.monotonic() < deadline
    answers(sandbox)


def test_memory_limit_kills_the_command_and_not_the_shell(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create(memory_bytes=64 * MIB)
    quick(sandbox, "K=1")
    done = sandbox.run("python3 -c 'bytearray(200_000_000)'")
    assert done.exit_code in (1, 137)  # MemoryError, or the OOM killer
    assert quick(sandbox, "echo $K").output == "1\n"


# -- many at once


def test_32_sandboxes_at_once(sandboxes: Sandboxes) -> None:
    def live(number: int) -> str:
        sandbox = sandboxes.create(memory_bytes=64 * MIB, pids=32)
        sandbox.run(f"N={number}; cd /tmp; echo {number} >n")
        for _ in range(5):
            sandbox.run("N=$((N+1)); echo $N >>n")
        output = sandbox.run("paste -sd' ' n").output
        sandbox.destroy()
        return output

    with ThreadPoolExecutor(32) as pool:
        outputs = list(pool.map(live, range(32)))
    assert outputs == [" ".join(str(n + i) for i in range(6)) + "\n" for n in range(32)]


# -- an image without bash


@pytest.fixture(scope="module")
def ash(shared_sandboxes: Sandboxes, busybox_image: str) -> Sandbox:
    return shared_sandboxes.create(image=busybox_image)


def test_sh_keeps_cwd_variables_functions_and_jobs(ash: Sandbox) -> None:
    quick(ash, "cd /tmp; V=3; export W=4; f() { echo fn$V; }; sleep 4321 &")
    assert (
        quick(ash, "pwd; echo $V; env | grep ^W=; f; kill %1 && echo killed").output
        == "/tmp\n3\nW=4\nfn3\nkilled\n"
    )


@pytest.mark.parametrize(
    ("command", "code", "restarted"),
    [
        ("exit 7", 7, True),
        ("exec true", 0, True),
        ("set -e; false", 1, True),
        ("set -u; echo $NOT_SET", 2, False),
        ("kill -9 $$", 137, True),
        ("ulimit -n 3", None, True),
        ("return 3", 3, False),
        ("exec 1>&- 2>&-", 0, False),
        ("exec </dev/null", 0, False),
        ("echo )", 2, False),
        ('echo "open', 2, False),
        ("for i in 1 2; do", 2, False),
        ("no-such-command", 127, False),
        ("read() { :; }; echo() { :; }", 0, False),
        ("unset -f read echo; IFS=x; PATH=''", 0, False),
        ("unset IFS; PATH=/bin; set -x; set +x; set -f; set +f", 0, False),
        ("kill -9 1; kill 1", 0, False),
        ("# comment", 0, False),
        ("", 0, False),
    ],
)
def test_sh_answers_after(ash: Sandbox, command: str, code: int | None, restarted: bool) -> None:
    quick(ash, "cd /tmp; K=1")
    done = quick(ash, command)
    assert done.shell_restarted is restarted
    assert code is None or done.exit_code == code
    quick(ash, "PATH=/bin; unset -f echo read")
    assert quick(ash, "echo ok; pwd; echo $K").output == "ok\n/tmp\n1\n"


@pytest.mark.parametrize(
    "endless", ["sleep 999", "while :; do :; done", "yes | cat >/dev/null", "trap '' INT; sleep 999"]
)
def test_sh_survives_a_time_limit_or_is_replaced(ash: Sandbox, endless: str) -> None:
    quick(ash, "cd /tmp; K=1")
    done = ash.run(endless, timeout_s=0.5)
    assert (done.timed_out, done.exit_code) == (True, 124)
    assert quick(ash, "trap - INT; pwd; echo $K; ps | grep -E '[s]leep 999|[y]es'").output == "/tmp\n1\n"


def test_sh_is_no_less_tight_about_output(ash: Sandbox) -> None:
    assert quick(ash, "printf 'a\\377\\000b'").output == "a\\xff\\x00b"
    assert ash.run("yes", timeout_s=0.5).output_truncated
    assert quick(ash, "cat; read x; echo got:$x").output == "got:\n"
