-- Links of Slack users to users of teams.

-- name: lock_slack_user
SELECT * FROM slack_users WHERE team = $1 AND workspace = $2 AND slack_user = $3 FOR UPDATE;

-- name: put_slack_user
INSERT INTO slack_users (team, workspace, slack_user, owner, scopes, name, linked_by)
VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT (team, workspace, slack_user)
DO UPDATE SET owner = excluded.owner, scopes = excluded.scopes, name = excluded.name, linked_by = excluded.linked_by,
    linked_at = clock_timestamp();

-- name: slack_users
SELECT * FROM slack_users
WHERE ($1::text IS NULL OR workspace = $1) AND ($2::text IS NULL OR slack_user = $2)
ORDER BY team, workspace, slack_user;

-- name: unlink_tokenless
-- Deletes the Slack links of a user without tokens.
DELETE FROM slack_users WHERE team = $1 AND owner = $2
    AND NOT EXISTS (SELECT id FROM tokens t WHERE t.team = $1 AND t.owner = $2) RETURNING *;

-- name: delete_slack_user
DELETE FROM slack_users WHERE team = $1 AND workspace = $2 AND slack_user = $3 RETURNING *;
