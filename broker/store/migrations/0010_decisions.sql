-- Why each attempt was bought: every offer of its market with the reason why it was kept or dropped.
-- squawk-ignore-file prefer-robust-stmts

SET LOCAL statement_timeout = '60s';

CREATE TABLE decisions (
    attempt_id text PRIMARY KEY REFERENCES attempts (id),
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- JSON, compressed by the broker
    document bytea NOT NULL
);
CREATE TRIGGER decisions_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON decisions
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CALL gpubroker_protect('decisions', 'SELECT', 'EXISTS (SELECT FROM attempts WHERE attempts.id = attempt_id)');
