#!/bin/sh
# CRIU's action script in a restore: the network namespace it has made is empty, and what it restores next may be
# bound to the loopback.
[ "$CRTOOLS_SCRIPT_ACTION" = setup-namespaces ] || exit 0
exec nsenter -t "$CRTOOLS_INIT_PID" -n ip link set lo up
