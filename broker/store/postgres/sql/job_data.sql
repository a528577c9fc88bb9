-- Costs of a job in addition to its hours: notes of the spend guard, data in the blob store, uploads.

-- name: lock_noted_jobs
SELECT * FROM jobs WHERE id = ANY ($1::text[]) ORDER BY id FOR NO KEY UPDATE;

-- name: lock_noted_attempts
SELECT *, prices_of(id) AS prices FROM attempts WHERE id = ANY ($1::text[]) ORDER BY id FOR NO KEY UPDATE;

-- name: note_jobs
UPDATE jobs j SET forecast = u.forecast::jsonb, event_seq = j.event_seq + u.events, reason = COALESCE(u.reason, j.reason)
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[]) AS u (id, forecast, events, reason) WHERE j.id = u.id;

-- name: note_attempts
UPDATE attempts a SET idle = u.idle, signal = COALESCE(a.signal, u.signal), stays = COALESCE(u.stays, a.stays),
    due_at = CASE WHEN u.signal IS NOT NULL AND a.signal IS NULL THEN clock_timestamp() ELSE a.due_at END
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS u (id, idle, signal, stays) WHERE a.id = u.id;

-- name: claim_stored
WITH due AS (
    SELECT id FROM jobs WHERE stored_due_at <= clock_timestamp()
    ORDER BY stored_due_at LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE jobs j SET stored_due_at = clock_timestamp() + $1 * interval '1 second' FROM due WHERE j.id = due.id
RETURNING j.*;

-- name: charge_storage
UPDATE jobs SET stored = $2, stored_due_at = clock_timestamp() + $3::double precision * interval '1 second'
WHERE id = $1;

-- name: lock_origins
-- A transaction that deletes checkpoints locks the job's row. It therefore sees every job that starts from these
-- checkpoints, and a later such job sees the deletion. Called before any insert, in the order of the ids.
SELECT * FROM jobs WHERE id = ANY ($1::text[]) ORDER BY id FOR SHARE;

-- name: starts_from
SELECT id, team FROM jobs WHERE spec ->> 'init_from' = 'job/' || $1
    AND state NOT IN ('succeeded', 'cancelled', 'failed') LIMIT 1;

-- name: delete_data
UPDATE jobs SET event_seq = event_seq + 1, stored_due_at = clock_timestamp(),
    deleted = (SELECT jsonb_object_agg(kind, clock_timestamp()) FROM unnest($2::text[]) AS kind) || deleted
WHERE id = $1 RETURNING *;

-- name: forget_uploads
-- Only the latest sender counts, because all senders share one object.
WITH old AS (
    SELECT sha256 FROM uploads GROUP BY sha256
    HAVING bool_or(gone_at IS NULL) AND max(put_at) < clock_timestamp() - $1 * interval '1 second' LIMIT $2
)
UPDATE uploads u SET gone_at = clock_timestamp() FROM old
WHERE u.sha256 = old.sha256 AND u.gone_at IS NULL AND u.put_at < clock_timestamp() - $1 * interval '1 second'
RETURNING u.sha256;

-- name: known_uploads
SELECT DISTINCT sha256 FROM uploads WHERE sha256 = ANY ($1::text[]) AND gone_at IS NULL;
