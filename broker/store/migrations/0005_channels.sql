-- Channels and their outbox. What is told is fanned out by triggers, in the transaction that writes it and with the
-- house's rights: a team's own write also reaches the installation's channels, which that team does not see.

SET LOCAL statement_timeout = '60s';

-- Brokers start after their migrations; what waited in it had no channel.
-- squawk-ignore ban-drop-table
DROP TABLE outbox;

CREATE TABLE channels (
    id text PRIMARY KEY,
    -- NULL: the installation's, told about every team
    team text CONSTRAINT channels_team REFERENCES teams (name) ON DELETE CASCADE,
    name text NOT NULL CONSTRAINT channels_named CHECK (name <> ''),
    kind text NOT NULL,
    events text[] NOT NULL,
    config jsonb NOT NULL,
    sealed bytea,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    enabled boolean NOT NULL,
    -- written by the outbox; enabling a channel forgets them
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

-- What one channel hears about one job (or all notices): told in order, by one broker at a time.
CREATE TABLE streams (
    channel_id text NOT NULL REFERENCES channels (id) ON DELETE CASCADE,
    name text NOT NULL,
    -- deliveries of it
    waiting bigint NOT NULL CONSTRAINT streams_waiting CHECK (waiting >= 0),
    -- not before this; failures of the oldest delivery
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
    -- of the job's event
    seq bigint,
    notice_id text REFERENCES notices (id),
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    FOREIGN KEY (channel_id, stream) REFERENCES streams (channel_id, name) ON DELETE CASCADE,
    CONSTRAINT deliveries_one CHECK ((seq IS NULL) <> (notice_id IS NULL))
);
CREATE INDEX deliveries_of_stream ON deliveries (channel_id, stream, id);
CREATE INDEX deliveries_of_channel ON deliveries (channel_id, id);
CREATE INDEX deliveries_of_notice ON deliveries (notice_id) WHERE notice_id IS NOT NULL;

-- What nobody was told, counted.
CREATE TABLE drops (
    channel_id text NOT NULL REFERENCES channels (id) ON DELETE CASCADE,
    reason text NOT NULL,
    n bigint NOT NULL,
    PRIMARY KEY (channel_id, reason)
);

-- Against replays; swept by time.
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

-- Streams are locked in one order (fan-out, claim and settlement alike).
CREATE FUNCTION fan_out_events() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    WITH told AS MATERIALIZED (
        SELECT c.id AS channel_id, n.job_id, n.seq
        FROM written n JOIN jobs j ON j.id = n.job_id
        JOIN channels c ON c.enabled AND (c.team IS NULL OR c.team = j.team) AND channel_wants(c.events, n.kind)
    ), woken AS (
        INSERT INTO streams (channel_id, name, waiting)
        SELECT channel_id, job_id, count(*) FROM told GROUP BY channel_id, job_id ORDER BY channel_id, job_id
        ON CONFLICT (channel_id, name)
        DO UPDATE SET waiting = streams.waiting + excluded.waiting, used_at = clock_timestamp()
        RETURNING channel_id, name
    )
    INSERT INTO deliveries (channel_id, stream, seq)
    SELECT t.channel_id, t.job_id, t.seq FROM told t JOIN woken w ON (w.channel_id, w.name) = (t.channel_id, t.job_id)
    ORDER BY t.job_id, t.seq;
    RETURN NULL;
END $$;
CREATE TRIGGER fan_out AFTER INSERT ON events REFERENCING NEW TABLE AS written
    FOR EACH STATEMENT EXECUTE FUNCTION fan_out_events();

CREATE FUNCTION fan_out_notices() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    WITH told AS MATERIALIZED (
        SELECT c.id AS channel_id, n.id AS notice_id
        FROM written n
        JOIN channels c ON c.enabled AND (c.team IS NULL OR c.team = n.team) AND channel_wants(c.events, n.kind)
    ), woken AS (
        INSERT INTO streams (channel_id, name, waiting)
        SELECT channel_id, 'notices', count(*) FROM told GROUP BY channel_id ORDER BY channel_id
        ON CONFLICT (channel_id, name)
        DO UPDATE SET waiting = streams.waiting + excluded.waiting, used_at = clock_timestamp()
        RETURNING channel_id
    )
    INSERT INTO deliveries (channel_id, stream, notice_id)
    SELECT t.channel_id, 'notices', t.notice_id FROM told t JOIN woken w USING (channel_id) ORDER BY t.notice_id;
    RETURN NULL;
END $$;
CREATE TRIGGER fan_out AFTER INSERT ON notices REFERENCING NEW TABLE AS written
    FOR EACH STATEMENT EXECUTE FUNCTION fan_out_notices();

-- What runs with the house's rights looks into no schema that others may write to, temporary ones least of all.
DO $$
DECLARE
    target text;
BEGIN
    FOREACH target IN ARRAY ARRAY['fan_out_events', 'fan_out_notices'] LOOP
        EXECUTE format('ALTER FUNCTION %I() SET search_path = pg_catalog, %I, pg_temp', target, current_schema());
    END LOOP;
END $$;

CALL gpubroker_protect('channels', 'SELECT, INSERT, UPDATE (events, config, sealed, enabled, reason, failures, '
    'not_before), DELETE');
CALL gpubroker_protect('streams', 'SELECT (channel_id, name, waiting)',
    'EXISTS (SELECT FROM channels WHERE channels.id = channel_id)');
CALL gpubroker_protect('deliveries', 'SELECT (id, channel_id, at)',
    'EXISTS (SELECT FROM channels WHERE channels.id = channel_id)');
CALL gpubroker_protect('drops', 'SELECT', 'EXISTS (SELECT FROM channels WHERE channels.id = channel_id)');
CALL gpubroker_protect('notices', '');
CALL gpubroker_protect('seen', '');
