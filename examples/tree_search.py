"""Search in a tree of container states: `fork` gives each branch its own copy of the running container.

The task is a lock with six dials, a process that keeps its state in memory. Each dial has five positions, and
the first wrong one jams the lock for good: nothing can be undone, only forked beforehand. Both searches may
make the same number of turns.
"""
# ruff: noqa: T201

import argparse
import random
from collections.abc import Iterator
from contextlib import ExitStack

from belayer_env import ContainerEnv, Task, paths
from belayer_env.ledger import Ledger
from belayer_env.sandbox.base import Sandbox

DIALS, POSITIONS = 6, 5

LOCK = f"""
import random, socketserver, sys
combination = [random.Random(sys.argv[1]).randrange({POSITIONS}) for _ in range({DIALS})]
opened, jammed = 0, False
class Turn(socketserver.StreamRequestHandler):
    def handle(self):
        global opened, jammed
        position = int(self.rfile.readline())
        jammed = jammed or position != combination[opened]
        opened += not jammed
        self.wfile.write(b"jammed" if jammed else b"open" if opened == {DIALS} else b"click %d" % opened)
socketserver.TCPServer(("127.0.0.1", 7000), Turn).serve_forever()
"""

TURN = """
turn() { exec 9<>/dev/tcp/127.0.0.1/7000 && echo $1 >&9 && cat <&9; exec 9>&-; }
"""


def clicks(sandbox: Sandbox, ledger: Ledger) -> tuple[float, bool]:
    """The share of dials that are right; it ends when the lock is open or jammed."""
    said = ledger.steps[-1].observation
    right = int(said.split()[1]) if said.startswith("click") else DIALS if said == "open" else 0
    return right / DIALS, said in ("open", "jammed")


def lock_task(seed: int) -> Task:
    """A lock with its own combination, running."""
    return Task(
        image=f"rootfs:{paths.test_image()}",
        instruction=f"Open the lock: `turn N` sets its next dial to N, 0 to {POSITIONS - 1}.",
        setup=(
            f"cat >lock.py <<'END'{LOCK}END",
            f"python3 lock.py {seed} >lock.log 2>&1 &",
            TURN.strip(),
            # It listens: a connection that sends no number is no turn.
            "until (exec 9<>/dev/tcp/127.0.0.1/7000) 2>/dev/null; do sleep 0.02; done",
        ),
        reward=clicks,
    )


def independent_attempts(seed: int, turns: int, draw: random.Random) -> float:
    """Best of as many attempts as the turns allow, each from the start; one container, restored each time."""
    best = 0.0
    with ContainerEnv(lock_task(seed), policy="never") as env:
        env.reset()
        start = env.checkpoint()
        while turns:
            env.restore(start)
            terminated = False
            while turns and not terminated:
                turns -= 1
                _, reward, terminated, *_ = env.step(f"turn {draw.randrange(POSITIONS)}")
                best = max(best, reward)
    return best


def tree_search(seed: int, turns: int) -> float:
    """At each dial fork once for each position, and go on with the best."""
    best = 0.0
    with ExitStack() as trunk:
        env = trunk.enter_context(ContainerEnv(lock_task(seed), policy="never"))
        env.reset()
        while turns >= POSITIONS:
            turns -= POSITIONS
            branches = dict(step_each(env.fork(POSITIONS)))
            reward = max(branches)
            for score, branch in branches.items():
                if score != reward:
                    branch.close()
            env = trunk.enter_context(branches[reward])
            best = max(best, reward)
            if reward == 1.0:
                break
    return best


def step_each(envs: list[ContainerEnv]) -> Iterator[tuple[float, ContainerEnv]]:
    """Turn the same dial of each to another position. A lock that jams is closed at once."""
    for position, env in enumerate(envs):
        _, reward, terminated, *_ = env.step(f"turn {position}")
        if terminated and reward < 1.0:
            env.close()
        else:
            yield reward, env


def main() -> None:
    """Compare the two on a few locks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--locks", type=int, default=3)
    parser.add_argument("--turns", type=int, default=DIALS * POSITIONS)
    given = parser.parse_args()
    print(f"{given.turns} turns each: dials right of {DIALS}")
    print("lock   from the start   with fork")
    for seed in range(given.locks):
        alone = independent_attempts(seed, given.turns, random.Random(seed))
        forked = tree_search(seed, given.turns)
        print(f"{seed:4}   {alone * DIALS:14.0f}   {forked * DIALS:9.0f}")


if __name__ == "__main__":
    main()
