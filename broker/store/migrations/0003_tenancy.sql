-- Teams. The API asks as the role gpubroker_api, which sees one team's rows: those of the setting gpubroker.team, made
-- anew in each transaction. Without the setting it sees none. The daemon itself keeps the role that migrates.
-- Brokers start after it: none reads the old keys, and none waits for a table that is written anew.
-- squawk-ignore-file adding-foreign-key-constraint, adding-serial-primary-key-field, ban-drop-constraint
-- squawk-ignore-file ban-drop-default, constraint-missing-not-valid, require-concurrent-index-deletion

SET LOCAL statement_timeout = '60s';

-- Roles belong to the whole cluster: another database's migration may make this one at the same moment.
DO $$
DECLARE
    fix constant text := format('ask an administrator to run: CREATE ROLE gpubroker_api NOLOGIN; '
        'GRANT gpubroker_api TO %I;', current_user);
    right_to_become constant text := CASE WHEN current_setting('server_version_num')::int < 160000
        THEN 'MEMBER' ELSE 'SET' END;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'gpubroker_api') THEN
        BEGIN
            CREATE ROLE gpubroker_api NOLOGIN;
        EXCEPTION
            WHEN duplicate_object OR unique_violation THEN NULL;
            WHEN insufficient_privilege THEN RAISE EXCEPTION '% may not create a role; %', current_user, fix;
        END;
    END IF;
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'gpubroker_api' AND (rolsuper OR rolbypassrls)) THEN
        RAISE EXCEPTION 'the role gpubroker_api passes row-level security by; '
            'ask an administrator to run: ALTER ROLE gpubroker_api NOSUPERUSER NOBYPASSRLS;';
    END IF;
    IF NOT pg_has_role('gpubroker_api', right_to_become) THEN
        BEGIN
            EXECUTE format('GRANT gpubroker_api TO %I', current_user);
        EXCEPTION
            WHEN unique_violation THEN NULL;
            WHEN insufficient_privilege OR invalid_grant_operation THEN
                RAISE EXCEPTION '% may not become gpubroker_api; %', current_user, fix;
        END;
    END IF;
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO gpubroker_api', current_schema());
END $$;

CREATE FUNCTION gpubroker_team() RETURNS text LANGUAGE sql STABLE AS $$
    SELECT NULLIF(current_setting('gpubroker.team', true), '')
$$;
CREATE FUNCTION gpubroker_operator() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT current_setting('gpubroker.operator', true) = 'on'
$$;

-- Every table with rows of teams goes through this, in the migration that makes it: `privileges` is the least that the
-- API needs (none: it cannot touch the table), `visible` which rows are the team's.
CREATE PROCEDURE gpubroker_protect(target regclass, privileges text, visible text DEFAULT 'team = gpubroker_team()')
LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', target);
    EXECUTE format('ALTER TABLE %s FORCE ROW LEVEL SECURITY', target);
    EXECUTE format('CREATE POLICY house ON %s TO CURRENT_USER USING (true) WITH CHECK (true)', target);
    IF privileges <> '' THEN
        EXECUTE format('CREATE POLICY team ON %s TO gpubroker_api USING (gpubroker_operator() OR %s)', target, visible);
        EXECUTE format('GRANT %s ON %s TO gpubroker_api', privileges, target);
    END IF;
END $$;

CREATE TABLE teams (
    name text PRIMARY KEY CONSTRAINT teams_name CHECK (name <> ''),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    note text NOT NULL
);
INSERT INTO teams (name, note) VALUES ('default', 'made with the installation');

ALTER TABLE jobs ADD COLUMN team text NOT NULL DEFAULT 'default' CONSTRAINT jobs_team REFERENCES teams (name);
ALTER TABLE jobs ALTER COLUMN team DROP DEFAULT;
DROP INDEX jobs_key;
-- The runner needs a transaction, and brokers start after it.
-- squawk-ignore require-concurrent-index-creation
CREATE UNIQUE INDEX jobs_key ON jobs (team, owner, idempotency_key) WHERE idempotency_key IS NOT NULL;
DROP INDEX jobs_listed;
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX jobs_listed ON jobs (team, created_at, id);

-- What a team leaves behind goes with it; one with jobs stays.
ALTER TABLE tokens
    ADD COLUMN team text NOT NULL DEFAULT 'default' CONSTRAINT tokens_team REFERENCES teams (name) ON DELETE CASCADE,
    ADD COLUMN expires_at timestamptz;
ALTER TABLE tokens ALTER COLUMN team DROP DEFAULT;
ALTER TABLE secrets
    ADD COLUMN team text NOT NULL DEFAULT 'default' CONSTRAINT secrets_team REFERENCES teams (name) ON DELETE CASCADE,
    DROP CONSTRAINT secrets_pkey,
    ADD PRIMARY KEY (team, owner, name);
ALTER TABLE secrets ALTER COLUMN team DROP DEFAULT;
ALTER TABLE uploads
    ADD COLUMN team text NOT NULL DEFAULT 'default' CONSTRAINT uploads_team REFERENCES teams (name) ON DELETE CASCADE,
    DROP CONSTRAINT uploads_pkey,
    ADD PRIMARY KEY (team, owner, sha256);
ALTER TABLE uploads ALTER COLUMN team DROP DEFAULT;

-- Every write of a person or program. Ids are random: a number would tell a team how much the others do.
CREATE TABLE audit (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- '' is the installation; no foreign key: the entry outlives the team
    team text NOT NULL,
    actor text NOT NULL,
    token_id text NOT NULL,
    action text NOT NULL,
    target text NOT NULL,
    before jsonb,
    after jsonb,
    usd numeric
);
CREATE INDEX audit_listed ON audit (team, at, id);
CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

CALL gpubroker_protect('jobs',
    'SELECT, INSERT, UPDATE (stop_requested, due_at, event_seq, cap_usd, state, reason, finished_at)');
CALL gpubroker_protect('attempts', 'SELECT, UPDATE (stop_requested, due_at)',
    'EXISTS (SELECT FROM jobs WHERE jobs.id = job_id)');
CALL gpubroker_protect('events', 'SELECT, INSERT', 'EXISTS (SELECT FROM jobs WHERE jobs.id = job_id)');
CALL gpubroker_protect('ledger', 'SELECT', 'EXISTS (SELECT FROM jobs WHERE jobs.id = job_id)');
CALL gpubroker_protect('outbox', 'INSERT', 'EXISTS (SELECT FROM jobs WHERE jobs.id = job_id)');
-- All but the hash of its secret.
CALL gpubroker_protect('tokens',
    'SELECT (id, team, owner, scopes, created_at, expires_at, note), INSERT, DELETE');
CALL gpubroker_protect('secrets', 'SELECT, INSERT, UPDATE (sealed), DELETE');
CALL gpubroker_protect('uploads', 'SELECT, INSERT, UPDATE (bytes, name, summary)');
CALL gpubroker_protect('audit', 'SELECT, INSERT');
-- A team sees itself; only an operator makes or removes one.
CALL gpubroker_protect('teams', 'SELECT, INSERT, DELETE', 'name = gpubroker_team()');
CREATE POLICY made_by_operator ON teams AS RESTRICTIVE FOR INSERT TO gpubroker_api WITH CHECK (gpubroker_operator());
CREATE POLICY removed_by_operator ON teams AS RESTRICTIVE FOR DELETE TO gpubroker_api USING (gpubroker_operator());
