"""Episodes under faults, on real sandboxes: the invariant holds, or the agent is told."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import belayer_env.store
from belayer_env import ContainerEnv, Limits, Task
from belayer_env.errors import (
    CheckpointCorrupt,
    InvalidInput,
    RecoveryFailed,
    StoreFull,
)
from belayer_env.garbage import collect_garbage, end_abandoned
from belayer_env.ledger import Ledger
from belayer_env.sandbox.base import Sandbox
from belayer_env.sandbox.layers import open_layers
from belayer_env.sandbox.procs import pids_naming
from belayer_env.spec import MIB
from belayer_env.store import Store

RUNTIMES = [
    pytest.param("runc", marks=pytest.mark.criu),
    pytest.param("docker", marks=pytest.mark.docker),
]


@pytest.fixture(params=RUNTIMES)
def runtime_name(request: pytest.FixtureRequest, runtime_names: frozenset[str]) -> str:
    if request.param not in runtime_names:
        pytest.skip(f"the {request.param} runtime does not give FULL here; run: make setup")
    name: str = request.param
    return name


@pytest.fixture
def store(store_dir: Path) -> Iterator[Path]:
    """A store of the test's own; nothing may be left in it."""
    own = store_dir / f"store-{time.monotonic_ns()}"
    own.mkdir()
    yield own
    left = [*(own / "sandboxes").glob("*"), *(own / "checkpoints").glob("*")]
    open_layers(store_dir).drop(own)
    assert not left


@pytest.fixture
def make(runtime_name: str, store: Path, image: str) -> Iterator[Callable[..., ContainerEnv]]:
    """Makes envs of this test's store and runtime, and closes them."""
    made: list[ContainerEnv] = []

    def make_env(
        policy: str = "every-2",
        reward: object = None,
        standby: bool = False,
        standby_bytes: int | None = None,
        **limits: float,
    ) -> ContainerEnv:
        task = Task(image=image, limits=Limits(**limits), reward=reward)  # type: ignore[arg-type]
        made.append(
            ContainerEnv(
                task,
                store=store,
                runtime=runtime_name,
                policy=policy,
                standby=standby,
                standby_bytes=standby_bytes,
            )
        )
        return made[-1]

    yield make_env
    for env in made:
        env.close()


ACTIONS = (
    "cd /srv && N=1 && greet() { echo hello $1; }",
    "echo one >a; sleep 900 & echo started",
    "N=$((N+1)); echo two >>a; cat a",
    "greet $N; export E=exported",
    "rm a; echo three >b; ls",
    "jobs; echo $N $E; pwd",
)


def play(env: ContainerEnv, before: Callable[[int], None] = lambda step: None) -> list[tuple[str, int]]:
    """Run ACTIONS; what the agent was told. ``before(n)`` is called before step n, counted from 1."""
    env.reset()
    told = []
    for number, action in enumerate(ACTIONS, start=1):
        before(number)
        observation, _, _, _, info = env.step(action)
        told.append((observation, info["exit_code"]))
    return told


def final_state(env: ContainerEnv) -> tuple[str, list[tuple[str, ...]]]:
    observation, *_ = env.step("declare -p N E; declare -f greet; pwd; find /srv -type f | sort | xargs cat")
    return observation, [process.argv for process in env.episode.sandbox.processes()]


@pytest.mark.parametrize("policy", ["never", "every-step", "every-2"])
def test_a_kill_between_any_two_steps_is_not_noticed(make: Callable[..., ContainerEnv], policy: str) -> None:
    quiet = make(policy)
    expected = (play(quiet), final_state(quiet))
    env = make(policy)
    told = play(env, before=lambda step: env.episode.sandbox.kill())
    assert (told, final_state(env)) == expected
    assert len(env.telemetry.recoveries) == len(ACTIONS)
    # A checkpoint that the kill meets under way fails in the words of its runtime.
    kinds = {fault.kind for fault in env.telemetry.faults}
    assert kinds - {"RuntimeFailed"} == {"SandboxGone"}
    assert [step.observation for step in env.episode.ledger.steps[: len(ACTIONS)]] == [t[0] for t in told]


def test_a_kill_in_mid_command_leaves_no_half_done_step(make: Callable[..., ContainerEnv]) -> None:
    env = make("every-step")
    env.reset()
    env.step("echo 0 >/root/count")
    killer = threading.Thread(target=_kill_once_it_counts, args=(env,))
    killer.start()
    observation, *_ = env.step("n=$(cat /root/count); echo $((n+1)) >/root/count; sleep 1.5; cat /root/count")
    killer.join()
    assert observation == "1\n"
    assert len(env.telemetry.recoveries) == 1


def _kill_once_it_counts(env: ContainerEnv) -> None:
    sandbox = env.episode.sandbox
    while not any("sleep" in process.argv for process in sandbox.processes()):
        time.sleep(0.02)
    sandbox.kill()


def test_an_action_that_kills_its_sandbox_each_time_is_told_and_the_state_before_it_is_back(
    make: Callable[..., ContainerEnv],
) -> None:
    env = make("every-step")
    env.reset()
    env.step("V=before")
    original = env.episode.sandbox.__class__.run

    def deadly(sandbox: Sandbox, command: str, *, timeout_s: float | None = None) -> object:
        if command == "deadly":
            # In the middle of it: what befalls a sandbox before that is not the command's fault.
            threading.Timer(0.2, sandbox.kill).start()
            command = "sleep 20"
        return original(sandbox, command, timeout_s=timeout_s)

    patch = pytest.MonkeyPatch()
    patch.setattr(env.episode.sandbox.__class__, "run", deadly)
    try:
        with pytest.raises(RecoveryFailed, match="took its sandbox down"):
            env.step("deadly")
    finally:
        patch.undo()
    assert len(env.episode.ledger) == 1
    assert env.step("echo $V")[0] == "before\n"


def test_a_replay_that_tells_another_story_rolls_the_context_back(make: Callable[..., ContainerEnv]) -> None:
    env = make("never")
    env.reset()
    env.step("V=1")
    env.step("cat /proc/sys/kernel/random/uuid | tee /root/id")
    env.step("echo later; V=2")
    env.episode.sandbox.kill()
    observation, reward, terminated, truncated, info = env.step("touch /root/never")
    rollback = info["rollback"]
    assert (rollback.to_step, rollback.diverged_step) == (1, 2)
    assert (reward, terminated, truncated) == (0.0, False, False)
    # A loop that does not look at info has been told in words.
    assert "after step 1 has been undone" in observation
    assert observation in env.observation_space
    assert [step.action for step in env.episode.ledger.steps] == ["V=1"]
    # The state is that of the prefix: step 2 left nothing, and the action was not run.
    *_, info = env.step("ls /root; echo $V")
    assert "rollback" not in info
    assert env.episode.ledger.steps[-1].observation == "1\n"
    env.episode.sandbox.kill()
    assert env.step("echo $V")[0] == "1\n"
    assert env.telemetry.recoveries[0].rolled_back_to == 1


def test_clocks_and_pids_are_no_divergence(make: Callable[..., ContainerEnv]) -> None:
    env = make("never")
    env.reset()
    env.step("date; date -Is; time true")
    env.step("sleep 900 & echo started; python3 -c 'print(object())'; mktemp")
    env.episode.sandbox.kill()
    *_, info = env.step("echo on")
    assert "rollback" not in info


def test_a_task_that_must_not_replay_goes_back_to_its_checkpoint(
    runtime_name: str, store: Path, image: str
) -> None:
    task = Task(image=image, replay="never")
    env = ContainerEnv(task, store=store, runtime=runtime_name, policy="never")
    try:
        env.reset()
        env.step("echo 1 >>/root/sent")
        env.checkpoint()
        env.step("echo 2 >>/root/sent")
        env.episode.sandbox.kill()
        *_, info = env.step("echo 3 >>/root/sent")
        assert info["rollback"].to_step == 1
        assert env.step("cat /root/sent")[0] == "1\n"
        # A fault in mid-command: nobody knows what reached the outside, so the agent decides.
        killer = threading.Thread(target=_kill_once_it_counts, args=(env,))
        env.checkpoint()
        killer.start()
        *_, info = env.step("echo 4 >>/root/sent; sleep 5")
        killer.join()
        assert info["rollback"].to_step == 2
        assert env.step("cat /root/sent")[0] == "1\n"
    finally:
        env.close()


def test_a_task_declares_what_may_differ(runtime_name: str, store: Path, image: str) -> None:
    task = Task(image=image, volatile=[r"[0-9a-f]{8}-[0-9a-f-]{27}"])
    env = ContainerEnv(task, store=store, runtime=runtime_name, policy="never")
    try:
        env.reset()
        env.step("cat /proc/sys/kernel/random/uuid")
        env.episode.sandbox.kill()
        assert env.step("echo on")[0] == "on\n"
    finally:
        env.close()


def test_a_fault_after_a_rollback_keeps_the_shorter_prefix(make: Callable[..., ContainerEnv]) -> None:
    env = make("never")
    env.reset()
    env.step("echo sure")
    for _ in range(3):
        env.step("cat /proc/sys/kernel/random/uuid")
    env.episode.sandbox.kill()
    assert env.step("true")[4]["rollback"].to_step == 1
    assert len(env.episode.ledger) == 1
    env.episode.sandbox.kill()
    assert env.step("echo on")[0] == "on\n"


def test_the_standby_is_swapped_in_and_replaced(make: Callable[..., ContainerEnv]) -> None:
    env = make("every-step", standby=True)
    env.reset()
    for number in range(1, 4):
        env.step(f"N={number}; sleep 900 &")
        env.episode.settle()
        assert env.telemetry.standby_bytes > 0
        env.episode.sandbox.kill()
        assert env.step("echo $N; jobs | wc -l")[0] == f"{number}\n{number}\n"
        assert env.telemetry.recoveries[-1].rung.startswith("standby ")
        assert env.telemetry.recoveries[-1].num_replayed == 0


def test_a_dead_standby_costs_a_restore_not_the_episode(make: Callable[..., ContainerEnv]) -> None:
    env = make("every-step", standby=True)
    env.reset()
    env.step("V=kept")
    env.episode.settle()
    standby = env.episode._standby
    assert standby is not None
    assert standby._sandbox is not None
    standby._sandbox.kill()
    env.episode.sandbox.kill()
    assert env.step("echo $V")[0] == "kept\n"
    assert env.telemetry.recoveries[-1].rung.startswith("restore ")
    env.episode.settle()
    env.episode.sandbox.kill()
    assert env.step("echo $V")[0] == "kept\n"


def test_a_standby_that_would_take_too_much_memory_is_not_made(make: Callable[..., ContainerEnv]) -> None:
    env = make("every-step", standby=True, standby_bytes=1000)
    env.reset()
    env.step("V=1")
    env.episode.settle()
    assert env.telemetry.standby_bytes == 0
    assert "standby_bytes is 1000" in env.telemetry.standby_refusal
    env.episode.sandbox.kill()
    assert env.step("echo $V")[0] == "1\n"


FORK_BOMB = """
import os, time
for _ in range(100):
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    except OSError:
        time.sleep(60)
"""


def test_forks_share_a_past_and_nothing_else(make: Callable[..., ContainerEnv]) -> None:
    env = make("never", memory_bytes=256 * MIB, pids=64)
    env.reset()
    env.step("cd /srv; N=5; echo base >f; echo s >/dev/shm/k; python3 -m http.server 8000 >/dev/null 2>&1 &")
    forks = env.fork(3)
    try:
        assert [len(fork.episode.ledger) for fork in forks] == [1, 1, 1]
        for number, fork in enumerate(forks):
            fork.step(f"N=$((N+{number})); echo {number} >>f; echo {number} >/dev/shm/k")
        env.step("echo parent >>f")
        for number, fork in enumerate(forks):
            observation = fork.step("echo $N; cat f /dev/shm/k; pwd; pgrep -fc http.[s]erver")[0]
            assert observation == f"{5 + number}\nbase\n{number}\n{number}\n/srv\n1\n"
        assert env.step("cat f /dev/shm/k")[0] == "base\nparent\ns\n"
        # Limits hold in each of them, and each recovers by itself, even once its parent is gone.
        env.close()
        for number, fork in enumerate(forks):
            fork.episode.sandbox.kill()
            assert fork.step("echo $N; tail -1 f")[0] == f"{5 + number}\n{number}\n"
            assert fork.telemetry.recoveries[-1].rung.startswith("restore ")
            fork.step("python3 -c 'bytearray(400_000_000)' 2>/dev/null")
            assert fork.episode.ledger.steps[-1].exit_code in (1, 137)
            fork.step(f"python3 -c '{FORK_BOMB}' & sleep 1")
            assert 20 < len(fork.episode.sandbox.processes()) <= 64
        grandchildren = forks[0].fork(2)
        for child in grandchildren:
            assert child.step("kill $(jobs -p); echo $N")[0].endswith("5\n")
            child.close()
    finally:
        for fork in forks:
            fork.close()


def test_fork_takes_a_whole_number(make: Callable[..., ContainerEnv]) -> None:
    env = make("never")
    env.reset()
    for n in (0, -1, 1.5, True):
        with pytest.raises(InvalidInput):
            env.fork(n)  # type: ignore[arg-type]


def test_a_checkpoint_runs_while_the_caller_waits_for_its_model(make: Callable[..., ContainerEnv]) -> None:
    env = make("every-step")
    env.reset()
    for number in range(3):
        env.step(f"N={number}")
        time.sleep(0.6)
    env.step("true")
    env.episode.settle()
    hidden = [record for record in env.telemetry.checkpoints if record.hidden]
    assert len(hidden) >= 3
    assert [step.waited_s < 0.5 for step in env.telemetry.steps[1:4]] == [True] * 3


def test_a_time_out_is_a_fact_that_a_replay_reproduces(make: Callable[..., ContainerEnv]) -> None:
    env = make("never", step_timeout_s=1.0, kill_grace_s=0.3)
    env.reset()
    *_, info = env.step("V=1; while :; do date +%N; done")
    assert info["timed_out"]
    assert info["exit_code"] == 124
    env.episode.sandbox.kill()
    assert env.step("echo $V")[0] == "1\n"


def test_timed_out_commands_leave_variables_and_jobs(make: Callable[..., ContainerEnv]) -> None:
    env = make("never", step_timeout_s=1.5, kill_grace_s=0.3)
    env.reset()
    env.step("cd /srv; V=3; sleep 800 &")
    observation, _, _, _, info = env.step("echo part; sleep 700; echo never")
    assert (observation, info["timed_out"], info["shell_restarted"]) == ("part\n", True, False)
    assert env.step("pgrep -fc 'sleep [8]00'; pgrep -fc 'sleep [7]00'; pwd; echo $V")[0] == "1\n0\n/srv\n3\n"


def test_running_out_of_memory_ends_a_command_not_the_episode(make: Callable[..., ContainerEnv]) -> None:
    env = make("every-step", memory_bytes=256 * MIB)
    env.reset()
    env.step("V=kept")
    *_, info = env.step("python3 -c 'bytearray(600_000_000)' 2>/dev/null")
    assert info["exit_code"] in (1, 137)
    assert env.step("echo $V")[0] == "kept\n"


def test_restores_go_back_and_forth_and_old_refs_stay_good(make: Callable[..., ContainerEnv]) -> None:
    env = make("never")
    env.reset()
    refs = []
    for i in range(6):
        env.step(f"N=$((N+1)); touch /root/f{i}; rm -f /root/f{i - 2}")
        refs.append(env.checkpoint())
        env.restore(refs[-1])
    assert env.step("echo $N; ls /root")[0] == "6\nf4\nf5\n"
    env.restore(refs[2])
    assert len(env.episode.ledger) == 3
    assert env.step("echo $N; ls /root")[0] == "3\nf1\nf2\n"
    env.restore(refs[5])
    assert len(env.episode.ledger) == 6
    env.episode.sandbox.kill()
    assert env.step("echo $N")[0] == "6\n"


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "manifest"])
def test_a_damaged_checkpoint_is_never_used_the_older_one_is(
    make: Callable[..., ContainerEnv], store: Path, damage: str
) -> None:
    env = make("never")
    env.reset()
    env.step("V=1")
    env.checkpoint()
    env.step("V=2")
    newest = env.checkpoint()
    env.step("V=$((V+1))")
    _damage(store / "checkpoints" / newest.id, damage)
    env.episode.sandbox.kill()
    assert env.step("echo $V")[0] == "3\n"
    recovery = env.telemetry.recoveries[-1]
    assert newest.id in recovery.tried[0]
    assert recovery.num_replayed == 2
    assert "CheckpointCorrupt" in {fault.kind for fault in env.telemetry.faults}
    with pytest.raises(CheckpointCorrupt):
        env.restore(newest)


def _damage(checkpoint: Path, how: str) -> None:
    image = max((checkpoint / "images").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(image.read_bytes())
    match how:
        case "cut":
            image.write_bytes(data[: len(data) // 2])
        case "flip":
            data[len(data) // 2] ^= 1
            image.write_bytes(data)
        case "missing":
            image.unlink()
        case "manifest":
            (checkpoint / "manifest.json").write_text("{}")


def test_a_reward_that_raises_leaves_no_untold_effects(make: Callable[..., ContainerEnv]) -> None:
    def reward(sandbox: Sandbox, ledger: Ledger) -> float:
        if ledger.steps[-1].action == "touch /root/trap":
            raise ZeroDivisionError("the user's own bug")
        return float(sandbox.run("ls /root | wc -l").output)

    env = make("every-step", reward=reward)
    env.reset()
    assert env.step("touch /root/a")[1] == 1.0
    with pytest.raises(ZeroDivisionError, match="own bug"):
        env.step("touch /root/trap")
    assert len(env.episode.ledger) == 1
    assert env.step("ls /root")[0] == "a\n"


def test_what_a_reward_runs_is_replayed_with_its_step(make: Callable[..., ContainerEnv]) -> None:
    def reward(sandbox: Sandbox, ledger: Ledger) -> float:
        sandbox.run("echo judged >>/root/log")
        return 0.0

    env = make("never", reward=reward)
    env.reset()
    env.step("true")
    env.step("cat /root/log")
    env.episode.sandbox.kill()
    assert env.step("cat /root/log")[0] == "judged\njudged\n"


def test_the_sandbox_is_lost_while_the_policy_checkpoints(make: Callable[..., ContainerEnv]) -> None:
    env = make("every-step")
    env.reset()
    env.step("V=1")
    patch = pytest.MonkeyPatch()
    kind = env.episode.sandbox.__class__
    original = kind.save

    def dying(sandbox: Sandbox, into: Path, **options: object) -> object:
        sandbox.kill()
        return original(sandbox, into)

    patch.setattr(kind, "save", dying)
    env.step("V=2")
    patch.undo()
    assert env.step("echo $V")[0] == "2\n"
    env.episode.sandbox.kill()
    env.checkpoint()  # of the state that the ledger says, which has to be recovered first
    assert env.step("echo $V")[0] == "2\n"


CLIENT = """
import sys, time
from belayer_env import ContainerEnv, Task
image, store, runtime = sys.argv[1:]
env = ContainerEnv(Task(image=image, instruction="go on"), store=store, runtime=runtime, policy="every-2")
env.reset()
print(env.episode.id, flush=True)
for n in range(1, 1000):
    env.step(f"N={n}; echo {n} >>/root/log; sleep 900 & tail -1 /root/log")
    print(n, flush=True)
"""


@pytest.mark.parametrize("steps", [0, 3, 4])
def test_an_episode_goes_on_after_its_client_was_killed(
    runtime_name: str, store: Path, image: str, steps: int
) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, image, store, runtime_name], stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    with client.stdout:
        episode_id = client.stdout.readline().strip()
        for _ in range(steps):
            client.stdout.readline()
        time.sleep(0.03 * steps)
        with pytest.raises(InvalidInput, match="lives"):
            ContainerEnv.resume(episode_id, store=store)
        client.send_signal(signal.SIGKILL)
        client.wait()
    rows = json.loads(_belayer("ps", "--json", "--store", store))
    assert [row["state"] for row in rows] == ["orphaned"] * len(rows)
    assert json.loads(_belayer("ps", "--json", "--episodes", "--store", store))[0]["episode"] == episode_id
    _belayer("gc", "--store", store)
    assert json.loads(_belayer("ps", "--json", "--store", store)) == []
    env = ContainerEnv.resume(episode_id, store=store)
    try:
        known = len(env.episode.ledger)
        assert known >= steps
        observation, *_ = env.step("echo $N; wc -l </root/log; jobs -p | wc -l")
        if known:
            assert observation.split() == [str(known)] * 3
        env.step("echo the end")
    finally:
        env.close()
    with pytest.raises(InvalidInput, match="closed"):
        ContainerEnv.resume(episode_id, store=store)


def test_gc_ends_abandoned_episodes_when_asked(runtime_name: str, store: Path, image: str) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, image, store, runtime_name], stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    with client.stdout:
        episode_id = client.stdout.readline().strip()
        client.stdout.readline()
        client.kill()
        client.wait()
    with Store(store) as opened:
        first = collect_garbage(opened)
        assert first.resumable == (episode_id,)
        assert not first.failed
        assert collect_garbage(opened, episodes=True).episodes == (episode_id,)
        assert collect_garbage(opened, episodes=True).episodes == ()


def test_one_abandoned_episode_is_ended_with_what_it_left_running(
    runtime_name: str, store: Path, image: str
) -> None:
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", CLIENT, image, store, runtime_name], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    ids = []
    for client in clients:
        assert client.stdout is not None
        ids.append(client.stdout.readline().strip())
        client.stdout.readline()
    dead, alive = clients
    dead.kill()
    dead.wait()
    with Store(store) as opened:
        with pytest.raises(InvalidInput, match="lives"):
            end_abandoned(opened, ids[1])
        end_abandoned(opened, ids[0])
        assert [home.episode_id for home in opened.homes()] == [ids[1]]
        with pytest.raises(InvalidInput, match="closed"):
            end_abandoned(opened, ids[0])
        alive.kill()
        alive.wait()
        end_abandoned(opened, ids[1])
        assert opened.homes() == []
        opened.sweep_partials()  # checkpoints that were being made
    for client in clients:
        assert client.stdout is not None
        client.stdout.close()


def test_clients_killed_at_random_instants_leave_nothing_that_gc_does_not_find(
    runtime_name: str, store: Path, image: str
) -> None:
    for delay_s in (0.3, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8):
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, image, store, runtime_name], stdout=subprocess.DEVNULL
        )
        time.sleep(delay_s)
        client.kill()
        client.wait()
        with Store(store) as opened:
            # A runc or CRIU that outlived its client may still be at work: then once more.
            deadline = time.monotonic() + 20
            while opened.homes() or collect_garbage(opened, episodes=True).failed:
                collect_garbage(opened, episodes=True)
                assert time.monotonic() < deadline
    left = pids_naming(f"{store}/", programs=("runc", "criu", "unshare", "sh"))
    assert not left


def _belayer(*args: object) -> str:
    done = subprocess.run(
        [Path(sys.executable).with_name("belayer"), *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_many_episodes_with_faults_leave_nothing(runtime_name: str, store: Path, image: str) -> None:
    descriptors, threads = _num_descriptors(), threading.active_count()
    names = set()
    for number in range(8):
        env = ContainerEnv(Task(image=image), store=store, runtime=runtime_name, policy="every-2")
        env.reset()
        for step in range(4):
            names.add(env.episode.sandbox.id)
            if (number + step) % 3 == 0:
                env.episode.sandbox.kill()
            env.step(f"echo {step} >>/root/log; sleep 900 &")
            names.add(env.episode.sandbox.id)
        env.close()
    assert len(names) > 8
    assert [
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(store) in line
    ] == []
    cgroups = [path.name for path in Path("/sys/fs/cgroup").glob("**/*sb-*")]
    assert [name for name in cgroups if any(sandbox_id in name for sandbox_id in names)] == []
    del env  # and with it its runtime, and the connections to the Engine
    gc.collect()
    # The first sandbox starts the process's threads for late output (with its epoll) and for timelines.
    assert _num_descriptors() <= descriptors + 1
    assert threading.active_count() <= threads + 2


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_adaptive_checkpoints_in_a_bubble_that_hides_it_and_moves_it_up_when_nothing_changed(
    make: Callable[..., ContainerEnv],
) -> None:
    env = make("adaptive")
    env.reset()
    env.step("echo a >/root/f; V=1")  # nothing is known of bubbles yet, and nothing is at risk
    env.episode.settle()
    assert not env.telemetry.checkpoints
    env.step("echo b >>/root/f; V=2")
    env.hint_bubble(30.0)
    _await(lambda: len(env.telemetry.checkpoints) == 1)
    for _ in range(2):
        env.step("cat /root/f; ls /")
        env.hint_bubble(30.0)
        _await(lambda: env.telemetry.decisions[-1].step == len(env.episode.ledger))
    assert len(env.telemetry.checkpoints) == 1
    assert "moved up" in env.telemetry.decisions[-1].reason
    env.episode.sandbox.kill()
    assert env.step("cat /root/f; echo $V")[0] == "a\nb\n2\n"
    recovery = env.telemetry.recoveries[-1]
    assert recovery.rung.startswith("restore ")
    assert recovery.num_replayed == 0
    # A step whose effects are cut is covered no more.
    assert len(env.episode.ledger) == 5


def _await(condition: Callable[[], bool], patience_s: float = 20.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_hint_is_a_number_of_seconds(make: Callable[..., ContainerEnv]) -> None:
    env = make("adaptive")
    env.reset()
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInput):
            env.hint_bubble(wrong)


def test_a_ledger_that_cannot_be_written_leaves_no_untold_effects(
    make: Callable[..., ContainerEnv], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make("never")
    env.reset()
    for error in (StoreFull("no room"), KeyboardInterrupt()):

        def fail(*args: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(Store, "append_step", fail)
        with pytest.raises(type(error)):
            env.step("echo x >>/root/f")
        monkeypatch.undo()
        assert len(env.episode.ledger) == 0
        env.step("true")
        assert env.step("ls /root")[0] == ""
        env.reset()


def test_a_full_store_fails_the_checkpoint_not_the_episode(
    make: Callable[..., ContainerEnv], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make("every-step")
    env.reset()
    env.step("V=1")

    def full(*args: object, **kwargs: object) -> None:
        raise StoreFull("no room")

    env.episode.settle()
    monkeypatch.setattr(belayer_env.store, "seal", full)
    env.step("V=2")
    env.episode.settle()
    monkeypatch.undo()
    assert "no room" in env.telemetry.checkpoints[-1].error
    env.episode.sandbox.kill()
    assert env.step("echo $V")[0] == "2\n"
