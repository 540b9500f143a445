"""apt: the host's own archive by its sources, and downloads from a suite that leave the host as it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from belayer_env.errors import SetupError
from belayer_env.host.command import Done, run

__all__ = [
    "Distribution",
    "PrivateApt",
    "Source",
    "archive_sources",
    "host_distribution",
    "host_sources",
    "parse_deb822",
    "parse_list",
    "parse_os_release",
]

KEYRINGS = {
    "debian": Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    "ubuntu": Path("/usr/share/keyrings/ubuntu-archive-keyring.gpg"),
}
APT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Distribution:
    """``id`` ("debian", "ubuntu"), ``codename`` ("bookworm", "noble") and the ``name`` that people know."""

    id: str
    codename: str
    name: str

    @property
    def keyring(self) -> Path | None:
        """The keys its archive is signed with, where they lie on this host."""
        path = KEYRINGS.get(self.id)
        return path if path is not None and path.exists() else None


@dataclass(frozen=True, slots=True)
class Source:
    """One archive in apt's sources. ``signed_by`` is a keyring's path, "embedded", or empty."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""

    def lines(self) -> list[str]:
        """It in the one-line style, a line per suite."""
        option = f"[signed-by={self.signed_by}] " if self.signed_by else ""
        return [f"deb {option}{self.uri} {suite} {' '.join(self.components)}" for suite in self.suites]


def parse_os_release(text: str) -> Distribution:
    """The distribution that an os-release file names; what is missing in it is empty."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    fields = {key.strip(): value.strip().strip("\"'") for key, value in pairs}
    codename = fields.get("VERSION_CODENAME", "")
    return Distribution(fields.get("ID", ""), codename, fields.get("PRETTY_NAME", fields.get("ID", "")))


def parse_list(text: str) -> list[Source]:
    """The binary archives of a one-line-style file; what is no such line is passed over."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)\s*([^#]*)", line)
        if match is None:
            continue
        options, uri, suite, components = match.groups()
        signed = re.search(r"signed-by=(\S+)", options or "")
        found.append(Source(uri, (suite,), tuple(components.split()), signed.group(1) if signed else ""))
    return found


def parse_deb822(text: str) -> list[Source]:
    """The enabled binary archives of a deb822 file, one per URI."""
    found = []
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        key = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace() and key:
                fields[key] += " " + line.strip()
            elif ":" in line:
                key, value = line.split(":", 1)
                key = key.strip().lower()
                fields[key] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "").lower() == "no":
            continue
        signed_by = fields.get("signed-by", "")
        for uri in fields.get("uris", "").split():
            found.append(
                Source(
                    uri,
                    tuple(fields.get("suites", "").split()),
                    tuple(fields.get("components", "").split()),
                    # A key written into the file is nobody's archive keyring, and must not look like none.
                    signed_by if signed_by.startswith("/") or not signed_by else "embedded",
                )
            )
    return found


def archive_sources(sources: Iterable[Source], distribution: Distribution) -> list[Source]:
    """The distribution's own archive among ``sources``: the main one first, then updates and security.

    Its own: signed with its archive keyring, or with no keyring named; of a suite of its codename; with
    "main" in it, or beside one that has. A third party that uses the codename as its suite names a keyring of
    its own."""
    own = [_narrow(source, distribution) for source in sources]
    own = [source for source in own if source.suites]
    archives = {source.uri for source in own if "main" in source.components}
    own = [source for source in own if source.uri in archives]
    # Stable: among equals the order of the host's files holds.
    return sorted(
        own, key=lambda source: (distribution.codename not in source.suites, "main" not in source.components)
    )


def _narrow(source: Source, distribution: Distribution) -> Source:
    """The part of ``source`` that the host runs on: no backports, no proposed, nothing of a third party."""
    trusted = not source.signed_by or f"{distribution.id}-archive" in source.signed_by
    wanted = {distribution.codename + suffix for suffix in ("", "-updates", "-security", "/updates")}
    suites = tuple(suite for suite in source.suites if trusted and suite in wanted)
    return Source(source.uri, suites, source.components, source.signed_by)


def host_distribution() -> Distribution:
    """The one this host runs."""
    for path in (Path("/etc/os-release"), Path("/usr/lib/os-release")):
        if path.exists():
            return parse_os_release(path.read_text())
    return Distribution("", "", "an unknown system")


def host_sources(etc: Path = Path("/etc/apt")) -> list[Source]:
    """All archives in the host's apt sources, in both forms."""
    found = []
    for path in [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]:
        if not path.is_file():
            continue
        text = path.read_text(errors="replace")
        if path.suffix == ".sources":
            found += parse_deb822(text)
        elif path.suffix == ".list":
            found += parse_list(text)
    return found


class PrivateApt:
    """apt with sources, lists, cache and dpkg status of its own under ``root``; the host's stay untouched.

    To it nothing is installed, so that a download brings a package with its whole dependency closure.
    The host's other settings (a proxy, say) hold."""

    def __init__(self, root: Path, sources: Sequence[Source]) -> None:
        self._root = root
        for directory in ("lists/partial", "cache/archives/partial"):
            (root / directory).mkdir(parents=True, exist_ok=True)
        (root / "status").touch()
        lines = [line for source in sources for line in source.lines()]
        (root / "sources.list").write_text("\n".join(lines) + "\n")
        (root / "apt.conf").write_text(
            f"""
Dir::State::Lists "{root}/lists";
Dir::State::status "{root}/status";
Dir::State::extended_states "{root}/extended_states";
Dir::Cache "{root}/cache";
Dir::Etc::sourcelist "{root}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
APT::Get::Assume-Yes "true";
APT::Default-Release "";
Acquire::Languages "none";
Acquire::Retries "2";
Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled "false";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Post-Invoke;
#clear DPkg::Pre-Install-Pkgs;
"""
        )

    def update(self) -> Done:
        """Fetch the lists. Fails where a suite is absent or signed with keys the host does not have."""
        return self._apt("apt-get", "-o", "APT::Update::Error-Mode=any", "update")

    def candidate(self, package: str) -> str:
        """The version these sources would install; empty where they have none."""
        answer = self._apt("apt-cache", "policy", package).output
        found = re.search(r"Candidate:\s*(\S+)", answer)
        return found.group(1) if found and found.group(1) != "(none)" else ""

    def download(
        self, packages: Sequence[str], *, on_line: Callable[[str], None] | None = None
    ) -> list[Path]:
        """The packages and all they depend on, as files.

        Raises:
            SetupError: apt could not."""
        words = ("apt-get", "--download-only", "--no-install-recommends", "install", *packages)
        self._apt(*words, on_line=on_line).require(f"Downloading {', '.join(packages)}")
        files = sorted((self._root / "cache" / "archives").glob("*.deb"))
        if not files:
            raise SetupError(f"apt downloaded nothing for {', '.join(packages)}")
        return files

    def _apt(self, command: str, *words: str, on_line: Callable[[str], None] | None = None) -> Done:
        argv = (command, "-c", str(self._root / "apt.conf"), *words)
        return run(argv, timeout_s=APT_TIMEOUT_S, on_line=on_line, env={"DEBIAN_FRONTEND": "noninteractive"})
