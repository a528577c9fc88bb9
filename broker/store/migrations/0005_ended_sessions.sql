-- Sessions of browsers that were signed out before their end; every broker refuses their cookies.
SET LOCAL statement_timeout = '60s';

CREATE TABLE ended_sessions (
    id text PRIMARY KEY CONSTRAINT ended_sessions_id CHECK (id <> '' AND length(id) <= 64),
    -- from then on the cookie is refused by its age
    until timestamptz NOT NULL
);
CREATE INDEX ended_sessions_until ON ended_sessions (until);
-- A row names no team, and only the daemon's own role reads and writes it.
CALL gpubroker_protect('ended_sessions', '');
