-- People of Slack workspaces and as whom they act.

SET LOCAL statement_timeout = '60s';

CREATE TABLE slack_users (
    team text NOT NULL CONSTRAINT slack_users_team REFERENCES teams (name) ON DELETE CASCADE,
    -- T... and U..., as Slack names them
    workspace text NOT NULL,
    slack_user text NOT NULL,
    owner text NOT NULL CONSTRAINT slack_users_owner CHECK (owner <> ''),
    scopes text[] NOT NULL,
    name text NOT NULL,
    linked_by text NOT NULL,
    linked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (team, workspace, slack_user)
);
CREATE INDEX slack_users_person ON slack_users (workspace, slack_user);

CALL gpubroker_protect('slack_users',
    'SELECT, INSERT, UPDATE (owner, scopes, name, linked_by, linked_at), DELETE');
