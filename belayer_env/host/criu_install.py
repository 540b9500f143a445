"""A CRIU new enough for this kernel, with its own libc, in a private prefix: the host's libraries stay as
they are.

Debian 12 and 13 and Ubuntu 24.04 carry one that is too old. A newer suite of the same archive has a good one;
it is downloaded with its whole dependency closure, unpacked aside, and bound to that prefix by its
interpreter and rpath."""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from belayer_env import paths
from belayer_env.errors import SetupError
from belayer_env.host.apt import (
    KEYRINGS,
    Distribution,
    PrivateApt,
    Source,
    archive_sources,
    host_distribution,
    host_sources,
)
from belayer_env.host.command import run, which
from belayer_env.host.criu_find import MINIMUM, CriuBinary, check_criu, find_criu, forget, parse_version

__all__ = ["candidate_suites", "good_criu", "install_criu"]

# Suites to look in, oldest first: the first whose CRIU is recent enough and passes its check is taken.
# Debian's aliases outlive its codenames; the codenames serve mirrors without aliases.
SUITES = {
    "debian": ("stable", "testing", "unstable", "forky", "sid"),
    "ubuntu": ("resolute", "devel"),
}
COMPONENTS = {"debian": ("main",), "ubuntu": ("main", "universe")}

TRIPLETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}


def good_criu() -> CriuBinary | None:
    """The CRIU in use, where it is recent enough and `criu check` passes; else None."""
    binary = find_criu()
    return binary if binary is not None and binary.is_recent and not check_criu(binary) else None


def candidate_suites(
    distribution: Distribution, archive: Source | None, *, mirror: str = "", suite: str = ""
) -> list[Source]:
    """The sources to look for CRIU in, in order. ``archive`` is the host's own main one, ``mirror`` and
    ``suite`` what the user named; a named mirror is taken for Debian's when this distribution's name is not
    in it.

    Raises:
        SetupError: neither is known, or the keyring is missing."""
    uri = mirror or (archive.uri if archive else "")
    kind = distribution.id if distribution.id in SUITES else "debian"
    if mirror:
        kind = next((name for name in SUITES if name in mirror), kind)
    if not uri:
        raise SetupError(
            f"CRIU {'.'.join(map(str, MINIMUM))} or newer is needed, and apt's sources on this host "
            f"({distribution.name}) name no archive of the distribution to take it from: "
            "belayer setup --criu-mirror URL --criu-suite NAME, or put one on PATH or in BELAYER_CRIU"
        )
    signed_by = archive.signed_by if archive and not mirror else ""
    if not signed_by:
        keyring = KEYRINGS[kind]
        if not keyring.exists() and mirror:
            raise SetupError(
                f"{mirror} is signed with keys that this host does not have: "
                f"apt-get install {kind}-archive-keyring"
            )
        signed_by = str(keyring) if keyring.exists() else ""
    suites = (suite,) if suite else SUITES[kind]
    return [Source(uri, (name,), COMPONENTS[kind], signed_by) for name in suites]


def install_criu(
    *, mirror: str = "", suite: str = "", report: Callable[[str], None] = lambda _: None
) -> CriuBinary:
    """Put a CRIU that passes `criu check` into `paths.criu_prefix()` and return it. Atomic: a killed call
    leaves no prefix, or the whole one. About 10 s; ``report`` is told what is being done.

    Raises:
        SetupError: no suite has one that works here; says for each suite why."""
    for command in ("apt-get", "dpkg", "patchelf"):
        if which(command) is None:
            raise SetupError(
                f"`{command}` is needed to install CRIU, and this system does not have it: build CRIU "
                f"{'.'.join(map(str, MINIMUM))} or newer and put it on PATH, or name it in BELAYER_CRIU"
            )
    distribution = host_distribution()
    own = archive_sources(host_sources(), distribution)
    prefix = paths.criu_prefix()
    prefix.parent.mkdir(parents=True, exist_ok=True)
    refusals: list[str] = []
    failed: set[str] = set()
    for source in candidate_suites(distribution, own[0] if own else None, mirror=mirror, suite=suite):
        with tempfile.TemporaryDirectory(prefix="criu.new-", dir=prefix.parent) as aside:
            refusal = _try_suite(source, Path(aside), prefix, failed, report)
        if not refusal:
            forget()
            binary = good_criu()
            if binary is None:
                raise SetupError(
                    f"CRIU was installed in {prefix}, but does not run there: run `belayer doctor`"
                )
            return binary
        refusals.append(f"  {source.suites[0]}: {refusal}")
    raise SetupError(
        "No CRIU that works on this kernel was found:\n" + "\n".join(refusals) + "\n"
        "Name an archive that has one: belayer setup --criu-mirror URL --criu-suite NAME"
    )


def _try_suite(
    source: Source, aside: Path, prefix: Path, failed: set[str], report: Callable[[str], None]
) -> str:
    """Install from this one suite; empty on success, else why not. ``failed``: versions not to try again."""
    suite = source.suites[0]
    report(f"looking for CRIU in {suite}")
    apt = PrivateApt(aside / "apt", [source])
    updated = apt.update()
    if not updated.ok:
        if (
            "NO_PUBKEY" in updated.output
            or "is not signed" in updated.output
            or "Missing key" in updated.output
        ):
            keys = source.signed_by or "this host"
            return f"it is signed with keys that {keys} lacks (update the keyring package)"
        return f"its lists cannot be had: {updated.tail(1)}"
    text = apt.candidate("criu")
    version = parse_version(text)
    if version is None or version < MINIMUM:
        return f"its CRIU is {text}, which is too old" if text else "it has no CRIU"
    if text in failed:
        return f"it has the same CRIU {text}"
    report(f"downloading CRIU {text} from {suite}")
    files = apt.download(["criu"])
    report(f"unpacking {len(files)} packages")
    fresh = aside / "prefix"
    _unpack(files, fresh)
    # patchelf writes the final paths; until the rename the loader is called by hand to try it.
    loader, libraries = _bind(fresh, prefix)
    trial = run([loader, "--library-path", libraries, fresh / "usr/sbin/criu", "check"], timeout_s=30)
    if not trial.ok:
        failed.add(text)
        return f"CRIU {text} does not pass `criu check` here: {trial.tail(3)}"
    _replace(fresh, prefix)
    return ""


def _unpack(files: Sequence[Path], into: Path) -> None:
    into.mkdir()
    # Merged /usr: the packages of these suites put everything there, and a stray /lib must land beside it.
    for name in ("lib", "lib64", "bin", "sbin"):
        (into / "usr" / name).mkdir(parents=True)
        (into / name).symlink_to(f"usr/{name}")
    for file in files:
        run(["dpkg", "-x", file, into], timeout_s=60).require(f"Unpacking {file.name}")


def _bind(fresh: Path, prefix: Path) -> tuple[Path, Path]:
    machine = platform.machine()
    if machine not in TRIPLETS:
        raise SetupError(f"No private CRIU is made for {machine}: put one on PATH or name it in BELAYER_CRIU")
    libraries = Path("usr/lib") / TRIPLETS[machine]
    loader = libraries / LOADERS[machine]
    if not (fresh / loader).exists():
        raise SetupError(f"The downloaded libc has no {loader}")
    # DT_RPATH, not RUNPATH: the libraries' own dependencies must be found by it too.
    run(
        [
            "patchelf", "--set-interpreter", prefix / loader, "--force-rpath",
            "--set-rpath", prefix / libraries, fresh / "usr/sbin/criu",
        ],
        timeout_s=60,
    ).require("Binding CRIU to its prefix")  # fmt: skip
    return fresh / loader, fresh / libraries


def _replace(fresh: Path, prefix: Path) -> None:
    if prefix.exists():
        old = Path(tempfile.mkdtemp(prefix="criu.old-", dir=prefix.parent))
        prefix.rename(old / "prefix")
        fresh.rename(prefix)
        shutil.rmtree(old, ignore_errors=True)
    else:
        fresh.rename(prefix)
