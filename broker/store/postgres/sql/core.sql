-- Every statement of the PostgreSQL store, loaded by name (postgres_pool.py).
-- Locks are taken on jobs before attempts, each in the order of their ids, so that transactions do not deadlock.
-- Each statement reads `clock` once, so that an index serves the comparison and a lease's end equals due_at.

-- ---------------------------------------------------------------------------------------------------------- claiming

-- name: claim_jobs
WITH clock AS MATERIALIZED (
    SELECT now, now + $5 * interval '1 second' AS until FROM clock_timestamp() AS now
), due AS (
    SELECT row.id
    FROM unnest($1::text[], $2::boolean[]) AS wanted (state, only_stopped),
    LATERAL (
        SELECT j.id FROM jobs j
        WHERE j.state = wanted.state AND (NOT wanted.only_stopped OR j.stop_requested)
            AND j.due_at <= (SELECT now FROM clock)
            AND (j.lease_until IS NULL OR j.lease_until <= (SELECT now FROM clock))
        ORDER BY j.priority DESC, j.created_at, j.id LIMIT $3 FOR NO KEY UPDATE SKIP LOCKED
    ) AS row
    LIMIT $3
)
UPDATE jobs j SET epoch = j.epoch + 1, lease_owner = $4,
    lease_until = (SELECT until FROM clock),
    due_at = (SELECT until FROM clock)
FROM due WHERE j.id = due.id
RETURNING j.*;

-- name: claim_attempts
WITH clock AS MATERIALIZED (
    SELECT now, now + $4 * interval '1 second' AS until FROM clock_timestamp() AS now
), due AS (
    SELECT id FROM attempts
    WHERE lane = $1 AND due_at <= (SELECT now FROM clock)
        AND (lease_until IS NULL OR lease_until <= (SELECT now FROM clock))
        AND ($5::text[] IS NULL OR EXISTS (
            SELECT FROM unnest($5::text[], $6::float8[]) AS turn (provider, later_s)
            WHERE turn.provider = line -> 'offer' ->> 'provider'
                AND (stop_requested OR signal IS NOT NULL
                    OR due_at <= (SELECT now FROM clock) - turn.later_s * interval '1 second')))
    ORDER BY due_at LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED
), leased AS (
    UPDATE attempts a SET epoch = a.epoch + 1, lease_owner = $3,
        lease_until = (SELECT until FROM clock),
        due_at = (SELECT until FROM clock)
    FROM due WHERE a.id = due.id
    RETURNING a.*
)
SELECT leased.*, prices_of(leased.id) AS prices, {job_columns} FROM leased JOIN jobs j ON j.id = leased.job_id;

-- name: claim_reviews
WITH clock AS MATERIALIZED (
    SELECT clock_timestamp() AS now
), due AS (
    SELECT id FROM attempts
    WHERE lane = 'liveness' AND state = 'training'
        AND reviewed_at < (SELECT now - LEAST($4::float8, $5::float8) * interval '1 second' FROM clock)
        AND (reviewed_by = $1 OR reviewed_at < (SELECT now - $4::float8 * interval '1 second' FROM clock))
        AND line -> 'offer' ->> 'provider' = ANY ($2::text[])
    ORDER BY reviewed_at LIMIT $3 FOR NO KEY UPDATE SKIP LOCKED
), claimed AS (
    UPDATE attempts a SET reviewed_at = (SELECT now FROM clock), reviewed_by = $1 FROM due WHERE a.id = due.id
    RETURNING a.*
)
SELECT claimed.*, prices_of(claimed.id) AS prices, {job_columns} FROM claimed JOIN jobs j ON j.id = claimed.job_id;

-- name: release_jobs
-- A due_at before the lease's end means that a signal arrived during the lease: the row is due now.
WITH held AS (
    SELECT j.id FROM jobs j JOIN unnest($1::text[], $2::bigint[]) AS read (id, epoch) USING (id, epoch)
    ORDER BY j.id FOR NO KEY UPDATE OF j
)
UPDATE jobs j SET lease_until = NULL, lease_owner = NULL,
    due_at = CASE WHEN j.due_at < j.lease_until THEN clock_timestamp()
                  ELSE clock_timestamp() + $3 * interval '1 second' END
FROM held WHERE j.id = held.id;

-- name: release_attempts
WITH held AS (
    SELECT a.id FROM attempts a JOIN unnest($1::text[], $2::bigint[]) AS read (id, epoch) USING (id, epoch)
    ORDER BY a.id FOR NO KEY UPDATE OF a
)
UPDATE attempts a SET lease_until = NULL, lease_owner = NULL,
    due_at = CASE WHEN a.due_at < a.lease_until THEN clock_timestamp()
                  ELSE clock_timestamp() + $3 * interval '1 second' END
FROM held WHERE a.id = held.id;

-- name: end_leases
-- A claim that is not committed yet keeps its lease.
WITH held AS (
    SELECT id FROM attempts WHERE lane IS NOT NULL AND lease_owner = $1 ORDER BY id FOR NO KEY UPDATE
)
UPDATE attempts a SET epoch = a.epoch + 1, lease_until = NULL, lease_owner = NULL, due_at = clock_timestamp()
FROM held WHERE a.id = held.id;

-- Repairs rows whose times are later than any lease allows, which happens when the clock was set back. Without a repair
-- a row would wait for as long as the clock was ahead.

-- name: repair_jobs
UPDATE jobs j SET epoch = j.epoch + 1, lease_until = NULL, lease_owner = NULL, due_at = clock_timestamp(),
    stored_due_at = CASE WHEN j.stored_due_at IS NOT NULL THEN LEAST(j.stored_due_at, clock_timestamp()) END
FROM (
    SELECT id FROM jobs WHERE finished_at IS NULL AND (due_at > clock_timestamp() + interval '2 minutes'
            OR lease_until > clock_timestamp() + interval '2 minutes')
        OR stored_due_at > clock_timestamp() + interval '2 hours'
    ORDER BY id FOR NO KEY UPDATE
) AS late WHERE j.id = late.id;

-- name: repair_attempts
UPDATE attempts a SET epoch = a.epoch + 1, lease_until = NULL, lease_owner = NULL, due_at = clock_timestamp(),
    reviewed_at = LEAST(a.reviewed_at, clock_timestamp())
FROM (
    SELECT id FROM attempts WHERE lane IS NOT NULL AND (due_at > clock_timestamp() + interval '2 minutes'
        OR lease_until > clock_timestamp() + interval '2 minutes' OR reviewed_at > clock_timestamp() + interval '2 minutes')
    ORDER BY id FOR NO KEY UPDATE
) AS late WHERE a.id = late.id;

-- name: repair_streams
UPDATE streams SET due_at = LEAST(due_at, clock_timestamp()),
    refresh_at = CASE WHEN refresh_at IS NOT NULL THEN LEAST(refresh_at, clock_timestamp()) END,
    epoch = epoch + (lease_until IS NOT NULL)::int, lease_until = NULL, lease_owner = NULL
WHERE due_at > clock_timestamp() + interval '1 hour' OR refresh_at > clock_timestamp() + interval '1 hour'
    OR lease_until > clock_timestamp() + interval '5 minutes';

-- name: repair_channels
UPDATE channels SET not_before = clock_timestamp() WHERE not_before > clock_timestamp() + interval '1 hour';

-- ---------------------------------------------------------------------------------------------------------- applying

-- name: lock_jobs
SELECT id, team, owner, epoch, state, attempts, stop_requested, event_seq, cap_usd, approved_usd FROM jobs
WHERE id = ANY ($1::text[]) ORDER BY id FOR NO KEY UPDATE;

-- name: lock_attempts
SELECT id, epoch, state, charged_to FROM attempts
WHERE id = ANY ($1::text[]) ORDER BY id FOR NO KEY UPDATE;

-- name: write_attempts
UPDATE attempts a SET state = u.state, reason = u.reason, detail = u.detail, create_sent_at = u.create_sent_at,
    launched_by = COALESCE(u.launched_by, a.launched_by), handles = u.handles::jsonb, booted_at = u.booted_at, first_beat_at = u.first_beat_at,
    draining_since = u.draining_since, terminating_since = u.terminating_since, destroy_failures = u.destroy_failures,
    ended_at = u.ended_at, beat = u.beat::jsonb, final = u.final::jsonb, absent_at = u.absent_at,
    running_at = u.running_at, earlier_sent = u.earlier_sent, earlier_received = u.earlier_received, lease_until = NULL, lease_owner = NULL,
    due_at = CASE WHEN a.due_at < a.lease_until THEN clock_timestamp()
                  ELSE clock_timestamp() + u.due_in_s * interval '1 second' END
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::timestamptz[], $6::text[], $7::text[],
    $8::timestamptz[], $9::timestamptz[], $10::timestamptz[], $11::timestamptz[], $12::bigint[], $13::timestamptz[],
    $14::text[], $15::text[], $16::timestamptz[], $17::timestamptz[], $18::bigint[], $19::bigint[],
    $20::double precision[]) AS u (id, state, reason,
    detail, create_sent_at, launched_by, handles, booted_at, first_beat_at, draining_since, terminating_since,
    destroy_failures, ended_at, beat, final, absent_at, running_at, earlier_sent, earlier_received, due_in_s)
WHERE a.id = u.id;

-- name: write_jobs
-- A NULL state changes neither the controllers' columns nor the lease, only money and the event counter.
UPDATE jobs j SET state = COALESCE(u.state, j.state), reason = COALESCE(u.reason, j.reason),
    attempts = COALESCE(u.attempts, j.attempts), retries_used = COALESCE(u.retries_used, j.retries_used),
    preemptions_without_progress = COALESCE(u.preemptions_without_progress, j.preemptions_without_progress),
    remedy = COALESCE(u.remedy::jsonb, j.remedy), machine_s = COALESCE(u.machine_s, j.machine_s),
    finished_at = CASE WHEN u.state IS NULL THEN j.finished_at ELSE u.finished_at END,
    lease_until = CASE WHEN u.state IS NULL THEN j.lease_until END,
    lease_owner = CASE WHEN u.state IS NULL THEN j.lease_owner END,
    due_at = CASE WHEN u.state IS NULL THEN j.due_at
                  WHEN j.due_at < j.lease_until THEN clock_timestamp()
                  ELSE clock_timestamp() + u.due_in_s * interval '1 second' END,
    stored_due_at = CASE WHEN u.state IN ('succeeded', 'capped', 'cancelled', 'failed') THEN clock_timestamp()
                         ELSE j.stored_due_at END,
    spent_usd = j.spent_usd + u.usd, event_seq = j.event_seq + u.events
FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::text[],
    $8::timestamptz[], $9::double precision[], $10::double precision[], $11::numeric[], $12::bigint[]) AS u (id, state,
    reason, attempts, retries_used, preemptions_without_progress, remedy, finished_at, machine_s, due_in_s, usd, events)
WHERE j.id = u.id;

-- name: admit_attempts
INSERT INTO attempts (id, job_id, number, name, line, created_at, reserved_usd, resume_from, state, reason, detail,
    create_sent_at, launched_by, handles, destroy_failures, charged_usd, stop_requested, host, due_at)
SELECT u.id, u.job_id, u.number, u.name, u.line::jsonb, u.created_at, u.reserved_usd, u.resume_from::jsonb, u.state,
    u.reason, u.detail, u.create_sent_at, u.launched_by, '[]', 0, 0, u.stop_requested, u.host, clock_timestamp()
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[], $5::text[], $6::timestamptz[], $7::numeric[], $8::text[],
    $9::text[], $10::text[], $11::text[], $12::timestamptz[], $13::text[], $14::text[], $15::boolean[]) AS u (id, job_id,
    number, name, line, created_at, reserved_usd, resume_from, state, reason, detail, create_sent_at, launched_by, host,
    stop_requested);

-- name: write_charges
-- Every charge advances the fence, even a charge for no time, so that a writer with older values is refused.
UPDATE attempts a SET charged_usd = a.charged_usd + u.usd + u.traffic_usd, traffic_usd = a.traffic_usd + u.traffic_usd,
    charged_to = GREATEST(u.charged_to, a.charged_to + interval '1 microsecond'), signal = COALESCE(a.signal, u.signal),
    due_at = CASE WHEN u.signal IS NOT NULL AND a.signal IS NULL THEN clock_timestamp() ELSE a.due_at END
FROM unnest($1::text[], $2::numeric[], $3::numeric[], $4::timestamptz[], $5::text[])
    AS u (id, usd, traffic_usd, charged_to, signal)
WHERE a.id = u.id;

-- name: write_ledger
INSERT INTO ledger (job_id, attempt_id, kind, usd, note, category, at)
SELECT u.job_id, u.attempt_id, u.kind, u.usd, u.note, u.category, COALESCE(u.at, clock_timestamp())
FROM unnest($1::text[], $2::text[], $3::text[], $4::numeric[], $5::text[], $6::text[], $7::timestamptz[])
    AS u (job_id, attempt_id, kind, usd, note, category, at);

-- name: write_prices
INSERT INTO price_changes (attempt_id, since, usd_per_hour, extra_machines)
SELECT * FROM unnest($1::text[], $2::timestamptz[], $3::numeric[], $4::bigint[]);

-- name: write_events
INSERT INTO events (job_id, seq, kind, message, attempt_id, data)
SELECT u.job_id, u.seq, u.kind, u.message, u.attempt_id, u.data::jsonb
FROM unnest($1::text[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::text[])
    AS u (job_id, seq, kind, message, attempt_id, data);

-- name: notify
SELECT pg_notify('gpubroker', payload) FROM unnest($1::text[]) AS payload;

-- ------------------------------------------------------------------------------------------------- reading and money

-- name: live_versions
-- xmin changes with every committed write of a row. A price change is written with a charge, which also writes the
-- attempt's row.
SELECT a.id, a.xmin::text::bigint AS version, j.xmin::text::bigint AS j_version
FROM attempts a JOIN jobs j ON j.id = a.job_id WHERE a.lane IS NOT NULL;

-- name: sent_versions
SELECT a.id, a.xmin::text::bigint AS version, j.xmin::text::bigint AS j_version
FROM attempts a JOIN jobs j ON j.id = a.job_id WHERE a.lane IS NOT NULL AND a.create_sent_at IS NOT NULL;

-- name: live_changes
SELECT a.id, prices_of(a.id) AS prices, a.xmin::text::bigint AS version, j.xmin::text::bigint AS j_version, {changed_columns}
FROM unnest($1::text[]) AS wanted (id) JOIN attempts a ON a.id = wanted.id JOIN jobs j ON j.id = a.job_id
WHERE a.lane IS NOT NULL;

-- name: live_attempts
SELECT a.*, prices_of(a.id) AS prices, a.xmin::text::bigint AS version, j.xmin::text::bigint AS j_version, {job_columns}
FROM unnest($1::text[]) AS wanted (id) JOIN attempts a ON a.id = wanted.id JOIN jobs j ON j.id = a.job_id
WHERE a.lane IS NOT NULL;

-- name: unproven_launches
SELECT *, prices_of(id) AS prices FROM attempts WHERE lane = 'termination' AND launched_by <> '';

-- name: mark_launchers_finished
WITH held AS (
    SELECT a.id FROM attempts a JOIN unnest($1::text[], $2::text[]) AS u (id, launched_by) USING (id, launched_by)
    WHERE a.lane = 'termination' ORDER BY a.id FOR NO KEY UPDATE OF a
)
UPDATE attempts a SET launched_by = '' FROM held WHERE a.id = held.id;

-- name: attempts_by_id
SELECT *, prices_of(id) AS prices FROM attempts WHERE id = ANY ($1::text[]);

-- name: ended_at_host
SELECT *, prices_of(id) AS prices FROM attempts
WHERE host = $1 AND state = 'ended' AND reason = ANY ($2::text[])
    AND ended_at > clock_timestamp() - $3::double precision * interval '1 second'
ORDER BY ended_at DESC, id LIMIT $4;

-- name: block_offer
WITH swept AS (DELETE FROM offer_blocks WHERE until <= clock_timestamp() AND offer_id <> $1)
INSERT INTO offer_blocks (offer_id, reason, until)
VALUES ($1, $2, clock_timestamp() + $3::double precision * interval '1 second')
ON CONFLICT (offer_id) DO UPDATE SET reason = excluded.reason, until = excluded.until;

-- name: blocked_offers
SELECT offer_id, reason FROM offer_blocks WHERE until > clock_timestamp();

-- name: write_decisions
INSERT INTO decisions (attempt_id, document)
SELECT u.attempt_id, u.document FROM unnest($1::text[], $2::bytea[]) AS u (attempt_id, document);

-- name: write_observations
INSERT INTO observations (attempt_id, hardware, method, family, seen)
SELECT u.attempt_id, u.hardware, u.method, u.family, u.seen::jsonb
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[])
    AS u (attempt_id, hardware, method, family, seen);

-- name: observations
SELECT id, seen FROM (
    SELECT id, seen, row_number() OVER (PARTITION BY hardware, method, family ORDER BY id DESC) AS place
    FROM observations
) AS latest
WHERE place <= $1 ORDER BY id;

-- name: spot_hours
SELECT line -> 'offer' ->> 'provider' AS provider, line -> 'offer' ->> 'cloud' AS cloud,
    line -> 'offer' ->> 'region' AS region, line -> 'offer' ->> 'accelerator' AS accelerator,
    sum(extract(epoch FROM coalesce(terminating_since, ended_at, clock_timestamp()) - create_sent_at)
        / 3600 * (line ->> 'nodes')::bigint)::double precision AS hours,
    count(*) FILTER (WHERE reason = 'preempted') AS preemptions
FROM attempts
WHERE create_sent_at > clock_timestamp() - $1::double precision * interval '1 second'
    AND (line -> 'offer' ->> 'spot')::boolean
GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4;

-- ----------------------------------------------------------------------------------------------- the API's use cases

-- name: submit
-- Sorted by key, so that two brokers with the same keys do not deadlock.
INSERT INTO jobs AS j (id, team, owner, spec, workload, created_at, state, reason, attempts, retries_used,
    finished_at, spent_usd, cap_usd, stop_requested, retry_of, idempotency_key, body_sha256, due_at, event_seq)
SELECT u.id, u.team, u.owner, u.spec::jsonb, u.workload::jsonb, clock_timestamp(), u.state, u.reason, u.attempts,
    u.retries_used, u.finished_at, u.spent_usd, u.cap_usd, u.stop_requested, u.retry_of, u.key,
    u.body_sha256, clock_timestamp(), u.events
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::bigint[],
    $9::bigint[], $10::timestamptz[], $11::numeric[], $12::numeric[], $13::boolean[], $14::text[],
    $15::text[], $16::text[], $17::bigint[]) AS u (id, team, owner, spec, workload, state, reason, attempts,
    retries_used, finished_at, spent_usd, cap_usd, stop_requested, retry_of, key, body_sha256, events)
ORDER BY u.team, u.owner, u.key
ON CONFLICT (team, owner, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
RETURNING j.id, j.created_at, j.due_at;

-- name: submitted
-- Events, audit entries and the notification of new jobs in one round trip. The jobs are visible to the policies of
-- `events`, because an earlier statement of the transaction wrote them.
WITH reported AS (
    INSERT INTO events (job_id, seq, kind, message, attempt_id, data)
    SELECT u.job_id, u.seq, u.kind, u.message, u.attempt_id, u.data::jsonb
    FROM unnest($1::text[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::text[])
        AS u (job_id, seq, kind, message, attempt_id, data)
), audited AS (
    INSERT INTO audit (team, actor, token_id, action, target, before, after, usd)
    SELECT u.team, u.actor, u.token_id, u.action, u.target, u.before::jsonb, u.after::jsonb, u.usd
    FROM unnest($7::text[], $8::text[], $9::text[], $10::text[], $11::text[], $12::text[], $13::text[], $14::numeric[])
        AS u (team, actor, token_id, action, target, before, after, usd)
)
SELECT pg_notify('gpubroker', 'jobs');

-- name: jobs_by_key
SELECT j.* FROM jobs j JOIN unnest($1::text[], $2::text[], $3::text[]) AS u (team, owner, key)
ON j.team = u.team AND j.owner = u.owner AND j.idempotency_key = u.key;

-- name: job
SELECT * FROM jobs WHERE id = $1;

-- name: jobs
SELECT * FROM jobs
WHERE ($1::text IS NULL OR owner = $1)
    AND (cardinality($2::text[]) = 0 OR state = ANY ($2))
    AND ($3::timestamptz IS NULL OR created_at >= $3)
    AND ($4::timestamptz IS NULL OR created_at < $4)
    AND ($5::timestamptz IS NULL OR (created_at, id) < ($5, $6::text))
    AND ($8::text IS NULL OR team = $8)
ORDER BY created_at DESC, id DESC LIMIT $7;

-- name: labelled_jobs
-- Selects the jobs that have all labels, newest first, by the index on the first label.
SELECT jobs.* FROM job_labels AS first JOIN jobs ON jobs.id = first.job_id
WHERE first.label = ($9::text[])[1]
    AND ($1::text IS NULL OR jobs.owner = $1)
    AND (cardinality($2::text[]) = 0 OR jobs.state = ANY ($2))
    AND ($3::timestamptz IS NULL OR first.created_at >= $3)
    AND ($4::timestamptz IS NULL OR first.created_at < $4)
    AND ($5::timestamptz IS NULL OR (first.created_at, first.job_id) < ($5, $6::text))
    AND ($8::text IS NULL OR first.team = $8)
    AND (cardinality($9::text[]) = 1 OR first.job_id IN (
        SELECT job_id FROM job_labels WHERE label = ANY ($9) GROUP BY job_id HAVING count(*) = cardinality($9)))
ORDER BY first.created_at DESC, first.job_id DESC LIMIT $7;

-- name: attempts
SELECT *, prices_of(id) AS prices FROM attempts WHERE job_id = $1 ORDER BY number;

-- name: lock_job
SELECT * FROM jobs WHERE id = $1 FOR NO KEY UPDATE;

-- name: request_stop
UPDATE jobs SET stop_requested = true, due_at = clock_timestamp(), event_seq = event_seq + 1 WHERE id = $1 RETURNING *;

-- name: stop_attempts
UPDATE attempts SET stop_requested = true, due_at = clock_timestamp() WHERE job_id = $1 AND state <> 'ended';

-- name: raise_cap
UPDATE jobs SET cap_usd = $2, event_seq = event_seq + 1,
    state = CASE WHEN state = 'capped' THEN 'queued' ELSE state END,
    reason = CASE WHEN state = 'capped' THEN '' ELSE reason END,
    finished_at = CASE WHEN state = 'capped' THEN NULL ELSE finished_at END,
    -- data that the job creates from now on was not deleted
    deleted = CASE WHEN state = 'capped' THEN deleted - ARRAY['artifacts', 'checkpoints', 'logs'] ELSE deleted END,
    due_at = CASE WHEN state IN ('capped', 'queued') THEN clock_timestamp() ELSE due_at END
WHERE id = $1 RETURNING *;

-- name: events
SELECT * FROM events WHERE job_id = $1 AND seq > $2 ORDER BY seq LIMIT $3;

-- name: decision
SELECT document FROM decisions WHERE attempt_id = $1;

-- name: ledger
SELECT * FROM ledger WHERE job_id = $1 ORDER BY id;

-- name: counts
SELECT 'jobs' AS of, state, count(*) AS n FROM jobs GROUP BY state
UNION ALL
SELECT 'attempts', state, count(*) FROM attempts GROUP BY state;

-- ------------------------------------------------------------------------------------------------------ installation

-- name: installation
WITH proposed AS (INSERT INTO installation (id) VALUES ($1) ON CONFLICT DO NOTHING RETURNING id)
SELECT id FROM proposed UNION ALL SELECT id FROM installation LIMIT 1;

-- name: known_installation
SELECT id FROM installation;

-- name: blob_store
UPDATE installation SET blob_store = coalesce(blob_store, $1) RETURNING blob_store;

-- name: adopt_blob_store
UPDATE installation SET blob_store = $1 RETURNING blob_store;

-- name: master_key
UPDATE installation SET master_key = coalesce(master_key, $1) RETURNING master_key;

-- name: adopt_master_key
UPDATE installation SET master_key = $1 RETURNING master_key;

-- name: database
SELECT control.system_identifier::text || '/' || own.oid::text AS id
FROM pg_control_system() AS control, pg_database AS own WHERE own.datname = current_database();

-- name: read_pages
-- Reads the pages from block $1 up to block $2 of the tables that decide what is bought, and so verifies their checksums.
SELECT (SELECT count(*) FROM jobs WHERE ctid >= $1::tid AND ctid < $2::tid)
        + (SELECT count(*) FROM attempts WHERE ctid >= $1::tid AND ctid < $2::tid)
        + (SELECT count(*) FROM ledger WHERE ctid >= $1::tid AND ctid < $2::tid)
        + (SELECT count(*) FROM policies WHERE ctid >= $1::tid AND ctid < $2::tid) AS rows,
    (SELECT max(pg_relation_size(name::regclass)) FROM unnest(ARRAY['jobs', 'attempts', 'ledger', 'policies']) AS name)
        / current_setting('block_size')::bigint AS blocks;

-- name: checksum_failures
-- A page that failed its checksum in any connection, also in vacuum. NULL: the server keeps no checksums.
SELECT checksum_failures AS failures FROM pg_stat_database
WHERE datname = current_database() AND checksum_last_failure > clock_timestamp() - interval '1 hour';

-- name: ping
WITH house AS (SELECT id FROM installation FOR SHARE)
SELECT clock_timestamp() AS now, latest.version, latest.name
FROM (SELECT count(*) FROM house) AS held,
    (SELECT version, name FROM schema_migrations ORDER BY version DESC LIMIT 1) AS latest;
