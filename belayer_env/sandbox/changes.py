"""Whether a sandbox has changed since its checkpoint: a cheap digest of its files, processes and shell.

Two equal fingerprints of one running sandbox mean that nothing worth a checkpoint lies between them. The
reverse does not hold: whatever cannot be told cheaply counts as changed. What is looked at:

    files      of the writable layer and of every other writable mount: inode, mode, owner, size, times (not
               those of a directory); where times do not tell (tmpfs, message queues), contents
    shell      the state that it writes after each command; open files with offsets and locks; limits, cwd
    processes  the tree, and each thread's nanoseconds on a CPU: what has not run has not changed its memory
    kernel     queues of sockets, where somebody may hold one; SysV IPC (any of it is doubt)

Not looked at: what a command writes into the memory or the unlinked files of another, sleeping process by way
of /proc/PID; and the shell's table of hashed commands, which it finds again by itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from blake3 import blake3

from belayer_env.disk import libc
from belayer_env.sandbox.procs import ProcStat, read_procs
from belayer_env.sandbox.shell import CHANNEL_MOUNT

__all__ = [
    "InDoubt",
    "SandboxFacts",
    "baseline",
    "digest",
    "fingerprint",
    "gather",
    "normal_state",
    "observe",
]

MOST_ENTRIES = 5_000
"""Files and directories looked at, at most: a layer with more is taken for changed."""

MOST_BYTES = 4 * 1024**2
"""Read of files in memory, at most."""

RACY_S = 0.02
"""A file changed this shortly before may change again under the same time stamp (a tick is up to 10 ms)."""

_CLONE_NEWIPC = 0x08000000  # include/uapi/linux/sched.h
_CLOEXEC = 0o2000000  # in fdinfo's flags; include/uapi/asm-generic/fcntl.h
_LOOP = f"{CHANNEL_MOUNT}/loop.bash"
_KERNEL_FILE_SYSTEMS = frozenset({"proc", "sysfs", "cgroup", "cgroup2", "devpts"})
_TIMELESS = frozenset({"tmpfs", "mqueue"})
_STATUS_FIELDS = frozenset(
    b"Name Umask TracerPid Uid Gid Groups SigPnd ShdPnd SigBlk SigIgn SigCgt CapInh CapPrm CapEff CapBnd "
    b"CapAmb NoNewPrivs Seccomp Cpus_allowed".split()
)
_RUN_NUMBER = re.compile(rb'^(declare -[^ ]+ __belayer_(?:n|ran|pid)=)"[0-9]+"$', re.MULTILINE)


class InDoubt(Exception):
    """Whether it has changed cannot be told cheaply; the message says why."""


@dataclass(frozen=True, slots=True)
class SandboxFacts:
    """What was looked at, as lines of bytes. ``activity``: how long background processes have run.

    ``newest_ns``: when a file last changed, in ns since the epoch."""

    shell_state: bytes
    files: tuple[bytes, ...]
    processes: tuple[bytes, ...]
    activity: tuple[bytes, ...]
    sockets: tuple[bytes, ...]
    newest_ns: int = field(compare=False)


def fingerprint(
    *, init_pid: int, pids: Iterable[int], upper: Path, shell_state: bytes, alone: bool = False
) -> str | None:
    """`digest` of what `observe` sees now; None in doubt. Never raises."""
    facts = observe(init_pid=init_pid, pids=pids, upper=upper, shell_state=shell_state, alone=alone)
    return None if facts is None else digest(facts)


def observe(
    *, init_pid: int, pids: Iterable[int], upper: Path, shell_state: bytes, alone: bool = False
) -> SandboxFacts | None:
    """What the sandbox is now; None in doubt. Never raises. To be compared within one sandbox's life only.

    ``pids``: host pids of all its processes, init's too. ``upper``: the upper directory of its overlay.
    ``shell_state``: see `ShellChannel.shell_state`. ``alone``: any process but init and the shell is doubt.
    Waits up to `RACY_S` where a file has just changed.

    Takes 1.5 ms on an empty layer and 27 to 45 ms on one of 4,911 entries, by how busy the host is. Source:
    pytest -s tests/test_changes.py -k milliseconds, on 2 cores."""
    pids = list(pids)

    def look() -> SandboxFacts:
        return gather(init_pid=init_pid, pids=pids, upper=upper, shell_state=shell_state, alone=alone)

    try:
        facts = look()
        if _is_racy(facts):
            time.sleep(RACY_S)
            facts = look()
    except (InDoubt, OSError, ValueError):  # ValueError: /proc has a form we do not know
        return None
    return None if _is_racy(facts) else facts


def baseline(before: SandboxFacts | None, after: SandboxFacts | None) -> str | None:
    """The fingerprint that stands for a checkpoint, from a look before its freeze and one after its thaw.

    A shell alone has not moved in between. Else, as a freeze and a dump wake every process, only the second
    look can equal a later one; and what the first shows too, the checkpoint holds. Where they differ in more
    than the activity, a background job has gone on since the dump, and the agent may see by what it left in
    files or sockets what the checkpoint lacks: None. (What it changed in its own memory the agent sees only
    by making it run, which shows. CRIU itself makes a directory in /tmp and removes it again, which brings a
    /tmp of the image into the layer: one more reason for None, once.)

    After a restore there is no first look, and only an ``alone`` one can stand for the checkpoint."""
    if before is None or after is None:
        return None
    is_alone = not before.activity and not after.activity
    return digest(after) if is_alone or replace(before, activity=after.activity) == after else None


def digest(facts: SandboxFacts) -> str:
    """64 hex digits, of all that can differ while nothing else does."""
    hasher = blake3()
    for lines in ((facts.shell_state,), facts.files, facts.processes, facts.activity, facts.sockets):
        hasher.update(b"%d:" % len(lines))
        for line in lines:
            hasher.update(b"%d:" % len(line))
            hasher.update(line)
    return hasher.hexdigest()


def normal_state(shell_state: bytes) -> bytes:
    """The shell's state without what changes from one command to the next by itself: the run's number.

    That is all: bash prints RANDOM, SECONDS and their like as they were last read or set. A command that
    reads one has thus changed it, and what it assigns is never overlooked.

    Raises:
        InDoubt: it is no bash, whose state alone is complete."""
    if not shell_state.startswith(b"declare -"):
        raise InDoubt("the shell is no bash, or has not run a command yet")
    return _RUN_NUMBER.sub(rb"\1", shell_state)


def gather(
    *, init_pid: int, pids: Sequence[int], upper: Path, shell_state: bytes, alone: bool = False
) -> SandboxFacts:
    """Look at everything; see `observe`.

    Raises:
        InDoubt: something cannot be told.
        OSError: something ended or went while it was looked at."""
    state = normal_state(shell_state)
    processes, activity = _processes(init_pid, pids)
    if alone and activity:
        raise InDoubt("processes run beside the shell")
    _refuse_sysv_ipc(init_pid)
    files = _FileWalk()
    files.walk(upper, by_content=False)
    for point, kind in _writable_mounts(Path(f"/proc/{init_pid}/mountinfo").read_text()):
        files.walk(Path(f"/proc/{init_pid}/root{point}"), by_content=kind in _TIMELESS)
    sockets = _sockets(init_pid) if activity else ()
    return SandboxFacts(
        shell_state=state,
        files=tuple(sorted(files.lines)),
        processes=processes,
        activity=activity,
        sockets=sockets,
        newest_ns=files.newest_ns,
    )


def _is_racy(facts: SandboxFacts) -> bool:
    # The kernel stamps files by the clock that we read; one set back makes everything racy, and so in doubt.
    return facts.newest_ns > time.time_ns() - int(RACY_S * 1e9)


# -- files


class _FileWalk:
    """Lines that say what is in some directories; of each file system, only what lies below its own mount."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.newest_ns = 0
        self._bytes_left = MOST_BYTES

    def walk(self, top: Path, *, by_content: bool) -> None:
        root = os.fsencode(top)
        found = os.lstat(root)
        self._add(root, b"", found, by_content)
        device = found.st_dev
        left = [b""] if stat.S_ISDIR(found.st_mode) else []
        while left:
            directory = left.pop()
            with os.scandir(root + directory) as entries:
                for entry in entries:
                    path = directory + b"/" + entry.name
                    found = entry.stat(follow_symlinks=False)
                    if found.st_dev != device:
                        continue  # another mount, looked at by itself or not at all
                    self._add(root, path, found, by_content)
                    if stat.S_ISDIR(found.st_mode):
                        left.append(path)

    def _add(self, root: bytes, path: bytes, found: os.stat_result, by_content: bool) -> None:
        if len(self.lines) >= MOST_ENTRIES:
            raise InDoubt(f"more than {MOST_ENTRIES} files")
        if stat.S_ISCHR(found.st_mode):
            # The host's own nodes are bound in; their times are not the sandbox's doing.
            self.lines.append(b"%b %o %d" % (path, found.st_mode, found.st_rdev))
            return
        line = b"%b %d %o %d %d" % (path, found.st_ino, found.st_mode, found.st_uid, found.st_gid)
        times = b" %d %d" % (found.st_mtime_ns, found.st_ctime_ns)
        if stat.S_ISDIR(found.st_mode):
            # Whatever makes a file and removes it (`git status`, a test run) moves both times of a directory
            # at once, and leaves nothing else. Names are compared as they are; times set by hand differ.
            line += _attributes(root + path)
            line += times if found.st_mtime_ns != found.st_ctime_ns else b""
        else:
            # The change time covers contents, links and attributes; the others are there for a bad clock.
            line += b" %d" % found.st_size + times
            self.newest_ns = max(self.newest_ns, found.st_ctime_ns)
        self.lines.append(line)
        if by_content and stat.S_ISREG(found.st_mode):
            self.lines.append(path + b" holds " + self._content(root + path))

    def _content(self, path: bytes) -> bytes:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:  # noqa: PTH123 - a descriptor
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise InDoubt("a file was replaced while it was looked at")
            data = file.read(self._bytes_left + 1)
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise InDoubt(f"more than {MOST_BYTES} bytes of files in memory")
        return blake3(data).digest()


def _attributes(path: bytes) -> bytes:
    """Extended attributes, access lists among them."""
    try:
        names = sorted(os.listxattr(path, follow_symlinks=False))
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return b""
    return b"".join(
        b" %b=%b" % (os.fsencode(name), os.getxattr(path, name, follow_symlinks=False)) for name in names
    )


def _writable_mounts(mountinfo: str) -> Iterator[tuple[str, str]]:
    """Mount point and type of each mount that a sandbox's files may lie on, beside its root. Pure.

    Source: proc(5); a blank in a path is written as an octal escape."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        point, options = before.split(" ")[4:6]
        kind = after.split(" ")[0]
        if point in ("/", CHANNEL_MOUNT) or kind in _KERNEL_FILE_SYSTEMS or "rw" not in options.split(","):
            continue
        yield re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), point), kind


# -- processes


def _processes(init_pid: int, pids: Sequence[int]) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """What each process is, and what each beside init and the shell has done."""
    procs = read_procs(pids)
    if len(procs) != len(pids):
        raise InDoubt("a process ended while it was looked at")
    ns_pids = {proc.pid: proc.ns_pid for proc in procs}
    shells = [proc.pid for proc in procs if proc.ppid == init_pid and proc.argv[-1:] == (_LOOP,)]
    if len(shells) != 1 or init_pid not in ns_pids:
        raise InDoubt("no shell, or more than one")
    lines, activity = [], []
    for proc in sorted(procs, key=lambda proc: proc.ns_pid):
        lines.append(_identity(proc, ns_pids.get(proc.ppid, 0)))
        if proc.pid in shells:
            lines += _shell_descriptors(proc.pid)
        elif proc.pid != init_pid:
            activity += _activity(proc)
    return tuple(lines), tuple(activity)


def _identity(proc: ProcStat, ns_ppid: int) -> bytes:
    kept = proc.state if proc.state in "ZT" else "-"
    line = f"{proc.ns_pid} {ns_ppid} {proc.start_ticks} {kept} ".encode()
    if proc.state == "Z":
        return line
    directory = f"/proc/{proc.pid}"
    status = [
        entry
        for entry in Path(f"{directory}/status").read_bytes().splitlines()
        if entry.partition(b":")[0] in _STATUS_FIELDS
    ]
    links = [os.fsencode(Path(f"{directory}/{name}").readlink()) for name in ("exe", "cwd", "root")]
    nice = Path(f"{directory}/stat").read_bytes().rpartition(b")")[2].split()[16]
    texts = [Path(f"{directory}/{name}").read_bytes() for name in ("limits", "oom_score_adj")]
    return line + b"\0".join([*status, *links, nice, *texts])


def _activity(proc: ProcStat) -> list[bytes]:
    """How long each thread of a background process has run, in ns and in turns."""
    if proc.state == "R":
        raise InDoubt(f"process {proc.ns_pid} is running")
    if proc.state == "Z":
        return [b"%d ended" % proc.ns_pid]
    tasks = Path(f"/proc/{proc.pid}/task")
    lines = []
    for task in sorted(tasks.iterdir(), key=lambda task: int(task.name)):
        lines.append(task.name.encode() + b" ran " + (task / "schedstat").read_bytes())
    for _, link, found in _descriptors(proc.pid):
        # Anybody may put something into it, and a process that does not wait for it will not run by that.
        if stat.S_ISFIFO(found.st_mode) and link.startswith("/") and not link.startswith(f"{CHANNEL_MOUNT}/"):
            raise InDoubt(f"process {proc.ns_pid} has a named pipe open")
    return lines


def _shell_descriptors(pid: int) -> list[bytes]:
    """What the shell has open beside its own: where each leads, how far it was read, what it locks."""
    lines = []
    for number, link, found in _descriptors(pid):
        info = Path(f"/proc/{pid}/fdinfo/{number}").read_bytes()
        if _is_of_the_loop(number, link, info):
            continue
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) or stat.S_ISCHR(found.st_mode)):
            raise InDoubt(f"the shell has {link} open, and what is in it cannot be told")
        if found.st_nlink == 0:
            raise InDoubt(f"the shell has an unlinked file open: {link}")
        lines.append(f"fd {number} {link}\n".encode(errors="surrogateescape") + info)
    return sorted(lines)


def _is_of_the_loop(number: int, link: str, info: bytes) -> bool:
    if number <= 2:
        # It may not have closed yet what it told us the end by.
        return link in ("/dev/null", f"{CHANNEL_MOUNT}/req", f"{CHANNEL_MOUNT}/ctl")
    flags = re.search(rb"^flags:\s*([0-7]+)$", info, re.MULTILINE)
    # While it reads or writes a message it keeps its own 0 or 1 aside; and it has its script open.
    is_private = flags is not None and bool(int(flags[1], 8) & _CLOEXEC)
    return is_private and number >= 10 and link in ("/dev/null", _LOOP)


def _descriptors(pid: int) -> Iterator[tuple[int, str, os.stat_result]]:
    """Number, target and status of each open file of a process."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the shell's turn from one request to the next
            yield int(path.name), str(path.readlink()), path.stat()


# -- kernel


def _sockets(init_pid: int) -> tuple[bytes, ...]:
    """Every socket with its queue, less what passes by itself.

    Source: the kernel's Documentation/networking/proc_net_tcp.rst; proc(5) for unix."""
    lines = []
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in _table(init_pid, name):
            columns = line.split()
            if name.startswith("udp") or columns[3] != b"06":  # TIME_WAIT
                lines.append(b" ".join([name.encode(), *columns[1:5], columns[9]]))
    lines += [b" ".join([b"unix", *line.split()[1:]]) for line in _table(init_pid, "unix")]
    return tuple(sorted(lines))


def _table(init_pid: int, name: str) -> list[bytes]:
    try:
        return Path(f"/proc/{init_pid}/net/{name}").read_bytes().splitlines()[1:]
    except FileNotFoundError:
        return []  # a kernel without IPv6


def _refuse_sysv_ipc(init_pid: int) -> None:
    """See `gather`: what is in a segment cannot be told without attaching it."""
    tables: list[list[str]] = []
    with _opened(f"/proc/{init_pid}/ns/ipc") as namespace:

        def look() -> None:
            # A namespace is entered by one thread, for good: this one ends with the look.
            if libc().setns(namespace, _CLONE_NEWIPC) == 0:
                with contextlib.suppress(OSError):
                    for name in ("shm", "sem", "msg"):
                        tables.append(Path(f"/proc/sysvipc/{name}").read_text().splitlines())

        thread = threading.Thread(target=look, name="belayer-ipc")
        thread.start()
        thread.join()
    if [len(table) for table in tables] != [1, 1, 1]:  # the heading
        raise InDoubt("there is SysV IPC, or its namespace cannot be entered")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """The file, open for the time of the block."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
