-- What ended attempts showed of speed and memory, for later estimates; and a job's plan after its memory ran out.
-- Brokers start after it: none reads the old column.
-- squawk-ignore-file ban-drop-column, constraint-missing-not-valid

SET LOCAL statement_timeout = '60s';

ALTER TABLE jobs
    DROP COLUMN oom_changes,
    -- written by the controllers
    ADD COLUMN remedy jsonb,
    ADD CONSTRAINT jobs_counts CHECK (attempts >= 0 AND retries_used >= 0);

-- Of all teams together, and of none by name: what is kept names no model, data or person.
CREATE TABLE observations (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    attempt_id text NOT NULL CONSTRAINT observations_once UNIQUE REFERENCES attempts (id),
    hardware text NOT NULL,
    method text NOT NULL,
    family text NOT NULL,
    seen jsonb NOT NULL
);
CREATE INDEX observations_latest ON observations (hardware, method, family, id DESC);
CREATE TRIGGER observations_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON observations
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CALL gpubroker_protect('observations', '');
