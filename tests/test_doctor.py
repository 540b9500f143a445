"""The doctor: verdicts on hosts made by hand, and its report on this one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from belayer_env.cli import doctor as cli_doctor
from belayer_env.cli.doctor import report_json
from belayer_env.errors import InvalidInput
from belayer_env.host import probe
from belayer_env.host.criu_find import CriuBinary
from belayer_env.host.facts import EngineFacts, HostFacts, RuncFacts
from belayer_env.host.gather import gather_host, has_capability
from belayer_env.host.store_mount import StoreDisk
from belayer_env.host.verdict import Status, judge_docker, judge_rows, judge_runc
from belayer_env.spec import GIB, Tier

GOOD_CRIU = CriuBinary(Path("/opt/criu"), (4, 2, 1))
OLD_CRIU = CriuBinary(Path("/usr/sbin/criu"), (3, 17, 1))

RUNC = RuncFacts(runc="1.1.5", criu=GOOD_CRIU, cgroup="v2")
ENGINE = EngineFacts(installed=True, version="26.1", experimental=True, driver="overlay2", criu=GOOD_CRIU)
HOST = HostFacts(
    runc=RUNC, engine=ENGINE, store=StoreDisk(Path("/state"), "btrfs", True, 100 * GIB), kernel="6.18.4-amd64"
)

runner = CliRunner()


def on(**changes: Any) -> HostFacts:
    return dataclasses.replace(HOST, **changes)


def runc(**changes: Any) -> RuncFacts:
    return dataclasses.replace(RUNC, **changes)


def engine(**changes: Any) -> EngineFacts:
    return dataclasses.replace(ENGINE, **changes)


def statuses(facts: HostFacts) -> dict[str, Status]:
    return {row.name: row.status for row in judge_rows(facts)}


def invoke(monkeypatch: pytest.MonkeyPatch, facts: HostFacts, *words: str) -> Any:
    monkeypatch.setattr(cli_doctor, "gather_host", lambda: facts)
    app = typer.Typer()
    app.command()(cli_doctor.doctor)
    return runner.invoke(app, list(words))


def test_a_good_host_is_ok_throughout_and_full_for_both_runtimes() -> None:
    assert set(statuses(HOST).values()) == {Status.OK}
    assert judge_runc(RUNC).tier is Tier.FULL
    assert judge_docker(ENGINE).tier is Tier.FULL
    assert judge_runc(RUNC).reason == judge_docker(ENGINE).reason == ""


@pytest.mark.parametrize(
    ("facts", "tier", "words"),
    [
        (runc(is_root=False), None, "root"),
        (runc(runc=""), None, "runc"),
        (runc(cgroup=""), None, "cgroup"),
        (runc(has_overlay=False), None, "overlayfs"),
        (runc(criu=None), Tier.FILES, "no CRIU"),
        (runc(criu=OLD_CRIU), Tier.FILES, "older than 4.2"),
        (runc(criu_refusal="vdso: Unexpected\nrt vDSO"), Tier.FILES, "vdso: Unexpected rt vDSO"),
        (runc(cgroup="hybrid"), Tier.FULL, ""),
        (runc(cgroup="v1"), Tier.FULL, ""),
    ],
)
def test_what_the_runc_runtime_gives(facts: RuncFacts, tier: Tier | None, words: str) -> None:
    verdict = judge_runc(facts)
    assert verdict.tier is tier
    assert words in verdict.reason


@pytest.mark.parametrize(
    ("facts", "tier", "words"),
    [
        (engine(refusal="connection refused"), None, "belayer setup --docker"),
        (engine(is_local=False), Tier.FILES, "DOCKER_HOST"),
        (engine(experimental=False), Tier.FILES, "experimental"),
        (engine(driver="overlayfs"), Tier.FILES, "overlay2"),
        (engine(knows_criu=False, criu=None), Tier.FILES, "root"),
        (engine(criu=None), Tier.FILES, "no CRIU"),
        (engine(criu=OLD_CRIU), Tier.FILES, "/usr/local/sbin/criu"),
        (engine(criu_refusal="no vDSO"), Tier.FILES, "does not pass its check"),
    ],
)
def test_what_the_docker_runtime_gives(facts: EngineFacts, tier: Tier | None, words: str) -> None:
    verdict = judge_docker(facts)
    assert verdict.tier is tier
    assert words in verdict.reason


@pytest.mark.parametrize(
    ("facts", "name", "status"),
    [
        (on(runc=runc(runc="")), "runc", Status.MISSING),
        (on(runc=runc(runc="", runc_refusal="cannot execute")), "runc", Status.BROKEN),
        (on(runc=runc(criu=None)), "CRIU", Status.MISSING),
        (on(runc=runc(criu=OLD_CRIU)), "CRIU", Status.BROKEN),
        (on(runc=runc(criu_refusal="no")), "CRIU", Status.BROKEN),
        (on(kernel="4.19.0"), "kernel", Status.BROKEN),
        (on(kernel="5.15.0-generic"), "kernel", Status.OK),
        (on(runc=runc(cgroup="")), "cgroups", Status.MISSING),
        (on(userns_refusal="not permitted"), "user namespaces", Status.MISSING),
        (on(sys_resource=False), "CAP_SYS_RESOURCE", Status.MISSING),
        (on(engine=engine(refusal="refused", installed=True)), "Docker Engine", Status.BROKEN),
        (on(engine=engine(refusal="refused", installed=False)), "Docker Engine", Status.MISSING),
        (on(engine=engine(experimental=False)), "Engine: experimental", Status.MISSING),
        (on(engine=engine(criu=None)), "Engine: CRIU", Status.MISSING),
        (on(engine=engine(criu=OLD_CRIU)), "Engine: CRIU", Status.BROKEN),
        (on(store=StoreDisk(Path("/"), "ext4", False, 9 * GIB)), "store", Status.MISSING),
        (on(store=StoreDisk(Path("/"), "xfs", True, 9 * GIB)), "store", Status.OK),
        (on(store=StoreDisk(Path("/"), "btrfs", True, GIB)), "free disk", Status.BROKEN),
    ],
)
def test_each_trouble_has_its_row_and_a_remedy(facts: HostFacts, name: str, status: Status) -> None:
    rows = {row.name: row for row in judge_rows(facts)}
    assert rows[name].status is status
    assert all(bool(row.remedy) is (row.status is not Status.OK) for row in rows.values())


def test_exit_code_is_one_only_when_no_runtime_gives_full(monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(monkeypatch, HOST).exit_code == 0
    assert invoke(monkeypatch, on(engine=engine(refusal="refused"))).exit_code == 0
    assert invoke(monkeypatch, on(runc=runc(criu=None))).exit_code == 0
    assert invoke(monkeypatch, on(runc=runc(criu=None), engine=engine(criu=None))).exit_code == 1


def test_table_ends_with_the_tiers_and_shows_brackets_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = invoke(monkeypatch, on(runc=runc(criu_refusal="[bold]no[/nonsense]")))
    assert answer.exit_code == 0
    last = answer.output.strip().splitlines()[-2:]
    assert last[0].startswith("runc: files (")
    assert "[/nonsense]" in last[0]
    assert last[1] == "docker: full"


def test_json_holds_the_same_report(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = on(engine=engine(refusal="refused"))
    report = json.loads(invoke(monkeypatch, facts, "--json").output)
    assert report == report_json(facts)
    assert report["tiers"] == {"runc": "full", "docker": "none"}
    assert report["full"] is True
    assert [row["name"] for row in report["rows"]] == [row.name for row in judge_rows(facts)]


def test_this_host_can_be_gathered_and_judged() -> None:
    facts = gather_host()
    assert facts.kernel
    assert facts.store.free_bytes > 0
    assert len(judge_rows(facts)) == len(judge_rows(HOST))
    # Two ways to the same answer: the doctor's, and the one the runtimes ask.
    probe.forget()
    verdict = judge_runc(facts.runc)
    assert probe.runtime_tier("runc") == (verdict.tier, verdict.reason)


def test_an_unknown_runtime_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidInput, match="podman"):
        probe.runtime_tier("podman")


def test_capability_is_read_from_the_bounding_set() -> None:
    status = "Name:\tx\nCapBnd:\t000001fffeffffff\nCapAmb:\t0000000000000000\n"
    assert not has_capability(24, status)
    assert has_capability(21, status)
