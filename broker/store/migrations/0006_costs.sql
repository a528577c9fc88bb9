-- What a job costs beside its hours: prices that move, traffic, storage; the time and the signals that end it.
-- Brokers start after it: none reads the old columns, and none waits for a table that is written anew.
-- squawk-ignore-file adding-field-with-default, ban-drop-column, ban-drop-not-null
-- squawk-ignore-file constraint-missing-not-valid, require-concurrent-index-creation

SET LOCAL statement_timeout = '60s';

ALTER TABLE ledger
    ALTER COLUMN attempt_id DROP NOT NULL,
    ADD COLUMN category text NOT NULL DEFAULT 'compute'
        CONSTRAINT ledger_category CHECK (category IN ('compute', 'egress', 'storage')),
    ADD CONSTRAINT ledger_of_attempt CHECK ((attempt_id IS NULL) = (category = 'storage'));

-- What each machine of an attempt costs from a moment on, as read back from its cloud.
CREATE TABLE price_changes (
    attempt_id text NOT NULL REFERENCES attempts (id),
    since timestamptz NOT NULL,
    usd_per_hour numeric NOT NULL
        CONSTRAINT price_changes_money CHECK (usd_per_hour >= 0 AND usd_per_hour < 'Infinity'),
    read_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX price_changes_of ON price_changes (attempt_id, since, usd_per_hour);
CREATE TRIGGER price_changes_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON price_changes
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

CREATE FUNCTION prices_of(own text) RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT jsonb_agg(jsonb_build_object('since', since, 'usd_per_hour', usd_per_hour::text)
        ORDER BY since, usd_per_hour)
    FROM price_changes WHERE attempt_id = own
$$;

ALTER TABLE attempts
    ADD COLUMN earlier_sent bigint NOT NULL DEFAULT 0,
    ADD COLUMN earlier_received bigint NOT NULL DEFAULT 0,
    -- written by billing; a part of charged_usd
    ADD COLUMN traffic_usd numeric NOT NULL DEFAULT 0
        CONSTRAINT attempts_traffic CHECK (traffic_usd >= 0 AND traffic_usd <= charged_usd),
    -- why it is to end, beside a stop: written once
    ADD COLUMN signal text CONSTRAINT attempts_signal CHECK (
        signal IN ('cap', 'out_of_time', 'idle', 'idle_now', 'hung', 'budget')),
    -- written by the guard
    ADD COLUMN idle text CONSTRAINT attempts_idle CHECK (idle IN ('gpu', 'no_progress', 'download'));
UPDATE attempts SET signal = 'cap' WHERE cap_near;
ALTER TABLE attempts DROP COLUMN lane;
ALTER TABLE attempts DROP COLUMN cap_near;
ALTER TABLE attempts ADD COLUMN lane text GENERATED ALWAYS AS (
    CASE
        WHEN state IN ('planned', 'launching') THEN 'launch'
        WHEN state IN ('booting', 'training') AND NOT stop_requested AND signal IS NULL THEN 'liveness'
        WHEN state IN ('booting', 'training', 'draining') THEN 'interruption'
        WHEN state = 'terminating' THEN 'termination'
    END) STORED;
CREATE INDEX attempts_due ON attempts (lane, due_at) WHERE lane IS NOT NULL;

ALTER TABLE jobs
    -- written by the controllers: seconds for which machines of ended attempts stood
    ADD COLUMN machine_s double precision NOT NULL DEFAULT 0
        CONSTRAINT jobs_machine_s CHECK (machine_s >= 0 AND machine_s < 'Infinity'),
    -- written by the guard
    ADD COLUMN forecast jsonb,
    -- what is kept in the blob store; written by the retention controller
    ADD COLUMN stored jsonb,
    ADD COLUMN stored_due_at timestamptz DEFAULT '-infinity',
    -- kinds of data and when they were deleted; also written by the API
    ADD COLUMN deleted jsonb NOT NULL DEFAULT '{}';
CREATE INDEX jobs_stored ON jobs (stored_due_at) WHERE stored_due_at IS NOT NULL;
CREATE INDEX jobs_origin ON jobs ((spec ->> 'init_from')) WHERE spec ->> 'init_from' IS NOT NULL;

ALTER TABLE uploads
    ADD COLUMN put_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- when its content was deleted: jobs that had it keep copies of their own
    ADD COLUMN gone_at timestamptz;
CREATE INDEX uploads_last ON uploads (put_at) WHERE gone_at IS NULL;

CALL gpubroker_protect('price_changes', 'SELECT', 'EXISTS (SELECT FROM attempts WHERE attempts.id = attempt_id)');
GRANT UPDATE (deleted, stored_due_at) ON jobs TO gpubroker_api;
GRANT UPDATE (put_at, gone_at) ON uploads TO gpubroker_api;
