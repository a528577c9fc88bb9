-- The initial schema: jobs, attempts and the ledger, with the rules that no writer may break as CHECKs and unique
-- indexes. broker/store/rules/fences.py checks the same rules first, so that errors name the rule.
--
-- Sections: roles and functions; teams; jobs, attempts and money; policies; channels and deliveries; tokens, secrets,
-- uploads and audit; row-level security.

SET LOCAL statement_timeout = '60s';

-- ------------------------------------------------------------------------------------------------ roles and functions

-- The daemon keeps the role that migrates. The API uses the role gpubroker_api, which sees the rows of one team. Each
-- transaction sets that team in the setting gpubroker.team; without the setting the role sees no rows.
-- Roles belong to the whole cluster, so the migration of another database may create this role at the same moment.
DO $$
DECLARE
    fix constant text := format('ask an administrator to run: CREATE ROLE gpubroker_api NOLOGIN; '
        'GRANT gpubroker_api TO %I;', current_user);
    right_to_become constant text := CASE WHEN current_setting('server_version_num')::int < 160000
        THEN 'MEMBER' ELSE 'SET' END;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'gpubroker_api') THEN
        BEGIN
            CREATE ROLE gpubroker_api NOLOGIN;
        EXCEPTION
            WHEN duplicate_object OR unique_violation THEN NULL;
            WHEN insufficient_privilege THEN RAISE EXCEPTION '% may not create a role; %', current_user, fix;
        END;
    END IF;
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'gpubroker_api' AND (rolsuper OR rolbypassrls)) THEN
        RAISE EXCEPTION 'the role gpubroker_api bypasses row-level security; '
            'ask an administrator to run: ALTER ROLE gpubroker_api NOSUPERUSER NOBYPASSRLS;';
    END IF;
    IF NOT pg_has_role('gpubroker_api', right_to_become) THEN
        BEGIN
            EXECUTE format('GRANT gpubroker_api TO %I', current_user);
        EXCEPTION
            WHEN unique_violation THEN NULL;
            WHEN insufficient_privilege OR invalid_grant_operation THEN
                RAISE EXCEPTION '% may not become gpubroker_api; %', current_user, fix;
        END;
    END IF;
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO gpubroker_api', current_schema());
END $$;

CREATE FUNCTION gpubroker_team() RETURNS text LANGUAGE sql STABLE AS $$
    SELECT NULLIF(current_setting('gpubroker.team', true), '')
$$;
CREATE FUNCTION gpubroker_operator() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT current_setting('gpubroker.operator', true) = 'on'
$$;

-- Every table with rows of teams is protected by this procedure, in the migration that creates the table. `privileges`
-- are the fewest that the API needs ('': the API cannot use the table). `visible` selects the rows of the team.
CREATE PROCEDURE gpubroker_protect(target regclass, privileges text, visible text DEFAULT 'team = gpubroker_team()')
LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', target);
    EXECUTE format('ALTER TABLE %s FORCE ROW LEVEL SECURITY', target);
    EXECUTE format('CREATE POLICY daemon ON %s TO CURRENT_USER USING (true) WITH CHECK (true)', target);
    IF privileges <> '' THEN
        EXECUTE format('CREATE POLICY team ON %s TO gpubroker_api USING (gpubroker_operator() OR %s)', target, visible);
        EXECUTE format('GRANT %s ON %s TO gpubroker_api', privileges, target);
    END IF;
END $$;

CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only: write a new entry instead', TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
END $$;

-- --------------------------------------------------------------------------------------------- installation and teams

CREATE TABLE installation (
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    id text NOT NULL,
    -- the mark in the blob store of this installation's jobs: a broker with another blob store would see no heartbeat
    blob_store text,
    -- the mark of the master key that seals its secrets: another key opens none of them
    master_key text
);

CREATE TABLE teams (
    name text PRIMARY KEY CONSTRAINT teams_name CHECK (name <> ''),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    note text NOT NULL
);
INSERT INTO teams (name, note) VALUES ('default', 'made with the installation');

-- -------------------------------------------------------------------------------------------- jobs, attempts and money

-- NaN is greater than every number in PostgreSQL, so an upper bound below Infinity also refuses NaN.
CREATE TABLE jobs (
    id text PRIMARY KEY,
    team text NOT NULL CONSTRAINT jobs_team REFERENCES teams (name),
    owner text NOT NULL,
    spec jsonb NOT NULL,
    workload jsonb NOT NULL,
    created_at timestamptz NOT NULL,
    priority bigint GENERATED ALWAYS AS (COALESCE((spec ->> 'priority')::bigint, 0)) STORED,
    -- written by the controllers
    state text NOT NULL,
    reason text NOT NULL,
    attempts bigint NOT NULL,
    retries_used bigint NOT NULL,
    -- the plan after an attempt ran out of memory
    remedy jsonb,
    -- seconds for which machines of ended attempts existed
    machine_s double precision NOT NULL DEFAULT 0,
    finished_at timestamptz,
    -- written by billing
    spent_usd numeric NOT NULL,
    -- written by the spend guard
    forecast jsonb,
    -- written by the API
    cap_usd numeric NOT NULL,
    -- the highest cap that a user has approved
    approved_usd numeric,
    stop_requested boolean NOT NULL,
    retry_of text,
    idempotency_key text,
    body_sha256 text NOT NULL,
    -- data in the blob store; written by the retention controller
    stored jsonb,
    stored_due_at timestamptz DEFAULT '-infinity',
    -- kinds of data and when they were deleted; also written by the API
    deleted jsonb NOT NULL DEFAULT '{}',
    -- the lease: while it lasts, due_at is its end, or earlier when a signal came
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
    CONSTRAINT jobs_counts CHECK (attempts >= 0 AND retries_used >= 0),
    CONSTRAINT jobs_machine_s CHECK (machine_s >= 0 AND machine_s < 'Infinity'),
    CONSTRAINT jobs_money CHECK (cap_usd > 0 AND spent_usd >= 0),
    CONSTRAINT jobs_finite CHECK (cap_usd < 'Infinity' AND spent_usd < 'Infinity'),
    CONSTRAINT jobs_approved CHECK (approved_usd > 0 AND approved_usd < 'Infinity')
);
CREATE UNIQUE INDEX jobs_key ON jobs (team, owner, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX jobs_due ON jobs (state, due_at);
CREATE INDEX jobs_listed ON jobs (team, created_at, id);
CREATE INDEX jobs_queue ON jobs (state, priority DESC, created_at, id);
CREATE INDEX jobs_stored ON jobs (stored_due_at) WHERE stored_due_at IS NOT NULL;
CREATE INDEX jobs_origin ON jobs ((spec ->> 'init_from')) WHERE spec ->> 'init_from' IS NOT NULL;

CREATE TABLE attempts (
    id text PRIMARY KEY,
    job_id text NOT NULL REFERENCES jobs (id),
    number bigint NOT NULL,
    name text NOT NULL,
    line jsonb NOT NULL,
    gpus bigint GENERATED ALWAYS AS (
        (line #>> '{offer,gpus}')::bigint * COALESCE((line ->> 'nodes')::bigint, 1)) STORED,
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
    -- the physical host if the cloud names it, otherwise the offer
    host text,
    -- when the first of its machines began to run, or earlier: charges begin and end as the cloud's own bill does
    running_at timestamptz,
    absent_at timestamptz,
    booted_at timestamptz,
    first_beat_at timestamptz,
    draining_since timestamptz,
    terminating_since timestamptz,
    destroy_failures bigint NOT NULL,
    ended_at timestamptz,
    beat jsonb,
    final jsonb,
    -- bytes that former starts of the agent sent and received
    earlier_sent bigint NOT NULL DEFAULT 0,
    earlier_received bigint NOT NULL DEFAULT 0,
    -- written by billing; traffic_usd is a part of charged_usd
    charged_usd numeric NOT NULL,
    charged_to timestamptz,
    traffic_usd numeric NOT NULL DEFAULT 0,
    -- why the attempt must end, apart from a stop; written once
    signal text,
    -- written by the spend guard
    idle text,
    -- written by the review of attempts: the latest reported reason to stay, and the claim for a review
    stays text NOT NULL DEFAULT '',
    reviewed_at timestamptz NOT NULL DEFAULT '-infinity',
    reviewed_by text NOT NULL DEFAULT '',
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
            WHEN state IN ('booting', 'training') AND NOT stop_requested AND signal IS NULL THEN 'liveness'
            WHEN state IN ('booting', 'training', 'draining') THEN 'interruption'
            WHEN state = 'terminating' THEN 'termination'
        END) STORED,
    CONSTRAINT attempts_number UNIQUE (job_id, number),
    CONSTRAINT attempts_state CHECK (state IN (
        'planned', 'launching', 'booting', 'training', 'draining', 'terminating', 'ended')),
    CONSTRAINT attempts_create_sent CHECK (state IN ('planned', 'ended') OR create_sent_at IS NOT NULL),
    CONSTRAINT attempts_ended CHECK ((state = 'ended') = (ended_at IS NOT NULL)),
    CONSTRAINT attempts_reason CHECK (state NOT IN ('draining', 'terminating', 'ended') OR reason IS NOT NULL),
    CONSTRAINT attempts_signal CHECK (signal IN ('cap', 'out_of_time', 'idle', 'idle_now', 'hung', 'budget', 'move')),
    CONSTRAINT attempts_idle CHECK (idle IN ('gpu', 'no_progress', 'download')),
    CONSTRAINT attempts_counts CHECK (number >= 1 AND destroy_failures >= 0),
    CONSTRAINT attempts_money CHECK (reserved_usd >= 0 AND charged_usd >= 0),
    CONSTRAINT attempts_finite CHECK (reserved_usd < 'Infinity' AND charged_usd < 'Infinity'),
    CONSTRAINT attempts_traffic CHECK (traffic_usd >= 0 AND traffic_usd <= charged_usd)
);
CREATE UNIQUE INDEX one_live ON attempts (job_id) WHERE state <> 'ended';
CREATE INDEX attempts_due ON attempts (lane, due_at) WHERE lane IS NOT NULL;
CREATE INDEX attempts_reviewed ON attempts (reviewed_at) WHERE lane = 'liveness' AND state = 'training';
CREATE INDEX attempts_of_host ON attempts (host, ended_at) WHERE state = 'ended';
-- Each broker adds up the spot machines of the last 30 days every 10 minutes.
CREATE INDEX attempts_spot ON attempts (create_sent_at) WHERE (line -> 'offer' ->> 'spot')::boolean;

-- The price of each machine of an attempt from `since` on, as read back from its cloud.
CREATE TABLE price_changes (
    attempt_id text NOT NULL REFERENCES attempts (id),
    since timestamptz NOT NULL,
    usd_per_hour numeric NOT NULL
        CONSTRAINT price_changes_money CHECK (usd_per_hour >= 0 AND usd_per_hour < 'Infinity'),
    -- machines under the attempt's name beyond those that were bought: they are billed until they are destroyed
    extra_machines bigint NOT NULL DEFAULT 0
        CONSTRAINT price_changes_extra_machines CHECK (extra_machines >= 0),
    read_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX price_changes_of ON price_changes (attempt_id, since, usd_per_hour);
CREATE TRIGGER price_changes_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON price_changes
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

CREATE FUNCTION prices_of(attempt text) RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT jsonb_agg(jsonb_build_object('since', since, 'usd_per_hour', usd_per_hour::text,
            'extra_machines', extra_machines)
        ORDER BY since, usd_per_hour)
    FROM price_changes WHERE attempt_id = attempt
$$;

-- Speed and memory that ended attempts showed, for later estimates. All teams share them, so a row names no team,
-- model, data or user.
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

-- Why each attempt was bought: every offer of its market with the reason why it was kept or dropped.
CREATE TABLE decisions (
    attempt_id text PRIMARY KEY REFERENCES attempts (id),
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- JSON, compressed by the broker
    document bytea NOT NULL
);
CREATE TRIGGER decisions_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON decisions
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

CREATE TABLE offer_blocks (
    offer_id text PRIMARY KEY,
    reason text NOT NULL,
    until timestamptz NOT NULL
);

CREATE TABLE ledger (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id text NOT NULL REFERENCES jobs (id),
    -- NULL: storage, which belongs to no attempt
    attempt_id text REFERENCES attempts (id),
    kind text NOT NULL CONSTRAINT ledger_kind CHECK (kind IN ('reservation', 'charge', 'release', 'adjustment')),
    category text NOT NULL DEFAULT 'compute'
        CONSTRAINT ledger_category CHECK (category IN ('compute', 'egress', 'storage')),
    usd numeric NOT NULL CONSTRAINT ledger_money CHECK (usd >= 0),
    note text NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT ledger_finite CHECK (usd < 'Infinity'),
    CONSTRAINT ledger_of_attempt CHECK ((attempt_id IS NULL) = (category = 'storage'))
);
CREATE INDEX ledger_of_job ON ledger (job_id, id);
-- Reports of spending select a window of time.
CREATE INDEX ledger_at ON ledger (at) WHERE kind IN ('charge', 'adjustment');
CREATE TRIGGER ledger_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

-- Dollars that teams and users have spent, by quarter-hour.
CREATE TABLE usage (
    team text NOT NULL,
    owner text NOT NULL,
    bucket timestamptz NOT NULL CONSTRAINT usage_bucket CHECK (bucket = date_bin('15 minutes', bucket, 'epoch')),
    usd numeric NOT NULL CONSTRAINT usage_money CHECK (usd >= 0 AND usd < 'Infinity'),
    PRIMARY KEY (team, owner, bucket)
);

-- Every write to the ledger updates the usage; keys in order, so that no two transactions deadlock.
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

-- ----------------------------------------------------------------------------------------------------------- policies

-- A name keeps its row for ever: admissions lock the row, and its versions continue after a deletion.
CREATE TABLE policies (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- NULL: applies to every team
    team text REFERENCES teams (name) ON DELETE CASCADE,
    -- NULL: applies to every user
    person text,
    name text NOT NULL,
    version bigint NOT NULL CONSTRAINT policies_version CHECK (version >= 1),
    -- NULL: deleted
    document jsonb,
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    changed_by text NOT NULL
);
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

-- Thresholds that were reported: each is reported once while `at` is within the budget's window.
CREATE TABLE policy_told (
    policy_id bigint NOT NULL REFERENCES policies (id) ON DELETE CASCADE,
    budget text NOT NULL,
    share numeric NOT NULL,
    action text NOT NULL,
    at timestamptz NOT NULL,
    PRIMARY KEY (policy_id, budget, share, action, at)
);

-- -------------------------------------------------------------------------------------------- channels and deliveries

CREATE TABLE channels (
    id text PRIMARY KEY,
    -- NULL: a channel of the installation, which receives the events of every team
    team text CONSTRAINT channels_team REFERENCES teams (name) ON DELETE CASCADE,
    name text NOT NULL CONSTRAINT channels_named CHECK (name <> ''),
    kind text NOT NULL,
    events text[] NOT NULL,
    config jsonb NOT NULL,
    sealed bytea,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    enabled boolean NOT NULL,
    -- written by the outbox; enabling a channel clears them
    reason text NOT NULL,
    failures bigint NOT NULL CONSTRAINT channels_failures CHECK (failures >= 0),
    not_before timestamptz NOT NULL DEFAULT '-infinity'
);
CREATE UNIQUE INDEX channels_name ON channels (COALESCE(team, ''), name);
INSERT INTO channels (id, name, kind, events, config, enabled, reason, failures)
VALUES ('log', 'log', 'log', '{}', '{}', true, '', 0);

CREATE TABLE notices (
    id text PRIMARY KEY CONSTRAINT notices_id CHECK (id ~ '^[A-Za-z0-9_:-]{1,200}$'),
    team text CONSTRAINT notices_team REFERENCES teams (name) ON DELETE CASCADE,
    kind text NOT NULL,
    message text NOT NULL,
    data jsonb NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The deliveries of one channel about one job (or all notices): sent in order, by one broker at a time.
CREATE TABLE streams (
    channel_id text NOT NULL REFERENCES channels (id) ON DELETE CASCADE,
    name text NOT NULL,
    -- number of its deliveries
    waiting bigint NOT NULL CONSTRAINT streams_waiting CHECK (waiting >= 0),
    -- earliest time of the next try; failed tries of the oldest delivery
    due_at timestamptz NOT NULL DEFAULT '-infinity',
    attempts bigint NOT NULL DEFAULT 0,
    refresh_at timestamptz,
    state jsonb,
    used_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    epoch bigint NOT NULL DEFAULT 0,
    lease_until timestamptz,
    lease_owner text,
    PRIMARY KEY (channel_id, name)
);
CREATE INDEX streams_due ON streams (channel_id, due_at) WHERE waiting > 0;
CREATE INDEX streams_refreshed ON streams (channel_id, refresh_at) WHERE waiting = 0 AND refresh_at IS NOT NULL;

-- Numbered under the lock of their stream's row, so in the order of their commits.
CREATE TABLE deliveries (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    channel_id text NOT NULL,
    stream text NOT NULL,
    -- number of the job's event; NULL: the delivery is of a notice
    seq bigint,
    notice_id text REFERENCES notices (id),
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    FOREIGN KEY (channel_id, stream) REFERENCES streams (channel_id, name) ON DELETE CASCADE,
    CONSTRAINT deliveries_one CHECK ((seq IS NULL) <> (notice_id IS NULL))
);
CREATE INDEX deliveries_of_stream ON deliveries (channel_id, stream, id);
CREATE INDEX deliveries_of_channel ON deliveries (channel_id, id);
CREATE INDEX deliveries_of_notice ON deliveries (notice_id) WHERE notice_id IS NOT NULL;

-- Counts of deliveries that were given up, by channel and reason.
CREATE TABLE drops (
    channel_id text NOT NULL REFERENCES channels (id) ON DELETE CASCADE,
    reason text NOT NULL,
    n bigint NOT NULL,
    PRIMARY KEY (channel_id, reason)
);

-- Keys of received requests, against replays; rows are deleted after `until`.
CREATE TABLE seen (
    key text PRIMARY KEY,
    until timestamptz NOT NULL
);
CREATE INDEX seen_until ON seen (until);

CREATE FUNCTION channel_wants(patterns text[], kind text) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT cardinality(patterns) = 0 OR EXISTS (
        SELECT FROM unnest(patterns) AS p
        WHERE p = kind OR (right(p, 1) = '*' AND starts_with(kind, left(p, -1))))
$$;

-- Triggers fan events and notices out, in the transaction that writes them. The triggers have the daemon's rights,
-- because a team's write also reaches the installation's channels, which the team does not see.
-- Streams are locked in one order by the fan-out, the claim and the settlement, so that they do not deadlock.
CREATE FUNCTION fan_out_events() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    WITH matched AS MATERIALIZED (
        SELECT c.id AS channel_id, n.job_id, n.seq
        FROM written n JOIN jobs j ON j.id = n.job_id
        JOIN channels c ON c.enabled AND (c.team IS NULL OR c.team = j.team) AND channel_wants(c.events, n.kind)
    ), woken AS (
        INSERT INTO streams (channel_id, name, waiting)
        SELECT channel_id, job_id, count(*) FROM matched GROUP BY channel_id, job_id ORDER BY channel_id, job_id
        ON CONFLICT (channel_id, name)
        DO UPDATE SET waiting = streams.waiting + excluded.waiting, used_at = clock_timestamp()
        RETURNING channel_id, name
    )
    INSERT INTO deliveries (channel_id, stream, seq)
    SELECT m.channel_id, m.job_id, m.seq
    FROM matched m JOIN woken w ON (w.channel_id, w.name) = (m.channel_id, m.job_id)
    ORDER BY m.job_id, m.seq;
    RETURN NULL;
END $$;
CREATE TRIGGER fan_out AFTER INSERT ON events REFERENCING NEW TABLE AS written
    FOR EACH STATEMENT EXECUTE FUNCTION fan_out_events();

CREATE FUNCTION fan_out_notices() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    WITH matched AS MATERIALIZED (
        SELECT c.id AS channel_id, n.id AS notice_id
        FROM written n
        JOIN channels c ON c.enabled AND (c.team IS NULL OR c.team = n.team) AND channel_wants(c.events, n.kind)
    ), woken AS (
        INSERT INTO streams (channel_id, name, waiting)
        SELECT channel_id, 'notices', count(*) FROM matched GROUP BY channel_id ORDER BY channel_id
        ON CONFLICT (channel_id, name)
        DO UPDATE SET waiting = streams.waiting + excluded.waiting, used_at = clock_timestamp()
        RETURNING channel_id
    )
    INSERT INTO deliveries (channel_id, stream, notice_id)
    SELECT m.channel_id, 'notices', m.notice_id FROM matched m JOIN woken w USING (channel_id) ORDER BY m.notice_id;
    RETURN NULL;
END $$;
CREATE TRIGGER fan_out AFTER INSERT ON notices REFERENCING NEW TABLE AS written
    FOR EACH STATEMENT EXECUTE FUNCTION fan_out_notices();

-- A function with the daemon's rights resolves names in no schema that others may write to; pg_temp comes last.
DO $$
DECLARE
    target text;
BEGIN
    FOREACH target IN ARRAY ARRAY['fan_out_events', 'fan_out_notices'] LOOP
        EXECUTE format('ALTER FUNCTION %I() SET search_path = pg_catalog, %I, pg_temp', target, current_schema());
    END LOOP;
END $$;

-- ----------------------------------------------------------------------------------- tokens, secrets, uploads, audit

-- Deleting a team deletes its tokens, secrets and uploads; a team with jobs cannot be deleted.
CREATE TABLE tokens (
    id text PRIMARY KEY,
    team text NOT NULL CONSTRAINT tokens_team REFERENCES teams (name) ON DELETE CASCADE,
    owner text NOT NULL,
    scopes text[] NOT NULL,
    created_at timestamptz NOT NULL,
    expires_at timestamptz,
    note text NOT NULL,
    secret_sha256 text NOT NULL UNIQUE
);

CREATE TABLE secrets (
    team text NOT NULL CONSTRAINT secrets_team REFERENCES teams (name) ON DELETE CASCADE,
    owner text NOT NULL,
    name text NOT NULL,
    sealed bytea NOT NULL,
    PRIMARY KEY (team, owner, name)
);

CREATE TABLE uploads (
    team text NOT NULL CONSTRAINT uploads_team REFERENCES teams (name) ON DELETE CASCADE,
    owner text NOT NULL,
    sha256 text NOT NULL,
    bytes bigint NOT NULL CHECK (bytes >= 0),
    name text NOT NULL,
    summary jsonb,
    put_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- when its content was deleted: jobs that used it keep copies of their own
    gone_at timestamptz,
    PRIMARY KEY (team, owner, sha256)
);
CREATE INDEX uploads_last ON uploads (put_at) WHERE gone_at IS NULL;

CREATE TABLE slack_users (
    team text NOT NULL CONSTRAINT slack_users_team REFERENCES teams (name) ON DELETE CASCADE,
    -- T... and U..., the ids that Slack gives
    workspace text NOT NULL,
    slack_user text NOT NULL,
    owner text NOT NULL CONSTRAINT slack_users_owner CHECK (owner <> ''),
    scopes text[] NOT NULL,
    name text NOT NULL,
    linked_by text NOT NULL,
    linked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (team, workspace, slack_user)
);
CREATE INDEX slack_users_person ON slack_users (workspace, slack_user);

-- Every write of a user or program. Ids are random, because a number would reveal to a team how much the others do.
CREATE TABLE audit (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- '' is the installation; no foreign key: the entry outlives the team
    team text NOT NULL,
    actor text NOT NULL,
    token_id text NOT NULL,
    action text NOT NULL,
    target text NOT NULL,
    before jsonb,
    after jsonb,
    usd numeric
);
CREATE INDEX audit_listed ON audit (team, at, id);
CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

-- ------------------------------------------------------------------------------------------------- row-level security

-- A team sees itself; only an operator creates or removes one.
CALL gpubroker_protect('teams', 'SELECT, INSERT, DELETE', 'name = gpubroker_team()');
CREATE POLICY made_by_operator ON teams AS RESTRICTIVE FOR INSERT TO gpubroker_api WITH CHECK (gpubroker_operator());
CREATE POLICY removed_by_operator ON teams AS RESTRICTIVE FOR DELETE TO gpubroker_api USING (gpubroker_operator());

CALL gpubroker_protect('jobs', 'SELECT, INSERT, UPDATE (stop_requested, due_at, event_seq, cap_usd, approved_usd, '
    'state, reason, finished_at, deleted, stored_due_at)');
CALL gpubroker_protect('attempts', 'SELECT, UPDATE (stop_requested, due_at)',
    'EXISTS (SELECT FROM jobs WHERE jobs.id = job_id)');
CALL gpubroker_protect('price_changes', 'SELECT', 'EXISTS (SELECT FROM attempts WHERE attempts.id = attempt_id)');
CALL gpubroker_protect('observations', '');
CALL gpubroker_protect('decisions', 'SELECT', 'EXISTS (SELECT FROM attempts WHERE attempts.id = attempt_id)');
CALL gpubroker_protect('ledger', 'SELECT', 'EXISTS (SELECT FROM jobs WHERE jobs.id = job_id)');
CALL gpubroker_protect('usage', 'SELECT');
CALL gpubroker_protect('events', 'SELECT, INSERT', 'EXISTS (SELECT FROM jobs WHERE jobs.id = job_id)');

CALL gpubroker_protect('policies', 'SELECT, INSERT, UPDATE (person, version, document, changed_at, changed_by)');
CALL gpubroker_protect('policy_versions', 'SELECT, INSERT');
CALL gpubroker_protect('policy_told', '');

CALL gpubroker_protect('channels', 'SELECT, INSERT, UPDATE (events, config, sealed, enabled, reason, failures, '
    'not_before), DELETE');
CALL gpubroker_protect('streams', 'SELECT (channel_id, name, waiting)',
    'EXISTS (SELECT FROM channels WHERE channels.id = channel_id)');
CALL gpubroker_protect('deliveries', 'SELECT (id, channel_id, at)',
    'EXISTS (SELECT FROM channels WHERE channels.id = channel_id)');
CALL gpubroker_protect('drops', 'SELECT', 'EXISTS (SELECT FROM channels WHERE channels.id = channel_id)');
CALL gpubroker_protect('notices', '');
CALL gpubroker_protect('seen', '');

-- All columns but the hash of the secret.
CALL gpubroker_protect('tokens',
    'SELECT (id, team, owner, scopes, created_at, expires_at, note), INSERT, DELETE');
CALL gpubroker_protect('secrets', 'SELECT, INSERT, UPDATE (sealed), DELETE');
CALL gpubroker_protect('uploads', 'SELECT, INSERT, UPDATE (bytes, name, summary, put_at, gone_at)');
CALL gpubroker_protect('slack_users',
    'SELECT, INSERT, UPDATE (owner, scopes, name, linked_by, linked_at), DELETE');
CALL gpubroker_protect('audit', 'SELECT, INSERT');
