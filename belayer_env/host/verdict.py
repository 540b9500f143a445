"""What a host's facts amount to: the doctor's rows and each runtime's tier. Pure."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from belayer_env import paths
from belayer_env.host.criu_find import MINIMUM, CriuBinary
from belayer_env.host.facts import EngineFacts, HostFacts, RuncFacts
from belayer_env.spec import GIB, Tier

__all__ = ["Row", "Status", "Verdict", "judge_docker", "judge_rows", "judge_runc"]

# pidfd_open (5.3) tells of a container's death at once; CRIU's own needs lie below.
OLDEST_KERNEL = (5, 3)
LOW_DISK_BYTES = 4 * GIB

SETUP = "belayer setup"
SETUP_DOCKER = "belayer setup --docker"
NEEDED_CRIU = ".".join(map(str, MINIMUM))


class Status(enum.StrEnum):
    """OK; MISSING: not there; BROKEN: there, and not fit."""

    OK = "ok"
    MISSING = "missing"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the doctor's table; ``remedy`` is the command that mends it, empty when it is ok."""

    name: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The best ``tier`` a runtime gives here, None for not at all, and the ``reason`` it is no better."""

    tier: Tier | None
    reason: str = ""

    def __str__(self) -> str:
        return self.tier.value if self.tier is not None else "none"


def judge_runc(facts: RuncFacts) -> Verdict:
    """FULL needs a CRIU that passes its check; FILES needs root, runc, a cgroup freezer and overlayfs."""
    if not facts.is_root:
        return Verdict(None, "the runc runtime needs root: sudo belayer ...")
    if not facts.runc:
        return Verdict(None, f"runc is missing or does not start: {SETUP}")
    if not facts.cgroup:
        return Verdict(None, "no cgroup freezer is mounted under /sys/fs/cgroup")
    if not facts.has_overlay:
        return Verdict(None, "this kernel has no overlayfs")
    refusal = _criu_refusal(facts.criu, facts.criu_refusal)
    return Verdict(Tier.FILES, f"{refusal}: {SETUP}") if refusal else Verdict(Tier.FULL)


def judge_docker(facts: EngineFacts) -> Verdict:
    """FULL needs a local Engine in experimental mode, on overlay2, that finds a working CRIU."""
    if not facts.answers:
        return Verdict(None, f"no Docker Engine answers: {SETUP_DOCKER}")
    if not facts.is_local:
        return Verdict(Tier.FILES, "the Engine is on another host: unset DOCKER_HOST")
    if not facts.experimental:
        return Verdict(Tier.FILES, f"the Engine is not in experimental mode: {_experimental_remedy()}")
    if facts.driver != "overlay2":
        return Verdict(
            Tier.FILES, f"the Engine stores layers by {facts.driver or 'an unknown driver'}, not overlay2"
        )
    if not facts.knows_criu:
        return Verdict(Tier.FILES, "the Engine's PATH cannot be read, so its CRIU is not known: run as root")
    refusal = _criu_refusal(facts.criu, facts.criu_refusal)
    if refusal:
        return Verdict(Tier.FILES, f"for the Engine, {refusal}: {_engine_criu_remedy()}")
    return Verdict(Tier.FULL)


def judge_rows(facts: HostFacts) -> list[Row]:
    """The doctor's table, in the order it is shown."""
    return [
        _runc_row(facts.runc),
        _criu_row(facts.runc),
        _kernel_row(facts.kernel),
        _cgroup_row(facts.runc.cgroup),
        _userns_row(facts.userns_refusal),
        _capability_row(facts.sys_resource),
        *_engine_rows(facts.engine),
        _store_row(facts),
        _disk_row(facts.store.free_bytes),
    ]


def _runc_row(facts: RuncFacts) -> Row:
    if facts.runc:
        return Row("runc", Status.OK, facts.runc)
    if facts.runc_refusal:
        return Row("runc", Status.BROKEN, facts.runc_refusal, "apt-get install --reinstall runc")
    return Row("runc", Status.MISSING, "not on PATH", SETUP)


def _criu_row(facts: RuncFacts) -> Row:
    if facts.criu is None:
        return Row("CRIU", Status.MISSING, f"{NEEDED_CRIU} or newer is needed", SETUP)
    if refusal := _criu_refusal(facts.criu, facts.criu_refusal):
        return Row("CRIU", Status.BROKEN, refusal, SETUP)
    return Row("CRIU", Status.OK, f"{facts.criu}, criu check passes")


def _kernel_row(release: str) -> Row:
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if numbers >= OLDEST_KERNEL:
        return Row("kernel", Status.OK, release)
    return Row("kernel", Status.BROKEN, release, f"boot Linux {'.'.join(map(str, OLDEST_KERNEL))} or newer")


def _cgroup_row(cgroup: str) -> Row:
    if cgroup:
        return Row("cgroups", Status.OK, {"hybrid": "v1 and v2 mixed"}.get(cgroup, cgroup))
    return Row("cgroups", Status.MISSING, "no freezer", "mount -t cgroup2 none /sys/fs/cgroup")


def _userns_row(refusal: str) -> Row:
    if not refusal:
        return Row("user namespaces", Status.OK, "one could be made")
    return Row("user namespaces", Status.MISSING, refusal, "sysctl -w user.max_user_namespaces=15000")


def _capability_row(there: bool) -> Row:
    if there:
        return Row("CAP_SYS_RESOURCE", Status.OK, "in the bounding set")
    return Row(
        "CAP_SYS_RESOURCE",
        Status.MISSING,
        "processes of other users are dumped only in a user namespace",
        "give this machine or container the capability, e.g. docker run --cap-add SYS_RESOURCE",
    )


def _engine_rows(facts: EngineFacts) -> list[Row]:
    if not facts.answers:
        status, found = (
            (Status.BROKEN, "installed, does not answer")
            if facts.installed
            else (Status.MISSING, "not installed")
        )
        return [
            Row("Docker Engine", status, found, SETUP_DOCKER),
            Row("Engine: experimental", Status.MISSING, "no Engine", SETUP_DOCKER),
            Row("Engine: CRIU", Status.MISSING, "no Engine", SETUP_DOCKER),
        ]
    rows = [Row("Docker Engine", Status.OK, f"{facts.version}, {facts.driver}")]
    if facts.experimental:
        rows.append(Row("Engine: experimental", Status.OK, "on"))
    else:
        rows.append(Row("Engine: experimental", Status.MISSING, "off", _experimental_remedy()))
    if not facts.knows_criu:
        rows.append(Row("Engine: CRIU", Status.MISSING, "its PATH cannot be read", "run the doctor as root"))
    elif refusal := _criu_refusal(facts.criu, facts.criu_refusal):
        status = Status.MISSING if facts.criu is None else Status.BROKEN
        rows.append(Row("Engine: CRIU", status, refusal, _engine_criu_remedy()))
    else:
        rows.append(Row("Engine: CRIU", Status.OK, str(facts.criu)))
    return rows


def _store_row(facts: HostFacts) -> Row:
    store = facts.store
    if store.file_system == "btrfs":
        return Row("store", Status.OK, f"btrfs at {store.directory}: snapshots")
    if store.reflink:
        return Row("store", Status.OK, f"{store.file_system} at {store.directory}: reflinks")
    return Row("store", Status.MISSING, f"{store.file_system} at {store.directory}: only copies", SETUP)


def _disk_row(free_bytes: int) -> Row:
    found = f"{free_bytes / GIB:.1f} GiB for the store"
    if free_bytes >= LOW_DISK_BYTES:
        return Row("free disk", Status.OK, found)
    return Row("free disk", Status.BROKEN, found, "belayer gc")


def _criu_refusal(criu: CriuBinary | None, check: str) -> str:
    if criu is None:
        return f"there is no CRIU ({NEEDED_CRIU} or newer is needed)"
    if not criu.is_recent:
        return f"CRIU {criu} is older than {NEEDED_CRIU}"
    return f"CRIU {criu} does not pass its check ({' '.join(check.split())})" if check else ""


def _experimental_remedy() -> str:
    return 'put "experimental": true into /etc/docker/daemon.json and restart dockerd'


def _engine_criu_remedy() -> str:
    return (
        f"ln -s {paths.criu_prefix()}/usr/sbin/criu /usr/local/sbin/criu, then restart dockerd and containerd"
    )
