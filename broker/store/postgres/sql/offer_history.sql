-- Prices and availability over time.

-- name: record_offers
-- The first document of a sample marks the listing as read. The broker that inserts it writes the sample.
WITH given AS (
    SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bytea[])
        AS u (accelerator, provider, bucket, document)
), first AS (
    INSERT INTO offer_history (accelerator, bucket, provider, merged, document)
    SELECT accelerator, bucket, provider, false, document FROM given WHERE accelerator = ''
    ON CONFLICT DO NOTHING RETURNING provider, bucket
), rest AS (
    INSERT INTO offer_history (accelerator, bucket, provider, merged, document)
    SELECT g.accelerator, g.bucket, g.provider, false, g.document
    FROM given g JOIN first f USING (provider, bucket) WHERE g.accelerator <> ''
    ON CONFLICT DO NOTHING
)
SELECT provider, bucket FROM first;

-- name: record_refusal
INSERT INTO offer_refusals (provider, cloud, region, accelerator, gpus, spot, bucket)
VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING;

-- name: offer_history
-- A merged row may hold buckets up to the end of its day.
SELECT accelerator, provider, bucket, document FROM offer_history
WHERE accelerator = ANY ($1::text[]) AND bucket > $2::bigint - 288 AND bucket <= $3
ORDER BY merged DESC, bucket;

-- name: offer_refusals
SELECT provider, cloud, region, accelerator, gpus, spot, bucket FROM offer_refusals
WHERE accelerator = ANY ($1::text[]) AND bucket BETWEEN $2 AND $3;

-- name: spot_evidence
-- Every broker reads the last two weeks every 10 minutes. An index serves each part; one snapshot serves all parts.
SELECT 'listed' AS kind, provider, '' AS cloud, '' AS region, accelerator, 0::bigint AS gpus, 0::bigint AS nodes,
    bucket::double precision AS since, 0::double precision AS until, merged AS is_flagged, document
FROM offer_history WHERE accelerator = ANY ($1::text[]) AND bucket > $2::bigint - 288
UNION ALL
SELECT 'refused', provider, cloud, region, accelerator, gpus, 1, bucket, 0, false, NULL
FROM offer_refusals WHERE accelerator = ANY ($1::text[]) AND bucket >= $2 AND spot
UNION ALL
SELECT 'own', line -> 'offer' ->> 'provider', line -> 'offer' ->> 'cloud', line -> 'offer' ->> 'region',
    line -> 'offer' ->> 'accelerator', (line -> 'offer' ->> 'gpus')::bigint, (line ->> 'nodes')::bigint,
    extract(epoch FROM coalesce(running_at, create_sent_at)),
    extract(epoch FROM coalesce(terminating_since, ended_at, clock_timestamp())), reason IS NOT DISTINCT FROM 'preempted', NULL
FROM attempts
WHERE create_sent_at > to_timestamp($2 * 300.0) AND (line -> 'offer' ->> 'spot')::boolean
    AND (running_at IS NOT NULL OR reason = 'preempted');

-- name: recorded_accelerators
-- Reads one index entry for each name instead of all rows.
WITH RECURSIVE names AS (
    SELECT min(accelerator) AS name FROM offer_history
    UNION ALL
    SELECT (SELECT min(h.accelerator) FROM offer_history h WHERE h.accelerator > n.name)
    FROM names n WHERE n.name IS NOT NULL
)
SELECT name FROM names WHERE name <> ''
UNION SELECT DISTINCT accelerator FROM offer_refusals ORDER BY 1;

-- name: lock_offer_history
-- One broker merges or deletes at a time; it holds the lock until its transaction ends.
SELECT pg_try_advisory_xact_lock(hashtextextended('gpubroker offer_history', 0)) AS is_ours;

-- name: take_samples
DELETE FROM offer_history WHERE NOT merged AND bucket < $1 RETURNING accelerator, provider, bucket, document;

-- name: take_days
DELETE FROM offer_history WHERE merged AND bucket = ANY ($1::bigint[])
RETURNING accelerator, provider, bucket, document;

-- name: put_days
INSERT INTO offer_history (accelerator, provider, bucket, merged, document)
SELECT accelerator, provider, bucket, true, document
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bytea[]) AS u (accelerator, provider, bucket, document);

-- name: forget_offer_history
WITH days AS (DELETE FROM offer_history WHERE merged AND bucket <= $1::bigint - 288 RETURNING 1),
samples AS (DELETE FROM offer_history WHERE NOT merged AND bucket < $1 RETURNING 1),
refusals AS (DELETE FROM offer_refusals WHERE bucket < $1 RETURNING 1)
SELECT (SELECT count(*) FROM days) + (SELECT count(*) FROM samples) + (SELECT count(*) FROM refusals) AS n;
