-- Policies, and the dollars, GPUs and jobs that count against them.
-- Policies are locked after jobs and attempts, in the order of their ids.

-- name: policies
SELECT *, clock_timestamp() AS now FROM policies WHERE document IS NOT NULL ORDER BY id;

-- name: policies_of
SELECT *, clock_timestamp() AS now FROM policies p
WHERE document IS NOT NULL AND EXISTS (
    SELECT FROM unnest($1::text[], $2::text[]) AS job (team, owner)
    WHERE (p.team IS NULL OR p.team = job.team) AND (p.person IS NULL OR p.person = job.owner))
ORDER BY id;

-- name: enter_admission
-- A transaction that creates a policy waits for running admissions, which do not know the policy. Later admissions see
-- the amounts that these reserved. This is a separate statement, because the next statement needs a later snapshot.
SELECT pg_advisory_xact_lock_shared(hashtextextended('gpubroker.policies', 0));

-- name: enter_policy
SELECT pg_advisory_xact_lock(hashtextextended('gpubroker.policies', 0));

-- name: lock_policies
SELECT *, clock_timestamp() AS now FROM policies p
WHERE document IS NOT NULL AND EXISTS (
    SELECT FROM unnest($1::text[], $2::text[]) AS job (team, owner)
    WHERE (p.team IS NULL OR p.team = job.team) AND (p.person IS NULL OR p.person = job.owner))
ORDER BY id FOR NO KEY UPDATE;

-- name: standings
-- One statement has one snapshot, so a charge that commits during it counts as reserved or as charged, but never as
-- neither.
WITH live AS MATERIALIZED (
    SELECT j.team, j.owner, sum(GREATEST(a.reserved_usd - a.charged_usd, 0)) AS outstanding,
        sum(a.gpus) AS gpus, count(*) AS jobs
    FROM attempts a JOIN jobs j ON j.id = a.job_id
    WHERE a.state <> 'ended' GROUP BY j.team, j.owner
)
SELECT w.policy, held.*, spent.charged
FROM unnest($1::bigint[], $2::text[], $3::text[], $4::timestamptz[]) WITH ORDINALITY
    AS w (policy, team, person, since, place)
CROSS JOIN LATERAL (
    SELECT COALESCE(sum(usd), 0) AS charged FROM usage u
    WHERE u.bucket >= w.since AND (w.team IS NULL OR u.team = w.team) AND (w.person IS NULL OR u.owner = w.person)
) AS spent
CROSS JOIN LATERAL (
    SELECT COALESCE(sum(outstanding), 0) AS outstanding, COALESCE(sum(gpus), 0)::bigint AS gpus,
        COALESCE(sum(jobs), 0)::bigint AS jobs
    FROM live l WHERE (w.team IS NULL OR l.team = w.team) AND (w.person IS NULL OR l.owner = w.person)
) AS held
ORDER BY w.place;

-- name: lock_policy
SELECT *, clock_timestamp() AS now FROM policies WHERE COALESCE(team, '') = COALESCE($1, '') AND name = $2
FOR NO KEY UPDATE;

-- name: put_policy
-- Waits for another transaction that inserts the row, and overwrites that row: the last write wins.
INSERT INTO policies AS p (team, person, name, version, document, changed_by) VALUES ($1, $2, $3, 1, $4, $5)
ON CONFLICT (COALESCE(team, ''), name) DO UPDATE
SET person = excluded.person, version = p.version + 1, document = excluded.document, changed_at = clock_timestamp(),
    changed_by = excluded.changed_by
RETURNING *;

-- name: delete_policy
UPDATE policies SET version = version + 1, document = NULL, changed_at = clock_timestamp(), changed_by = $2
WHERE id = $1 RETURNING *;

-- name: write_policy_version
INSERT INTO policy_versions (policy_id, team, version, document, at, actor) VALUES ($1, $2, $3, $4, $5, $6);

-- name: policy_history
SELECT v.* FROM policy_versions v JOIN policies p ON p.id = v.policy_id
WHERE COALESCE(p.team, '') = COALESCE($1, '') AND p.name = $2 ORDER BY v.version DESC;

-- name: lock_policy_id
SELECT id FROM policies WHERE id = $1 FOR NO KEY UPDATE;

-- name: post_threshold
INSERT INTO policy_told (policy_id, budget, share, action, at)
SELECT $1, $2, $3, $4, COALESCE($6, clock_timestamp()) WHERE NOT EXISTS (
    SELECT FROM policy_told WHERE policy_id = $1 AND budget = $2 AND share = $3 AND action = $4 AND at >= $5)
RETURNING at;

-- name: approve
UPDATE jobs SET approved_usd = $2, event_seq = event_seq + 1,
    state = CASE WHEN state = 'awaiting_approval' THEN 'queued' ELSE state END,
    reason = CASE WHEN state = 'awaiting_approval' THEN '' ELSE reason END,
    due_at = CASE WHEN state = 'awaiting_approval' THEN clock_timestamp() ELSE due_at END
WHERE id = $1 RETURNING *;

-- name: extend_reservation
UPDATE attempts SET reserved_usd = reserved_usd + $2 WHERE id = $1;

-- name: live_attempt
SELECT *, prices_of(id) AS prices FROM attempts WHERE job_id = $1 AND state <> 'ended' FOR NO KEY UPDATE;

-- name: past_attempts
-- Attempts that were live since $1, with their dollars by quarter-hour as budgets count them.
SELECT a.job_id, a.number, j.team, j.owner, a.gpus, j.cap_usd, a.reserved_usd, a.created_at AS at, a.ended_at,
    COALESCE(c.buckets, '{}') AS buckets, COALESCE(c.dollars, '{}') AS dollars
FROM attempts a JOIN jobs j ON j.id = a.job_id
LEFT JOIN LATERAL (
    SELECT array_agg(b.bucket ORDER BY b.bucket) AS buckets, array_agg(b.usd ORDER BY b.bucket) AS dollars
    FROM (
        SELECT date_bin('15 minutes', l.at, 'epoch') AS bucket, sum(l.usd) AS usd FROM ledger l
        WHERE l.attempt_id = a.id AND l.job_id = a.job_id AND l.kind IN ('charge', 'adjustment') GROUP BY 1
    ) AS b
) AS c ON true
WHERE a.ended_at IS NULL OR a.ended_at >= $1
ORDER BY a.created_at, a.id;

-- name: past_others
SELECT j.team, j.owner, date_bin('15 minutes', l.at, 'epoch') AS at, sum(l.usd) AS usd
FROM ledger l JOIN jobs j ON j.id = l.job_id
WHERE l.attempt_id IS NULL AND l.kind IN ('charge', 'adjustment') AND l.at >= $1
GROUP BY 1, 2, 3 ORDER BY 3, 1, 2;

-- name: now
SELECT clock_timestamp();
