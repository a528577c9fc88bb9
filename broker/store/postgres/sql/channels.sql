-- Channels and the outbox; the fan-out is in migrations/0001_initial.sql.
-- Locks are taken on the channel, then on its streams in the order of their names.

-- name: add_channel
INSERT INTO channels (id, team, name, kind, events, config, sealed, enabled, reason, failures)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 0)
ON CONFLICT (COALESCE(team, ''), name) DO NOTHING RETURNING id;

-- name: channels
SELECT c.*, COALESCE(w.waiting, 0) AS waiting, COALESCE(o.oldest_s, 0) AS oldest_s, COALESCE(d.dropped, '{}') AS dropped
FROM channels c
CROSS JOIN LATERAL (
    SELECT sum(s.waiting)::bigint AS waiting FROM streams s WHERE s.channel_id = c.id AND s.waiting > 0
) AS w
LEFT JOIN LATERAL (
    SELECT extract(epoch FROM clock_timestamp() - at)::double precision AS oldest_s
    FROM deliveries WHERE channel_id = c.id ORDER BY id LIMIT 1
) AS o ON true
CROSS JOIN LATERAL (SELECT jsonb_object_agg(reason, n) AS dropped FROM drops WHERE channel_id = c.id) AS d
ORDER BY COALESCE(c.team, ''), c.name;

-- name: write_channel
UPDATE channels SET events = $2, config = $3, sealed = $4, enabled = $5,
    reason = CASE WHEN enabled AND $5 THEN reason WHEN $5 THEN '' ELSE $6 END,
    failures = CASE WHEN enabled THEN failures ELSE 0 END,
    not_before = CASE WHEN enabled THEN not_before ELSE '-infinity' END
WHERE id = $1 RETURNING *;

-- name: delete_channel
DELETE FROM channels WHERE id = $1 RETURNING *;

-- name: claim_streams
-- Claims one stream of a channel whose latest delivery failed. Claims refreshes only if no delivery waits.
WITH clock AS MATERIALIZED (
    SELECT now, now + $4 * interval '1 second' AS until FROM clock_timestamp() AS now
), ready AS MATERIALIZED (
    SELECT id, CASE WHEN failures > 0 THEN 1 ELSE $5::bigint END AS most, failures
    FROM channels, clock
    WHERE enabled AND kind = ANY ($1::text[]) AND id <> ALL ($2::text[]) AND not_before <= clock.now
), due AS (
    SELECT row.channel_id, row.name FROM ready, LATERAL (
        SELECT s.channel_id, s.name FROM streams s
        WHERE s.channel_id = ready.id AND s.waiting > 0 AND s.due_at <= (SELECT now FROM clock)
            AND (s.lease_until IS NULL OR s.lease_until <= (SELECT now FROM clock))
        ORDER BY s.due_at LIMIT ready.most FOR NO KEY UPDATE SKIP LOCKED
    ) AS row
), fresh AS (
    SELECT row.channel_id, row.name FROM ready, LATERAL (
        SELECT s.channel_id, s.name FROM streams s
        WHERE s.channel_id = ready.id AND s.waiting = 0 AND s.refresh_at <= (SELECT now FROM clock)
            AND (s.lease_until IS NULL OR s.lease_until <= (SELECT now FROM clock))
        ORDER BY s.refresh_at LIMIT ready.most FOR NO KEY UPDATE SKIP LOCKED
    ) AS row
    WHERE ready.failures = 0
), leased AS (
    UPDATE streams s SET epoch = s.epoch + 1, lease_owner = $3, lease_until = (SELECT until FROM clock)
    FROM (SELECT * FROM due UNION ALL SELECT * FROM fresh) AS row
    WHERE (s.channel_id, s.name) = (row.channel_id, row.name)
    RETURNING s.*
)
SELECT c.*, leased.name AS stream, leased.attempts, leased.state, leased.epoch
FROM leased JOIN channels c ON c.id = leased.channel_id
ORDER BY c.id, leased.due_at;

-- name: pending
SELECT d.id AS row, d.channel_id, d.stream, e.*,
    n.id AS n_id, n.team AS n_team, n.kind AS n_kind, n.message AS n_message, n.data AS n_data, n.at AS n_at
FROM unnest($1::text[], $2::text[]) AS s (channel_id, name)
CROSS JOIN LATERAL (
    SELECT * FROM deliveries
    WHERE channel_id = s.channel_id AND stream = s.name ORDER BY id LIMIT $3
) AS d
LEFT JOIN events e ON (e.job_id, e.seq) = (d.stream, d.seq)
LEFT JOIN notices n ON n.id = d.notice_id
ORDER BY d.id;

-- name: jobs_by_id
SELECT * FROM jobs WHERE id = ANY ($1::text[]);

-- name: attempts_of_jobs
SELECT *, prices_of(id) AS prices FROM attempts WHERE job_id = ANY ($1::text[]) ORDER BY job_id, number;

-- name: lock_channel
SELECT * FROM channels WHERE id = $1 FOR NO KEY UPDATE;

-- name: lock_streams
SELECT name, epoch FROM streams WHERE channel_id = $1 AND name = ANY ($2::text[]) ORDER BY name FOR NO KEY UPDATE;

-- name: drop_deliveries
-- The streams must be locked.
WITH gone AS (
    DELETE FROM deliveries WHERE channel_id = $1 AND id = ANY ($2::bigint[]) RETURNING stream
), counted AS (
    SELECT stream, count(*) AS n FROM gone GROUP BY stream
)
UPDATE streams s SET waiting = s.waiting - counted.n FROM counted WHERE s.channel_id = $1 AND s.name = counted.stream;

-- name: settle_streams
UPDATE streams s SET state = u.state::jsonb, attempts = u.attempts,
    due_at = clock_timestamp() + u.due_in_s * interval '1 second',
    refresh_at = clock_timestamp() + u.refresh_in_s * interval '1 second',
    used_at = clock_timestamp(), lease_until = NULL, lease_owner = NULL
FROM unnest($2::text[], $3::text[], $4::bigint[], $5::double precision[], $6::double precision[])
    AS u (name, state, attempts, due_in_s, refresh_in_s)
WHERE s.channel_id = $1 AND s.name = u.name;

-- name: count_drops
INSERT INTO drops (channel_id, reason, n)
SELECT $1, reason, count(*) FROM unnest($2::text[]) AS reason GROUP BY reason ORDER BY reason
ON CONFLICT (channel_id, reason) DO UPDATE SET n = drops.n + excluded.n;

-- name: move_channel
-- A channel that a user disabled in the meantime stays disabled, with the user's reason.
UPDATE channels SET failures = $2, reason = CASE WHEN enabled THEN $3 ELSE reason END, enabled = enabled AND $4,
    not_before = GREATEST(not_before, clock_timestamp() + $5 * interval '1 second')
WHERE id = $1;

-- name: post
INSERT INTO notices (id, team, kind, message, data) VALUES ($1, $2, $3, $4, $5) ON CONFLICT (id) DO NOTHING
RETURNING id;

-- name: overdue
-- Selects a channel's oldest deliveries that exceed the age or the number, with the reason.
SELECT id, stream, CASE WHEN late THEN 'too old' ELSE 'too many' END AS reason FROM (
    SELECT d.id, d.stream, d.at < clock_timestamp() - $2 * interval '1 second' AS late,
        d.id <= (SELECT id FROM deliveries WHERE channel_id = $1 ORDER BY id DESC OFFSET $3 LIMIT 1) AS beyond
    FROM deliveries d WHERE d.channel_id = $1 ORDER BY d.id LIMIT $4
) AS oldest WHERE late OR beyond;

-- name: forget
-- Deletes streams without recent deliveries, old notices and old keys.
WITH idle AS (
    DELETE FROM streams WHERE (channel_id, name) IN (
        SELECT channel_id, name FROM streams
        WHERE waiting = 0 AND refresh_at IS NULL AND used_at < clock_timestamp() - $1 * interval '1 second'
        LIMIT 1000 FOR UPDATE SKIP LOCKED)
), old AS (
    DELETE FROM notices n WHERE n.at < clock_timestamp() - $1 * interval '1 second'
        AND NOT EXISTS (SELECT FROM deliveries d WHERE d.notice_id = n.id)
)
DELETE FROM seen WHERE until <= clock_timestamp();

-- name: first_time
INSERT INTO seen AS s (key, until) VALUES ($1, clock_timestamp() + $2 * interval '1 second')
ON CONFLICT (key) DO UPDATE SET until = excluded.until WHERE s.until <= clock_timestamp()
RETURNING key;
