-- Policies: what teams, users and the installation may spend, and what they have spent by the quarter-hour.

-- Rows are rewritten and scanned once, before any broker of this version starts.
-- squawk-ignore-file adding-field-with-default, constraint-missing-not-valid

SET LOCAL statement_timeout = '60s';

-- One row a name for ever: admissions lock it, its versions count on over a deletion.
CREATE TABLE policies (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- NULL: of every team
    team text REFERENCES teams (name) ON DELETE CASCADE,
    -- NULL: of every user
    person text,
    name text NOT NULL,
    version bigint NOT NULL CONSTRAINT policies_version CHECK (version >= 1),
    -- NULL: deleted
    document jsonb,
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    changed_by text NOT NULL
);
-- The runner needs a transaction, and brokers start after it.
-- squawk-ignore require-concurrent-index-creation
CREATE UNIQUE INDEX policies_name ON policies (COALESCE(team, ''), name);

CREATE TABLE policy_versions (
    policy_id bigint NOT NULL REFERENCES policies (id) ON DELETE CASCADE,
    team text,
    version bigint NOT NULL,
    document jsonb,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor text NOT NULL,
    PRIMARY KEY (policy_id, version)
);

-- Thresholds that people were told of: not again while `at` is within the budget's window.
CREATE TABLE policy_told (
    policy_id bigint NOT NULL REFERENCES policies (id) ON DELETE CASCADE,
    budget text NOT NULL,
    share numeric NOT NULL,
    action text NOT NULL,
    at timestamptz NOT NULL,
    PRIMARY KEY (policy_id, budget, share, action, at)
);

-- NaN is above everything in PostgreSQL, so an upper bound keeps it out.
CREATE TABLE usage (
    team text NOT NULL,
    owner text NOT NULL,
    bucket timestamptz NOT NULL CONSTRAINT usage_bucket CHECK (bucket = date_bin('15 minutes', bucket, 'epoch')),
    usd numeric NOT NULL CONSTRAINT usage_money CHECK (usd >= 0 AND usd < 'Infinity'),
    PRIMARY KEY (team, owner, bucket)
);
INSERT INTO usage (team, owner, bucket, usd)
SELECT j.team, j.owner, date_bin('15 minutes', l.at, 'epoch'), sum(l.usd)
FROM ledger l JOIN jobs j ON j.id = l.job_id
WHERE l.kind IN ('charge', 'adjustment') GROUP BY 1, 2, 3;

-- Whoever writes to the ledger counts; keys in order, so that no two transactions wait in a circle.
CREATE FUNCTION count_usage() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO usage (team, owner, bucket, usd)
    SELECT j.team, j.owner, date_bin('15 minutes', e.at, 'epoch'), sum(e.usd)
    FROM entries e JOIN jobs j ON j.id = e.job_id
    WHERE e.kind IN ('charge', 'adjustment') GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
    ON CONFLICT (team, owner, bucket) DO UPDATE SET usd = usage.usd + excluded.usd;
    RETURN NULL;
END $$;
CREATE TRIGGER ledger_usage AFTER INSERT ON ledger
    REFERENCING NEW TABLE AS entries FOR EACH STATEMENT EXECUTE FUNCTION count_usage();

ALTER TABLE jobs
    -- the highest cap that somebody has approved; written by the API
    ADD COLUMN approved_usd numeric CONSTRAINT jobs_approved CHECK (approved_usd > 0 AND approved_usd < 'Infinity'),
    ADD COLUMN priority bigint GENERATED ALWAYS AS (COALESCE((spec ->> 'priority')::bigint, 0)) STORED,
    ADD CONSTRAINT jobs_finite CHECK (cap_usd < 'Infinity' AND spent_usd < 'Infinity');
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX jobs_queue ON jobs (state, priority DESC, created_at, id);

ALTER TABLE attempts
    ADD COLUMN gpus bigint GENERATED ALWAYS AS (
        (line #>> '{offer,gpus}')::bigint * COALESCE((line ->> 'nodes')::bigint, 1)) STORED,
    ADD CONSTRAINT attempts_finite CHECK (reserved_usd < 'Infinity' AND charged_usd < 'Infinity');
ALTER TABLE ledger ADD CONSTRAINT ledger_finite CHECK (usd < 'Infinity');

CALL gpubroker_protect('policies', 'SELECT, INSERT, UPDATE (person, version, document, changed_at, changed_by)');
CALL gpubroker_protect('policy_versions', 'SELECT, INSERT');
CALL gpubroker_protect('policy_told', '');
CALL gpubroker_protect('usage', 'SELECT');
GRANT UPDATE (approved_usd) ON jobs TO gpubroker_api;
