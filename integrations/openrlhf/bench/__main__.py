"""The command line of the bench."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from belayer_integrations.openrlhf.bench.faults import VICTIM, Fault
from belayer_integrations.openrlhf.bench.outcome import Side

FAULTS = {fault.name.lower(): fault for fault in Fault if fault is not Fault.NONE}


def bench(
    faults: Annotated[
        str, typer.Option(help="Which, by their names in lower case, as in raise,kill,actor.")
    ] = ",".join(FAULTS),
    samples: Annotated[int, typer.Option(min=VICTIM + 1, help="In a batch, a prompt each.")] = 8,
    image: Annotated[str, typer.Option(metavar="REF", help="Image to run on (the test image).")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """What a fault costs a batch of OpenRLHF's rollouts: its own agent function, and Belayer's.

    Real containers, rollout actors and vLLM engines, on CPUs; needs root, and an environment with OpenRLHF (a
    checkout's scripts/install-trainers). All rows take some minutes."""
    from belayer_integrations.openrlhf.bench.play import play_belayer, play_openrlhf
    from belayer_integrations.openrlhf.bench.stage import Stage
    from rich.console import Console

    from belayer_bench.machine import Machine
    from belayer_bench.stdout import stdout_to_stderr
    from belayer_env import paths
    from belayer_env.host.store_mount import ensure_mounted
    from belayer_env.sandbox.layers import open_layers

    wanted = [_fault(name) for name in faults.split(",")]
    ensure_mounted()
    base = paths.default_store()
    base.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="bench-", dir=base))
    console = Console(stderr=True)
    try:
        with (
            stdout_to_stderr(),
            console.status("starting") as status,
            Stage.open(directory, image or f"rootfs:{paths.test_image()}", samples) as stage,
        ):
            sides = {
                "openrlhf": play_openrlhf(stage, wanted, status.update),
                "belayer": play_belayer(stage, wanted, status.update),
            }
    finally:
        open_layers(base).drop(directory)
    machine = Machine.here()
    if as_json:
        report = {
            "bench": "openrlhf under faults",
            "machine": str(machine),
            "sides": {name: side.to_json() for name, side in sides.items()},
        }
        typer.echo(json.dumps(report, indent=2))
    else:
        typer.echo(f"openrlhf under faults on {machine}\n")
        typer.echo(markdown(sides["openrlhf"], sides["belayer"]))


def markdown(theirs: Side, ours: Side) -> str:
    """The table of the docs, and how long the undisturbed batches took. Pure."""
    lines = [
        "| fault | | survived | equal | tokens lost | seconds lost | left | what happened |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for pair in zip(theirs.rows, ours.rows, strict=True):
        for side, row in zip(("OpenRLHF", "Belayer"), pair, strict=True):
            lines.append(
                f"| {row.fault if side == 'OpenRLHF' else ''} | {side} | {row.num_survived} of "
                f"{row.num_samples} | {row.num_equal} | {row.tokens_lost} | {row.seconds_lost:.1f} | "
                f"{row.containers_left} | "
                f"{row.what} |"
            )
    undisturbed = f"undisturbed: OpenRLHF {theirs.undisturbed_s:.1f} s, Belayer {ours.undisturbed_s:.1f} s"
    return "\n".join([*lines, "", undisturbed])


def _fault(name: str) -> Fault:
    try:
        return FAULTS[name]
    except KeyError:
        raise typer.BadParameter(f"no such fault: {name!r}; known are {', '.join(FAULTS)}") from None


if __name__ == "__main__":
    typer.run(bench)
