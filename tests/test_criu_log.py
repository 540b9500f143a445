"""What CRIU says, and what it means for the user."""

from __future__ import annotations

import pytest

from belayer_env.errors import CheckpointRefused, StoreFull
from belayer_env.sandbox.criu_log import refusal, restore_failure

LOG = """\
(00.000086) Running on host Linux 6.18.0
(00.044288) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
(00.055689) {}
(00.055706) Error (criu/cr-dump.c:1545): Dump files (pid: 5950) failed with -1
(00.056383) Error (criu/cr-dump.c:1975): Dumping FAILED.
"""


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("Error (criu/files-reg.c:1790): Can't lookup mount=43 for fd=2 path=/x", "outside-file"),
        (
            "Error (criu/files-reg.c:967): Can't dump ghost file /t of 30000000 size, increase limit",
            "ghost-too-big",
        ),
        ("Error (criu/fsnotify.c:284): fsnotify: Can't dump that handle", "inotify"),
        ("Error (criu/io_uring.c:10): io_uring is not supported", "io_uring"),
    ],
)
def test_a_refusal_names_its_cause_and_process(line: str, cause: str) -> None:
    fault = refusal(LOG.format(line), ghost_bytes=1000)
    assert isinstance(fault, CheckpointRefused)
    assert fault.cause == cause
    assert fault.pid == 5950
    assert "RLIMIT_NOFILE" not in str(fault)


def test_a_ghost_that_is_too_big_names_the_setting() -> None:
    log = LOG.format(
        "Error (criu/files-reg.c:967): Can't dump ghost file /t of 30000000 size, increase limit"
    )
    assert "Limits.ghost_bytes is 1000" in str(refusal(log, ghost_bytes=1000))


def test_a_full_disk_is_no_refusal() -> None:
    log = LOG.format("Error (criu/image.c:10): Can't write: No space left on device")
    assert isinstance(refusal(log, ghost_bytes=1), StoreFull)


@pytest.mark.parametrize("log", ["", "noise\n", "\0\xff"])
def test_no_log_is_told_as_such(log: str) -> None:
    fault = refusal(log, ghost_bytes=1)
    assert isinstance(fault, CheckpointRefused)
    assert "no word" in str(fault)
    assert "exited with 3" in str(restore_failure(log, 3))


def test_a_failed_restore_shows_its_first_errors() -> None:
    message = str(restore_failure(LOG.format("Error (criu/x.c:1): first"), 1))
    assert message.index("first") < message.index("Dump files")
    assert "(criu/" not in message
