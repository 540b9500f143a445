# ruff: noqa: E501 - a program's line stays one line
"""The process zoo: small programs, each with what it must still do after a checkpoint, a kill and a restore.

``start`` runs in the sandbox's bash and returns once the program is at work; ``check`` runs after the restore,
as often as one likes, and prints ``expect`` and nothing else. Programs are independent: all live in one sandbox.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HEAVY", "PRELUDE", "PROGRAMS", "Program"]

PRELUDE = r"""
mkdir -p /z && cd /z
# Until a command succeeds, for at most 10 s.
until_true() { local i; for i in {1..200}; do "$@" >/dev/null 2>&1 && return 0; sleep .05; done; echo "never: $*"; return 1; }
# A Python program in the background; it has started once it has made /z/NAME.up.
python() { cat >/z/$1.py; python3 /z/$1.py >/z/$1.log 2>&1 & echo $! >/z/$1.pid; until_true test -e /z/$1.up || cat /z/$1.log; }
# Whether a file that a program keeps writing a growing number to still grows.
grows() { local i b a=$(cat $1); a=${a:-0}; for i in {1..100}; do b=$(cat $1); [ "${b:-0}" -gt $a ] && { echo grows; return; }; sleep .05; done; echo "stands at $a"; }
ask() { echo "$2" >/z/$1.in; timeout 5 head -n1 /z/$1.out; }
cat >/z/talk.py <<'P'
# For a program that answers questions: each line read from NAME.in is answered by a line written to NAME.out.
import os, sys
def serve(name, answer):
    for fifo in ("in", "out"):
        if not os.path.exists(f"/z/{name}.{fifo}"): os.mkfifo(f"/z/{name}.{fifo}")
    questions = os.open(f"/z/{name}.in", os.O_RDWR)
    open(f"/z/{name}.up", "w").close()
    lines = os.fdopen(questions)
    while True:
        question = lines.readline().strip()
        with open(f"/z/{name}.out", "w") as out: print(answer(question), file=out)
def tick(name, step=1):
    global n
    n = globals().get("n", 0) + step
    with open(f"/z/{name}.new", "w") as f: f.write(str(n))
    os.rename(f"/z/{name}.new", f"/z/{name}.n")
    if not os.path.exists(f"/z/{name}.up"): open(f"/z/{name}.up", "w").close()
P
export PYTHONPATH=/z
"""


@dataclass(frozen=True, slots=True)
class Program:
    """One program. ``docker``: the cause with which Docker may refuse to checkpoint it; "no-ipv6" where it
    cannot even run."""

    name: str
    start: str
    check: str
    expect: str
    docker: str = ""


def _python(name: str, source: str) -> str:
    return f"python {name} <<'SOURCE_END'\nfrom talk import serve, tick\n{source}\nSOURCE_END"


def _talker(name: str, setup: str, answer: str, expect: str, docker: str = "") -> Program:
    """A Python program that sets something up and, when asked, says how it is."""
    body = "\n".join("    " + line for line in answer.splitlines())
    source = f"{setup}\ndef answer(question):\n{body}\nserve('{name}', answer)"
    return Program(name, _python(name, source), f"ask {name} how", expect, docker)


PROGRAMS: tuple[Program, ...] = (
    # -- the shell itself
    Program(
        "shell-state",
        'cd /srv; V=5; export W=7; A=(a b "c d"); declare -A M=([k]=v); f() { echo "fn$V"; }; readonly R=1; '
        "set -o pipefail; trap 'echo usr1' USR1; sleep 7001 & J=$!; umask 027",
        'cd /srv; echo "$(f) $(printenv W) ${A[2]} ${M[k]} $R $(umask)"; set -o | grep -c "pipefail.*on"; '
        "kill -USR1 $$; jobs | grep -c 'sleep 7001'; kill -0 $J && echo job",
        "fn5 7 c d v 1 0027\n1\nusr1\n1\njob",
    ),
    Program(
        "shell-cwd",
        "(cd /usr/lib && exec sleep 7002) &",
        "readlink /proc/$(pgrep -fx 'sleep 7002')/cwd",
        "/usr/lib",
    ),
    Program(
        "shell-descriptor",
        "exec 7<>/z/seven; echo secret >&7",
        "cat /proc/$$/fd/7; ls -l /proc/$$/fd/7 | grep -c seven",
        "secret\n1",
    ),
    Program(
        "shell-process-substitution",
        "exec 6> >(while read l; do echo $l >/z/subst; done)",
        "rm -f /z/subst; echo through >&6; until_true test -s /z/subst; cat /z/subst",
        "through",
    ),
    Program(
        "shell-coproc",
        'coproc CO { while read l; do echo "<$l>"; done; }',
        'echo a >&${CO[1]}; read -t 5 l <&${CO[0]}; echo "$l"',
        "<a>",
    ),
    Program(
        "cron-like-loop",
        "(n=0; while :; do n=$((n+1)); echo $n >/z/cron.n; sleep .05; done) & until_true test -s /z/cron.n",
        "grows /z/cron.n",
        "grows",
    ),
    # -- files
    Program(
        "flock",
        "exec {ZL}>/z/lock; flock $ZL",
        "flock -n /z/lock true || echo held",
        "held",
        docker="file-lock",
    ),
    _talker(
        "fcntl-lock",
        "import fcntl\nf = open('/z/posix.lock', 'w'); fcntl.lockf(f, fcntl.LOCK_EX)",
        "import subprocess\nreturn subprocess.run(['python3', '-c', 'import fcntl; fcntl.lockf(open(\"/z/posix.lock\", \"w\"), "
        "fcntl.LOCK_EX | fcntl.LOCK_NB)'], stderr=-3).returncode",
        "1",
        docker="file-lock",
    ),
    Program(
        "lock-waiter",
        "exec {ZW}>/z/lock2; flock $ZW; (flock /z/lock2 sh -c 'echo got >/z/got'; exec sleep 7003) & sleep .1",
        "test -e /z/got || { flock -u $ZW; until_true test -e /z/got; }; cat /z/got",
        "got",
        docker="file-lock",
    ),
    Program(
        "deleted-file",
        "exec {ZD}<>/z/deleted; echo secret >&$ZD; rm /z/deleted",
        "cat /proc/$$/fd/$ZD; ls /z/deleted 2>/dev/null || echo gone",
        "secret\ngone",
    ),
    Program(
        "deleted-twin",
        "echo a >/z/twin1; ln /z/twin1 /z/twin2; exec {ZT}<>/z/twin2; rm /z/twin2",
        "echo more >>/proc/$$/fd/$ZT; tail -n1 /z/twin1; ls /z/twin2 2>/dev/null || echo gone; ls -A /z | grep -c link_remap",
        "more\ngone\n0",
    ),
    Program(
        "deleted-executable",
        "cp /usr/bin/sleep /z/slumber; /z/slumber 7004 & sleep .1; rm /z/slumber",
        "pgrep -fcx '/z/slumber 7004'; readlink /proc/$(pgrep -fx '/z/slumber 7004')/exe",
        "1\n/z/slumber (deleted)",
    ),
    _talker(
        "deleted-lower-file",
        "import mmap, os\nf = open('/usr/share/common-licenses/GPL-3', 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\n"
        "os.unlink('/usr/share/common-licenses/GPL-3')",
        "f.seek(0)\nreturn f.read() == m[:] and len(m) > 5000",
        "True",
    ),
    _talker(
        "deleted-directory",
        "import os\nos.mkdir('/z/dd'); os.chdir('/z/dd'); d = os.open('.', os.O_RDONLY); os.rmdir('/z/dd')",
        "return (os.listdir(d), os.path.exists('/z/dd'))",
        "([], False)",
    ),
    _talker(
        "file-position",
        "f = open('/z/pos', 'w+'); f.write('0123456789'); f.flush(); f.seek(4)",
        "p = f.tell(); c = f.read(1); f.seek(p)\nreturn c",
        "4",
    ),
    _talker(
        "tmpfile",
        "import os\nfd = os.open('/z', os.O_TMPFILE | os.O_RDWR); os.write(fd, b'nameless')",
        "return os.pread(fd, 99, 0).decode()",
        "nameless",
    ),
    Program(
        "append-writers",
        "for w in 1 2 3; do (while :; do echo line$w; sleep .02; done >>/z/append) & done; until_true test -s /z/append",
        # Each of them writes on; on a busy host one may have to wait for its turn.
        "a=$(wc -c </z/append); new() { tail -c +$((a + 1)) /z/append | grep -x 'line[123]' | sort -u; }; "
        "until_true eval '[ $(new | wc -l) = 3 ]'; new",
        "line1\nline2\nline3",
    ),
    Program(
        "copied-up-while-open",
        "tail -c 20 /etc/login.defs >/dev/null; exec {ZC}</etc/login.defs; echo '# tail' >>/etc/login.defs",
        "tail -n1 /etc/login.defs; wc -c </proc/$$/fd/$ZC | grep -c '[0-9]'",
        "# tail\n1",
    ),
    _talker(
        "sparse-file",
        "f = open('/z/sparse', 'wb+'); f.truncate(8 << 30); f.seek(5 << 30); f.write(b'x'); f.flush()\nimport os",
        "f.seek(5 << 30)\nreturn f.read(1), os.stat('/z/sparse').st_size >> 30, os.stat('/z/sparse').st_blocks < 100",
        "(b'x', 8, True)",
    ),
    _talker(
        "xattrs-and-modes",
        "import os\np = '/z/meta'; open(p, 'w').close(); os.setxattr(p, 'user.k', b'v'); os.chown(p, 5, 6); os.chmod(p, 0o4751)",
        "s = os.stat(p)\nreturn os.getxattr(p, 'user.k'), s.st_uid, s.st_gid, oct(s.st_mode)",
        "(b'v', 5, 6, '0o104751')",
    ),
    # -- tmpfs and shared memory
    Program(
        "dev-shm-file",
        "echo k >/dev/shm/k; chmod 640 /dev/shm/k; exec {ZS}<>/dev/shm/open; echo o >&$ZS",
        "cat /dev/shm/k /proc/$$/fd/$ZS; stat -c %a /dev/shm/k",
        "k\no\n640",
    ),
    Program("run-directory", "mkdir -p /run/a; echo r >/run/a/r", "cat /run/a/r", "r"),
    _talker(
        "posix-shared-memory",
        "from multiprocessing import shared_memory as m\ns = m.SharedMemory('zshm', True, 4096); s.buf[0] = 9",
        "return m.SharedMemory('zshm', track=False).buf[0] if False else s.buf[0], open('/dev/shm/zshm', 'rb').read(1)",
        "(9, b'\\t')",
    ),
    _talker(
        "shared-mapping",
        "import mmap, os, time\nm = mmap.mmap(-1, 4096)\nif os.fork() == 0:\n    while True: m[0] = (m[0] + 1) % 250; time.sleep(.01)",
        "a = m[0]\nfor _ in range(300):\n    time.sleep(.01)\n    if m[0] != a: return 'shared'\nreturn 'apart'",
        "shared",
    ),
    _talker(
        "mapped-file",
        "import mmap\nf = open('/z/mapped', 'wb+'); f.truncate(8192); m = mmap.mmap(f.fileno(), 8192); m[5000:5003] = b'abc'",
        "m[0:2] = b'hi'; m.flush()\nreturn open('/z/mapped', 'rb').read()[5000:5003], open('/z/mapped', 'rb').read(2)",
        "(b'abc', b'hi')",
    ),
    _talker(
        "memfd",
        "import os\nfd = os.memfd_create('mem'); os.write(fd, b'x' * 100000 + b'end')",
        "return os.pread(fd, 3, 100000), os.fstat(fd).st_size",
        "(b'end', 100003)",
    ),
    _talker(
        "sysv-ipc",
        "import ctypes\nl = ctypes.CDLL(None, use_errno=True); l.shmat.restype = ctypes.c_void_p\n"
        "shm = l.shmget(77, 4096, 0o1600); at = l.shmat(shm, None, 0); ctypes.memmove(at, b'sysv', 4)\n"
        "sem = l.semget(78, 1, 0o1600); l.semctl(sem, 0, 16, 5)\n"
        "q = l.msgget(79, 0o1600); l.msgsnd(q, ctypes.create_string_buffer(b'\\1' + b'\\0' * 7 + b'hello'), 5, 0)",
        "b = ctypes.create_string_buffer(99); got = l.msgrcv(q, b, 5, 0, 0o4000)\n"
        "l.msgsnd(q, ctypes.create_string_buffer(b'\\1' + b'\\0' * 7 + b'hello'), 5, 0)\n"
        "return ctypes.string_at(at, 4), l.semctl(sem, 0, 12), got, b.raw[8:13], l.shmget(77, 0, 0) == shm",
        "(b'sysv', 5, 5, b'hello', True)",
    ),
    # -- sockets and pipes
    Program(
        "tcp-in-mid-talk",
        _python(
            "tcp",
            """
import socket, threading, time
s = socket.create_server(('127.0.0.1', 5001))
def echo():
    c, _ = s.accept()
    while d := c.recv(10): c.sendall(d)
threading.Thread(target=echo, daemon=True).start()
c = socket.create_connection(('127.0.0.1', 5001))
while True:
    c.sendall(b'x'); assert c.recv(10) == b'x'; tick('tcp'); time.sleep(.03)
""",
        ),
        "grows /z/tcp.n",
        "grows",
        docker="tcp-connection",
    ),
    _talker(
        "tcp-bytes-under-way",
        "import socket\ns = socket.create_server(('127.0.0.1', 5002)); c = socket.create_connection(s.getsockname()); d, _ = s.accept()\n"
        "c.sendall(b'under way' * 1000)",
        "d.settimeout(5); p = d.recv(9000, socket.MSG_PEEK)\nreturn len(p), p[:9]",
        "(9000, b'under way')",
        docker="tcp-connection",
    ),
    _talker(
        "tcp6",
        "import socket\ns = socket.create_server(('::1', 5003), family=socket.AF_INET6)",
        "c = socket.create_connection(('::1', 5003), 5); d, _ = s.accept(); c.sendall(b'six')\nreturn d.recv(3)",
        "b'six'",
        docker="no-ipv6",
    ),
    _talker(
        "tcp-half-closed",
        "import socket\ns = socket.create_server(('127.0.0.1', 5004)); c = socket.create_connection(s.getsockname()); d, _ = s.accept()\n"
        "c.shutdown(socket.SHUT_WR)",
        "d.settimeout(5); e = d.recv(1); d.sendall(b'r'); c.settimeout(5)\nreturn e, c.recv(1)",
        "(b'', b'r')",
        docker="tcp-connection",
    ),
    _talker(
        "udp",
        "import socket\na = socket.socket(type=socket.SOCK_DGRAM); a.bind(('127.0.0.1', 5005))",
        "b = socket.socket(type=socket.SOCK_DGRAM); b.sendto(b'u', ('127.0.0.1', 5005)); a.settimeout(5)\nreturn a.recv(9)",
        "b'u'",
    ),
    _talker(
        "unix-sockets",
        "import socket, os\nl = socket.socket(socket.AF_UNIX); l.bind('/z/sock'); l.listen()\n"
        "ab = socket.socket(socket.AF_UNIX); ab.bind('\\0zoo'); ab.listen()\nx, y = socket.socketpair(); x.sendall(b'queued')\n"
        "p, q = socket.socketpair(type=socket.SOCK_DGRAM); p.send(b'one'); p.send(b'two')",
        "r = []\nfor name, s in (('/z/sock', l), ('\\0zoo', ab)):\n    c = socket.socket(socket.AF_UNIX); c.settimeout(5); c.connect(name); d, _ = s.accept(); d.sendall(b'k'); r.append(c.recv(1))\n"
        "y.settimeout(5); q.settimeout(5); r.append(y.recv(9)); x.sendall(b'queued'); r += [q.recv(9), q.recv(9)]; p.send(b'one'); p.send(b'two')\nreturn r",
        "[b'k', b'k', b'queued', b'one', b'two']",
    ),
    _talker(
        "fds-in-flight",
        "import socket, array, os\nx, y = socket.socketpair(); r, w = os.pipe(); os.write(w, b'piped')\nsocket.send_fds(x, [b'm'], [r]); os.close(r)\nkeep = []",
        "if not keep: keep.append(socket.recv_fds(y, 1, 1)[1][0]); globals()['data'] = os.read(keep[0], 9)\nreturn data",
        "b'piped'",
    ),
    Program(
        "http-server",
        "(mkdir -p /z/www; cd /z/www; echo served >f; exec python3 -m http.server 5006 --bind 127.0.0.1 >/dev/null 2>&1) & "
        "until_true python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:5006/f\")'",
        "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://127.0.0.1:5006/f\", timeout=5).read())'",
        "b'served\\n'",
    ),
    _talker(
        "pipe-with-data",
        "import os\nr, w = os.pipe(); os.write(w, b'z' * 50000)\na, b = os.pipe2(os.O_NONBLOCK)",
        "d = os.read(r, 60000); os.write(w, d)\ntry: e = os.read(a, 1)\nexcept BlockingIOError: e = 'empty'\nreturn len(d), e",
        "(50000, 'empty')",
    ),
    Program(
        "fifo-repl",
        "mkfifo /z/repl; (exec python3 -iqu </z/repl >/z/repl.out 2>&1) & exec {ZR}>/z/repl; echo x=41 >&$ZR; sleep .2",
        ": >/z/repl.seen; echo \"open('/z/repl.seen','w').write(str(x+1))\" >&$ZR; until_true test -s /z/repl.seen; cat /z/repl.seen; echo",
        "42",
    ),
    Program(
        "pipeline",
        "(while :; do echo tick; sleep .03; done) | while read l; do echo $((++n)) >/z/pipeline.n; done & until_true test -s /z/pipeline.n",
        "grows /z/pipeline.n",
        "grows",
    ),
    # -- waiting
    _talker(
        "eventfd-epoll",
        "import os, select\ne = os.eventfd(3); p = select.epoll(); p.register(e, select.EPOLLIN); r, w = os.pipe(); p.register(r, select.EPOLLIN)",
        "ready = sorted(fd == e for fd, _ in p.poll(0)); v = os.eventfd_read(e); os.eventfd_write(e, v)\nreturn ready, v",
        "([True], 3)",
    ),
    _talker(
        "signalfd",
        "import ctypes, os, signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]); l = ctypes.CDLL(None)\n"
        "mask = (ctypes.c_ulong * 16)(1 << (signal.SIGUSR2 - 1)); fd = l.signalfd(-1, mask, os.O_NONBLOCK); os.kill(os.getpid(), signal.SIGUSR2)",
        "n = int.from_bytes(os.read(fd, 128)[:4], 'little'); os.kill(os.getpid(), signal.SIGUSR2)\nreturn n == signal.SIGUSR2",
        "True",
    ),
    # Long ones: a periodic timer that expires in the pause comes back disarmed. CRIU writes "0 s left" for it.
    _talker(
        "itimer",
        "import signal\nsignal.setitimer(signal.ITIMER_REAL, 7000, 8000)",
        "left, interval = signal.getitimer(signal.ITIMER_REAL)\nreturn 6000 < left < 7000, interval",
        "(True, 8000.0)",
    ),
    _talker(
        "posix-timer",
        "import ctypes\nl = ctypes.CDLL(None); t = ctypes.c_void_p(); v = (ctypes.c_long * 4)(8000, 0, 7000, 0)\n"
        "assert l.timer_create(1, None, ctypes.byref(t)) == 0 and l.timer_settime(t, 0, v, None) == 0",
        "l.timer_gettime(t, v)\nreturn v[0], 6000 < v[2] < 7000",
        "(8000, True)",
    ),
    _talker(
        "timerfd",
        "import ctypes\nl = ctypes.CDLL(None); fd = l.timerfd_create(1, 0); t = (ctypes.c_long * 4)(0, 0, 7000, 0)\n"
        "l.timerfd_settime(fd, 0, t, None)",
        "l.timerfd_gettime(fd, t)\nreturn 6000 < t[2] < 7000",
        "True",
    ),
    _talker(
        "pending-signals",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGRTMIN + 5]); signal.raise_signal(signal.SIGUSR1)\n"
        "signal.raise_signal(signal.SIGRTMIN + 5)",
        "return sorted(int(s) for s in signal.sigpending()) == [10, signal.SIGRTMIN + 5]",
        "True",
    ),
    Program(
        "asyncio-server",
        _python(
            "aio",
            "import asyncio\nasync def main():\n    async def hello(r, w): w.write(b'hello ' + await r.readline()); w.close()\n"
            "    await asyncio.start_server(hello, '127.0.0.1', 5007)\n    while True: tick('aio'); await asyncio.sleep(.05)\nasyncio.run(main())",
        ),
        "grows /z/aio.n; exec {ZA}<>/dev/tcp/127.0.0.1/5007; echo you >&$ZA; timeout 5 head -n1 <&$ZA; exec {ZA}>&-",
        "grows\nhello you",
    ),
    # -- processes and threads
    _talker(
        "threads",
        "import threading, time\nn = [0] * 20\ndef work(i):\n    while True: n[i] += 1; time.sleep(.01)\n"
        "for i in range(20): threading.Thread(target=work, args=(i,), daemon=True).start()",
        "a = list(n); time.sleep(.4)\nreturn sum(x > y for x, y in zip(n, a))",
        "20",
    ),
    _talker(
        "process-pool",
        "import multiprocessing as mp\nmp.set_start_method('fork')\ndef sq(x): return x * x\nglobals().update(sq=sq)\npool = mp.Pool(2)",
        "return pool.map_async(sq, range(10)).get(10)",
        "[0, 1, 4, 9, 16, 25, 36, 49, 64, 81]",
    ),
    Program(
        "other-uid",
        "setpriv --reuid 1000 --regid 1000 --clear-groups sleep 7005 &",
        "ps -o uid=,gid= -p $(pgrep -fx 'sleep 7005') | tr -s ' '",
        " 1000 1000",
        docker="foreign-user",
    ),
    Program(
        "own-session",
        "setsid sh -c 'sleep 7006 & sleep 7007' & until_true pgrep -fx 'sleep 7007'",
        "a=$(ps -o sid=,pgid= -p $(pgrep -fx 'sleep 7006')); b=$(ps -o sid=,pgid= -p $(pgrep -fx 'sleep 7007')); [ \"$a\" = \"$b\" ] && "
        '[ "$(ps -o sid= -p $$)" != "${a%% *}" ] && echo apart',
        "apart",
    ),
    Program(
        "daemon",
        "( setsid sh -c '(exec sleep 7008) & exit' ); until_true pgrep -fx 'sleep 7008'",
        "ps -o ppid= -p $(pgrep -fx 'sleep 7008') | tr -d ' '",
        "1",
    ),
    _talker(
        "zombie-child",
        "import os\nz = os.fork()\nif z == 0: os._exit(7)\nimport time; time.sleep(.1); left = [z]",
        "if left: globals()['code'] = os.waitstatus_to_exitcode(os.waitpid(left.pop(), 0)[1])\nreturn code",
        "7",
    ),
    Program(
        "wait-for-child",
        _python(
            "waits",
            "import os, time\nopen('/z/waits.up', 'w').close()\nc = os.fork()\nif c == 0:\n    while not os.path.exists('/z/waits.go'): time.sleep(.02)\n    os._exit(3)\n"
            "open('/z/waits.got', 'w').write(str(os.waitstatus_to_exitcode(os.waitpid(c, 0)[1])))\ntime.sleep(9999)",
        ),
        "touch /z/waits.go; until_true test -s /z/waits.got; cat /z/waits.got; echo",
        "3",
    ),
    _talker(
        "attributes",
        "import os, resource, signal, time\nos.nice(7); resource.setrlimit(resource.RLIMIT_NOFILE, (99, 199)); os.umask(0o027)\n"
        "open('/proc/self/oom_score_adj', 'w').write('321'); signal.signal(signal.SIGHUP, signal.SIG_IGN)\nimport ctypes; ctypes.CDLL(None).prctl(15, b'renamed')",
        "u = os.umask(0); os.umask(u)\nreturn os.nice(0), resource.getrlimit(resource.RLIMIT_NOFILE), oct(u), open('/proc/self/oom_score_adj').read().strip(), "
        "signal.getsignal(signal.SIGHUP).name, open('/proc/self/comm').read().strip()",
        "(7, (99, 199), '0o27', '321', 'SIG_IGN', 'renamed')",
    ),
    _talker(
        "environment-and-argv",
        "import os, sys\nos.environ['ZOO'] = 'é'",
        "return os.environ['ZOO'], sys.argv, os.readlink('/proc/self/exe').startswith('/usr/bin/python')",
        "('é', ['/z/environment-and-argv.py'], True)",
    ),
    _talker(
        "seccomp-filter",
        "import ctypes, os, struct\nl = ctypes.CDLL(None, use_errno=True); l.prctl(38, 1, 0, 0, 0)\n"
        "def ins(c, t, f, k): return struct.pack('HBBI', c, t, f, k)\n"
        "code = ins(0x20, 0, 0, 0) + ins(0x15, 0, 1, 110 if os.uname().machine == 'x86_64' else 173) + ins(6, 0, 0, 0x50000 | 77) + ins(6, 0, 0, 0x7fff0000)\n"
        "buf = ctypes.create_string_buffer(code); prog = struct.pack('HxxxxxxQ', 4, ctypes.addressof(buf))\n"
        "assert l.prctl(22, 2, ctypes.create_string_buffer(prog), 0, 0) == 0, ctypes.get_errno()",
        "return os.getppid()",
        "-77",
    ),
    _talker(
        "chroot",
        "import os\nos.makedirs('/z/jail/in', exist_ok=True); open('/z/jail/in/f', 'w').write('jailed')\nc = os.open('/z/jail', os.O_RDONLY)\n"
        "r, w = os.pipe(); r2, w2 = os.pipe()\nif os.fork() == 0:\n    os.chroot('/z/jail'); os.chdir('/in')\n    while os.read(r, 1): os.write(w2, open('f').read().encode() + str(os.listdir('/')).encode())",
        "os.write(w, b'x')\nreturn os.read(r2, 99).decode()",
        "jailed['in']",
    ),
    Program(
        "busy-loop",
        _python("busy", "import time\nn = 0\nwhile True:\n    n += 1\n    if n % 200000 == 0: tick('busy')"),
        "grows /z/busy.n",
        "grows",
    ),
    # -- terminals
    Program(
        "tmux",
        "tmux -f /dev/null new-session -d -s z -x 80 -y 24 'bash --norc'; tmux send-keys -t z 'Z=99; for i in $(seq 60); do echo row$i; done' Enter; "
        "until_true sh -c 'tmux capture-pane -p -t z | grep -q row60'",
        'i=$RANDOM; tmux send-keys -t z "echo Z=\\$Z.$i" Enter; '
        'until_true sh -c "tmux capture-pane -p -t z | grep -q ^Z=99.$i" && echo answered; '
        "tmux capture-pane -p -S - -t z | grep -c '^row1$'",
        "answered\n1",
    ),
    _talker(
        "pseudo-terminal",
        "import os, pty, time\npid, fd = pty.fork()\nif pid == 0: os.execvp('bash', ['bash', '--norc'])\ntime.sleep(.2); os.write(fd, b'P=77\\n'); time.sleep(.1)",
        "os.set_blocking(fd, False)\ntry: os.read(fd, 9999)\nexcept BlockingIOError: pass\nos.set_blocking(fd, True); os.write(fd, b'echo P:$P:\\n'); got = b''\n"
        "for _ in range(50):\n    got += os.read(fd, 999)\n    if b':77:' in got: return 'answered', os.isatty(fd)\nreturn got",
        "('answered', True)",
    ),
    # -- what agents run
    Program(
        "git-lock-free-repository",
        "git init -q /z/repo; cd /z/repo; git config user.email a@b; git config user.name n; echo 1 >f; git add f; git commit -qm one; cd /z",
        "git -C /z/repo status --porcelain; git -C /z/repo log --format=%s",
        "one",
    ),
    Program(
        "less-like-reader",
        "mkfifo /z/tailed; (while read l; do echo $l >>/z/read; done) <>/z/tailed & sleep .05",
        "rm -f /z/read; echo line >/z/tailed; until_true test -s /z/read; cat /z/read",
        "line",
    ),
    Program(
        "perl",
        'perl -e \'$SIG{USR1} = sub { open F, ">/z/perl.n"; print F "caught"; close F }; open F, ">/z/perl.up"; close F; sleep 1 while 1\' & echo $! >/z/perl.pid; until_true test -e /z/perl.up',
        "rm -f /z/perl.n; kill -USR1 $(cat /z/perl.pid); until_true test -s /z/perl.n; cat /z/perl.n; echo",
        "caught",
    ),
)

HEAVY: tuple[Program, ...] = (
    _talker(
        "deleted-30-mb",
        "import tempfile, hashlib\nf = tempfile.TemporaryFile(); f.write(b'k' * 30_000_000); f.flush()",
        "f.seek(0)\nreturn hashlib.md5(f.read()).hexdigest() == hashlib.md5(b'k' * 30_000_000).hexdigest()",
        "True",
    ),
    Program(
        "deleted-executable-big",
        "cp $(readlink -f /usr/bin/python3) /z/snake; head -c 10M /dev/urandom >>/z/snake; /z/snake -c 'import time; time.sleep(7020)' & sleep .2; rm /z/snake",
        "pgrep -fc '^/z/snake'",
        "1",
    ),
    _talker(
        "memory-200-mb",
        "import hashlib, random\nb = random.Random(5).randbytes(1 << 20) * 200; h = hashlib.md5(b).hexdigest()",
        "return hashlib.md5(b).hexdigest() == h, len(b) >> 20",
        "(True, 200)",
    ),
    Program(
        "files-20000",
        "mkdir /z/many; (cd /z/many; python3 -c 'for i in range(20000): open(str(i), \"w\").write(str(i))')",
        "ls /z/many | wc -l; cat /z/many/19999; echo",
        "20000\n19999",
    ),
    _talker(
        "open-files-1000",
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\nfs = [open(f'/z/of{i}', 'w+') for i in range(1000)]\nfor i, f in enumerate(fs): f.write(str(i)); f.flush()",
        "r = []\nfor f in fs: f.seek(0); r.append(int(f.read()))\nreturn r == list(range(1000))",
        "True",
    ),
    Program("processes-100", "for i in $(seq 100); do sleep 7030 & done", "pgrep -fcx 'sleep 7030'", "100"),
)
