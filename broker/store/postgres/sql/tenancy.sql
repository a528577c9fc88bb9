-- Teams with their tokens, secrets and uploads. A statement about a user's rows names the team, although row-level
-- security also selects it. The policies admit an operator to all teams, but an operator reads the secrets of one team.

-- name: enter
SELECT set_config('gpubroker.team', $1, true), set_config('gpubroker.operator', $2, true);

-- name: api_role
SELECT current_user AS name, rolsuper OR rolbypassrls AS passes FROM pg_roles WHERE rolname = current_user;

-- name: put_token
INSERT INTO tokens (id, team, owner, scopes, created_at, expires_at, note, secret_sha256)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (id) DO NOTHING RETURNING id;

-- name: token
SELECT * FROM tokens WHERE secret_sha256 = $1;

-- name: end_session
WITH old AS (
    DELETE FROM ended_sessions WHERE id IN (
        SELECT id FROM ended_sessions WHERE until < clock_timestamp() ORDER BY until LIMIT 100 FOR UPDATE SKIP LOCKED))
INSERT INTO ended_sessions (id, until) VALUES ($1, clock_timestamp() + $2::double precision * interval '1 s')
ON CONFLICT (id) DO NOTHING;

-- name: is_session_ended
SELECT EXISTS (SELECT FROM ended_sessions WHERE id = $1) AS ended;

-- name: tokens
SELECT id, team, owner, scopes, created_at, expires_at, note FROM tokens ORDER BY created_at, id;

-- name: enter_revocation
-- Serialises two simultaneous revocations, so that the second sees that its token is the last. This is a separate
-- statement, because the next statement needs a later snapshot.
SELECT pg_advisory_xact_lock(hashtextextended('gpubroker.revocation', 0));

-- name: delete_token
DELETE FROM tokens WHERE id = $1 RETURNING id, team, owner, scopes, created_at, expires_at, note;

-- name: put_secret
INSERT INTO secrets (team, owner, name, sealed) VALUES ($1, $2, $3, $4)
ON CONFLICT (team, owner, name) DO UPDATE SET sealed = excluded.sealed;

-- name: secrets
SELECT name, sealed FROM secrets WHERE team = $1 AND owner = $2 AND ($3::text[] IS NULL OR name = ANY ($3));

-- name: delete_secret
DELETE FROM secrets WHERE team = $1 AND owner = $2 AND name = $3 RETURNING name;

-- name: put_upload
INSERT INTO uploads (team, owner, sha256, bytes, name, summary) VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (team, owner, sha256)
DO UPDATE SET bytes = excluded.bytes, name = excluded.name, summary = excluded.summary, put_at = clock_timestamp(),
    gone_at = NULL;

-- name: upload
SELECT * FROM uploads WHERE team = $1 AND owner = $2 AND sha256 = $3;

-- name: put_team
INSERT INTO teams (name, note) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING *;

-- name: teams
SELECT * FROM teams ORDER BY name;

-- name: delete_team
DELETE FROM teams WHERE name = $1 RETURNING *;

-- name: write_audit
INSERT INTO audit (team, actor, token_id, action, target, before, after, usd)
SELECT u.team, u.actor, u.token_id, u.action, u.target, u.before::jsonb, u.after::jsonb, u.usd
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::numeric[])
    AS u (team, actor, token_id, action, target, before, after, usd);

-- name: audit
SELECT * FROM audit
WHERE ($1::text IS NULL OR team = $1)
    AND ($2::text IS NULL OR actor = $2)
    AND ($3::text IS NULL OR action = $3 OR starts_with(action, $3 || '.'))
    AND ($4::text IS NULL OR target = $4)
    AND ($5::timestamptz IS NULL OR at >= $5)
    AND ($6::timestamptz IS NULL OR at < $6)
    AND ($7::timestamptz IS NULL OR (at, id) < ($7, $8::uuid))
ORDER BY at DESC, id DESC LIMIT $9;
