#!/bin/sh
# shutdown, poweroff, halt: process 1 ends the machine on this signal. A requested delay is ignored.
[ "$(id -u)" -eq 0 ] || { echo "Must be root." >&2; exit 1; }
kill -USR1 1
