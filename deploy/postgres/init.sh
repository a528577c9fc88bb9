#!/usr/bin/env bash
# The postgres image runs this once, on an empty volume. Creates a database whose owner is no superuser, and restricts who may
# connect.
set -euo pipefail

psql --username postgres --dbname postgres --no-psqlrc --quiet --set ON_ERROR_STOP=1 <<'SQL'
CREATE ROLE gpubroker LOGIN CREATEROLE; -- to create gpubroker_api, the role of the API: docs/guide/teams.md
CREATE DATABASE gpubroker OWNER gpubroker;
SQL

# Valid once the server starts after this set-up. A process that can open the socket is trusted to be the broker; the superuser
# connects inside this container only.
cat >"$PGDATA/pg_hba.conf" <<'HBA'
local gpubroker gpubroker trust
local all       postgres  peer
HBA
