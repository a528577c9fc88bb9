-- What was paid, for reports. They read the ledger itself; an index serves their window.

-- name: paid_slices
SELECT job_id, attempt_id, category, (at AT TIME ZONE $3::text)::date AS day, sum(usd) AS usd
FROM ledger
WHERE at >= $1 AND at < $2 AND kind IN ('charge', 'adjustment')
GROUP BY job_id, attempt_id, category, day
ORDER BY day, job_id, attempt_id, category;

-- name: paid_attempts
SELECT a.*, prices_of(a.id) AS prices, COALESCE(paid.usd, 0) AS compute_usd,
    (SELECT e.data #>> '{dearest,usd_p50}' FROM events e
     WHERE e.job_id = a.job_id AND e.attempt_id = a.id AND e.kind = 'attempt.planned' LIMIT 1) AS dearest_usd
FROM attempts a
LEFT JOIN LATERAL (
    SELECT sum(l.usd) AS usd FROM ledger l
    WHERE l.job_id = a.job_id AND l.attempt_id = a.id AND l.category = 'compute' AND l.kind IN ('charge', 'adjustment')
) AS paid ON true
WHERE a.id = ANY ($1::text[]);

-- name: paid_jobs
SELECT id, spec ->> 'name' AS name, team, owner FROM jobs WHERE id = ANY ($1::text[]);
