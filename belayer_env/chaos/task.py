"""What chaos plays when no task is given: a bit of all that an agent leaves in a sandbox. Pure data."""

from __future__ import annotations

from belayer_env import paths
from belayer_env.spec import MIB, Limits, Task

__all__ = ["ACTIONS", "chaos_task"]

ACTIONS = (
    "cd /srv && N=1 && declare -A M=([a]=1 [b]='two words') && export E=exported && umask 027 && "
    'greet() { echo "hello $1"; } && alias ll="ls -l"; echo $N',
    "mkdir src && printf 'def f(x):\\n    return x * 2\\n' >src/mod.py; seq 1 500 >data.txt; wc -l data.txt",
    "sleep 4001 & sleep 4002 & N=$((N+1)); echo started; jobs",
    "git init -q -b main . && git add -A && git commit -qm first && git log --format='%s %H'",
    "python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 & "
    "fetch() { python3 -c 'import sys, urllib.request as r; "
    'sys.stdout.write(r.urlopen("http://127.0.0.1:8000/" + sys.argv[1]).read().decode())\' "$1"; }; '
    "until fetch src/mod.py 2>/dev/null; do sleep 0.05; done",
    "python3 -c 'import json, pathlib as p; p.Path(\"/dev/shm/state\").write_text(json.dumps([*range(9)]))'; "
    "N=$((N+1)); cat /dev/shm/state",
    "for i in 1 2 3 4 5; do echo $i >>count.txt; sleep 0.05; done; cat count.txt",
    "awk '{ s += $1 } END { print s }' data.txt | tee sum.txt; echo \"${PIPESTATUS[*]}\"",
    "ls /no/such; grep nothing data.txt; (exit 3)",
    "exec 9>>lock && flock 9 && echo locked >&9; sed -i 's/x \\* 2/x * 3/' src/mod.py; git diff --stat; "
    "echo $((++N))",
    "kill %1; wait %1 2>/dev/null; echo $?; fetch count.txt | tail -1",
    'python3 -c \'import hashlib; d = b""\nfor _ in range(100_000): d = hashlib.sha256(d).digest()\n'
    "print(d.hex())' | tee /tmp/digest",
    "rm data.txt; mv sum.txt total.txt; ln -s total.txt link; chmod 600 count.txt; sleep 0.2; ls -1",
    'greet "$N ${M[b]} $E"; pwd; umask; fetch link; jobs | wc -l; cat lock',
)
"""They print the same in every run, and show it if half of one is kept or one is run twice."""

_GIT_ENV = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    # Fixed: a commit's name holds its date.
    for what, value in (("DATE", "2026-01-05T09:00:00Z"), ("NAME", "Agent"), ("EMAIL", "agent@example.org"))
}


def chaos_task(image: str = "") -> Task:
    """The task; ``image`` by default the test image that `belayer setup` makes. A shell that hangs in
    mid-command is noticed at the step's time limit, which is short."""
    return Task(
        image=image or f"rootfs:{paths.test_image()}",
        env={"PYTHONDONTWRITEBYTECODE": "1", **_GIT_ENV},
        limits=Limits(memory_bytes=512 * MIB, pids=128, step_timeout_s=10.0, kill_grace_s=0.5),
    )
