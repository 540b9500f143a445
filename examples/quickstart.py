"""A container that is killed, and an agent that does not notice."""
# ruff: noqa: T201

from belayer_env import ContainerEnv, Task, paths

with ContainerEnv(Task(image=f"rootfs:{paths.test_image()}")) as env:
    env.reset()
    env.step("count=41; python3 -m http.server 8000 &")
    env.checkpoint()  # by itself it takes them while the model thinks
    env.episode.sandbox.kill()  # SIGKILL to the container's first process
    observation, reward, terminated, truncated, info = env.step("echo $((count + 1)); jobs")
    print(observation, info, *env.telemetry.recoveries, sep="\n")
