#!/usr/bin/env bash
# The postgres image runs this once, on an empty volume: a database for a role that is no superuser, and who may connect.
set -euo pipefail

psql --username postgres --dbname postgres --no-psqlrc --quiet --set ON_ERROR_STOP=1 <<'SQL'
CREATE ROLE gpubroker LOGIN CREATEROLE; -- it makes gpubroker_api, as which the API asks: docs/guide/teams.md
CREATE DATABASE gpubroker OWNER gpubroker;
SQL

# Counts from the server's real start on. Who can open the socket is the broker; the superuser works inside this container only.
cat >"$PGDATA/pg_hba.conf" <<'HBA'
local gpubroker gpubroker trust
local all       postgres  peer
HBA
