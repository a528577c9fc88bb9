-- Reports of spending. They read the ledger; an index serves their time window.

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

-- name: finished_jobs
-- The quote is that of the first attempt with a heartbeat; costs and hours begin with it.
SELECT a.line #>> '{offer,accelerator}' AS accelerator, (a.line #>> '{offer,gpus}')::bigint AS gpus,
    COALESCE((a.line #>> '{offer,simulated}')::boolean, false) AS simulated,
    a.line #>> '{offer,emulated_on}' IS NOT NULL AS emulated,
    COALESCE(j.workload #>> '{shape,family}', '') AS family, j.workload ->> 'method' AS method,
    COALESCE(j.workload ->> 'task', 'causal_lm') AS task, a.line ->> 'tier' AS tier,
    (a.line ->> 'usd_p50')::numeric AS usd_p50, (a.line ->> 'usd_p90')::numeric AS usd_p90,
    COALESCE((a.line #>> '{costs,storage}')::numeric + (a.line #>> '{costs,requests}')::numeric, 0) AS bucket_usd,
    (a.line ->> 'hours_p50')::double precision AS hours_p50, (a.line ->> 'hours_p90')::double precision AS hours_p90,
    a.line -> 'memory' AS memory, life.spent_usd,
    (extract(epoch FROM life.until - a.create_sent_at) / 3600)::double precision AS hours,
    CASE WHEN (last.report ->> 'step')::numeric > COALESCE((last.report ->> 'resumed_from')::numeric, 0)
        THEN (last.report ->> 'peak_memory_bytes')::numeric END AS peak_bytes,
    COALESCE(a.reason = 'oom'
        AND ((a.line #>> '{offer,gpus}')::bigint = 0 OR a.final ->> 'ran_out' IS DISTINCT FROM 'host'), false)
        AS out_of_memory
FROM jobs j
CROSS JOIN LATERAL (
    SELECT * FROM attempts WHERE job_id = j.id AND first_beat_at IS NOT NULL ORDER BY number LIMIT 1
) AS a
CROSS JOIN LATERAL (SELECT COALESCE(a.final, a.beat) AS report) AS last
CROSS JOIN LATERAL (
    SELECT sum(l.charged_usd) AS spent_usd, max(COALESCE(l.terminating_since, l.ended_at)) AS until
    FROM attempts l WHERE l.job_id = j.id AND l.number >= a.number
) AS life
WHERE j.state = 'succeeded' AND j.finished_at >= $1 AND j.finished_at < $2
ORDER BY j.finished_at DESC, j.id LIMIT $3;
