-- Rented machines: what is owed begins and ends as the cloud's own bill does, and a host is judged by its history.

SET LOCAL statement_timeout = '60s';

ALTER TABLE attempts
    ADD COLUMN absent_at timestamptz,
    -- when the first of its machines began to run, or earlier
    ADD COLUMN running_at timestamptz,
    -- the physical host where the cloud names it, else the offer
    ADD COLUMN host text;

-- The runner needs a transaction, and brokers start after it.
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX attempts_of_host ON attempts (host, ended_at) WHERE state = 'ended';
