-- Rows, leases and the ledger. The rules that no writer may break stand here as CHECKs and unique indexes;
-- broker/store/rules/fences.py asks the same ones first, to name what is wrong.

SET LOCAL statement_timeout = '60s';

CREATE TABLE installation (
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    id text NOT NULL
);

CREATE TABLE jobs (
    id text PRIMARY KEY,
    owner text NOT NULL,
    spec jsonb NOT NULL,
    workload jsonb NOT NULL,
    created_at timestamptz NOT NULL,
    -- written by the controllers
    state text NOT NULL,
    reason text NOT NULL,
    attempts bigint NOT NULL,
    retries_used bigint NOT NULL,
    oom_changes bigint NOT NULL,
    finished_at timestamptz,
    -- written by billing
    spent_usd numeric NOT NULL,
    -- written by the API
    cap_usd numeric NOT NULL,
    stop_requested boolean NOT NULL,
    retry_of text,
    idempotency_key text,
    body_sha256 text NOT NULL,
    -- the lease: while it runs, due_at is its end, or earlier when a signal came
    epoch bigint NOT NULL DEFAULT 0,
    due_at timestamptz NOT NULL,
    lease_until timestamptz,
    lease_owner text,
    -- the last event's number: events are numbered under this row's lock, so in the order of their commits
    event_seq bigint NOT NULL,
    CONSTRAINT jobs_state CHECK (state IN (
        'awaiting_approval', 'queued', 'active', 'recovering', 'succeeded', 'capped', 'cancelled', 'failed')),
    CONSTRAINT jobs_finished CHECK (state NOT IN ('succeeded', 'cancelled', 'failed') OR finished_at IS NOT NULL),
    CONSTRAINT jobs_active CHECK (state <> 'active' OR attempts >= 1),
    CONSTRAINT jobs_counts CHECK (attempts >= 0 AND retries_used >= 0 AND oom_changes >= 0),
    CONSTRAINT jobs_money CHECK (cap_usd > 0 AND spent_usd >= 0)
);
CREATE UNIQUE INDEX jobs_key ON jobs (owner, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX jobs_due ON jobs (state, due_at);
CREATE INDEX jobs_listed ON jobs (owner, created_at, id);

CREATE TABLE attempts (
    id text PRIMARY KEY,
    job_id text NOT NULL REFERENCES jobs (id),
    number bigint NOT NULL,
    name text NOT NULL,
    line jsonb NOT NULL,
    created_at timestamptz NOT NULL,
    reserved_usd numeric NOT NULL,
    resume_from jsonb NOT NULL,
    -- written by the controllers
    state text NOT NULL,
    reason text,
    detail text NOT NULL,
    create_sent_at timestamptz,
    launched_by text NOT NULL,
    handles jsonb NOT NULL,
    booted_at timestamptz,
    first_beat_at timestamptz,
    draining_since timestamptz,
    terminating_since timestamptz,
    destroy_failures bigint NOT NULL,
    ended_at timestamptz,
    beat jsonb,
    final jsonb,
    -- written by billing
    charged_usd numeric NOT NULL,
    charged_to timestamptz,
    cap_near boolean NOT NULL,
    -- the job's, repeated here for the lane; written under the lock of the job's row
    stop_requested boolean NOT NULL,
    -- the lease: as for jobs
    epoch bigint NOT NULL DEFAULT 0,
    due_at timestamptz NOT NULL,
    lease_until timestamptz,
    lease_owner text,
    lane text GENERATED ALWAYS AS (
        CASE
            WHEN state IN ('planned', 'launching') THEN 'launch'
            WHEN state IN ('booting', 'training') AND NOT (stop_requested OR cap_near) THEN 'liveness'
            WHEN state IN ('booting', 'training', 'draining') THEN 'interruption'
            WHEN state = 'terminating' THEN 'termination'
        END) STORED,
    CONSTRAINT attempts_number UNIQUE (job_id, number),
    CONSTRAINT attempts_state CHECK (state IN (
        'planned', 'launching', 'booting', 'training', 'draining', 'terminating', 'ended')),
    CONSTRAINT attempts_create_sent CHECK (state IN ('planned', 'ended') OR create_sent_at IS NOT NULL),
    CONSTRAINT attempts_ended CHECK ((state = 'ended') = (ended_at IS NOT NULL)),
    CONSTRAINT attempts_reason CHECK (state NOT IN ('draining', 'terminating', 'ended') OR reason IS NOT NULL),
    CONSTRAINT attempts_counts CHECK (number >= 1 AND destroy_failures >= 0),
    CONSTRAINT attempts_money CHECK (reserved_usd >= 0 AND charged_usd >= 0)
);
CREATE UNIQUE INDEX one_live ON attempts (job_id) WHERE state <> 'ended';
CREATE INDEX attempts_due ON attempts (lane, due_at) WHERE lane IS NOT NULL;

CREATE TABLE ledger (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id text NOT NULL REFERENCES jobs (id),
    attempt_id text NOT NULL REFERENCES attempts (id),
    kind text NOT NULL CONSTRAINT ledger_kind CHECK (kind IN ('reservation', 'charge', 'release', 'adjustment')),
    usd numeric NOT NULL CONSTRAINT ledger_money CHECK (usd >= 0),
    note text NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX ledger_of_job ON ledger (job_id, id);

CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only: write a new entry instead', TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER ledger_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

CREATE TABLE events (
    job_id text NOT NULL REFERENCES jobs (id),
    seq bigint NOT NULL CHECK (seq >= 1),
    kind text NOT NULL,
    message text NOT NULL,
    attempt_id text,
    data jsonb NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (job_id, seq)
);

-- Events that a notifier has yet to have; delivered ones are deleted.
CREATE TABLE outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id text NOT NULL,
    seq bigint NOT NULL,
    hidden_until timestamptz NOT NULL DEFAULT '-infinity',
    lease_owner text,
    UNIQUE (job_id, seq),
    FOREIGN KEY (job_id, seq) REFERENCES events (job_id, seq)
);

CREATE TABLE offer_blocks (
    offer_id text PRIMARY KEY,
    reason text NOT NULL,
    until timestamptz NOT NULL
);

CREATE TABLE tokens (
    id text PRIMARY KEY,
    owner text NOT NULL,
    scopes text[] NOT NULL,
    created_at timestamptz NOT NULL,
    note text NOT NULL,
    secret_sha256 text NOT NULL UNIQUE
);

CREATE TABLE secrets (
    owner text NOT NULL,
    name text NOT NULL,
    sealed bytea NOT NULL,
    PRIMARY KEY (owner, name)
);

CREATE TABLE uploads (
    owner text NOT NULL,
    sha256 text NOT NULL,
    bytes bigint NOT NULL CHECK (bytes >= 0),
    name text NOT NULL,
    summary jsonb,
    PRIMARY KEY (owner, sha256)
);
